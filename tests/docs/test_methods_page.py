"""docs/methods.md: the table names every method that is registered, and every command in it runs."""

import itertools
import json
import math
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedblur.cli.app import app
from fedblur.core.config import REFERENCES
from fedblur.core.registry import Kind, parts

PAGE = Path(__file__).resolve().parents[2] / "docs/methods.md"
COLUMNS = ["method", "idea", "assumes", "what is released", "accounted as", "command"]


def table() -> list[dict[str, str]]:
    """The rows of the page's one table."""
    lines = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert cells[0] == COLUMNS
    return [dict(zip(COLUMNS, row, strict=True)) for row in cells[2:]]


def words(row: dict[str, str]) -> list[str]:
    assert row["command"].startswith("`fedblur run ")
    return shlex.split(row["command"].strip("`"))[1:]


def named(command: list[str]) -> list[tuple[str, str]]:
    """(kind, name) of every part that a command chooses."""
    chosen = [("method", name) for flag, name in itertools.pairwise(command) if flag == "--method"]
    settings = [value.partition("=") for flag, value in itertools.pairwise(command) if flag == "--set"]
    return chosen + [(key, name) for key, _, name in settings if key in ("mechanism", "mask", "clipping", "server")]


def known(kind: Kind) -> set[str]:
    return {*parts(kind)} | ({*parts("voting"), *REFERENCES, "dp-fedavg"} if kind == "method" else set())


@pytest.mark.parametrize("row", table(), ids=lambda row: row["method"])
def test_methods_page__every_command_runs(row: dict[str, str], tmp_path: Path) -> None:
    command = words(row)
    missing = [name for kind, name in named(command) if name not in known(kind)]
    if missing:
        pytest.skip(f"{missing[0]} is not registered")
    quick = ["--rounds", "2", "--seed", "1", "--quiet", "--out", str(tmp_path / "run")]
    for name in {name for _, name in named(command)} & {*parts("voting")}:
        steps = (
            ["student_steps", "teacher_steps"] if hasattr(parts("voting")[name], "teacher_steps") else ["student_steps"]
        )
        quick += [word for key in steps for word in ("--set", f"method.{name}.{key}=10")]
    result = CliRunner().invoke(app, [*command, *quick])
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    epsilon = float(summary["privacy"]["epsilon"])
    assert (epsilon == math.inf) == ("not private" in row["what is released"])
    assert 0 < epsilon <= 2.0 or math.isinf(epsilon)
    assert summary["privacy"]["releases"] >= 1
    assert (tmp_path / "run" / "ledger.jsonl").exists()


@pytest.mark.parametrize("kind", ["method", "mechanism", "mask", "clipping", "voting"])
def test_methods_page__names_everything_that_is_registered(kind: Kind) -> None:
    shown = {name for row in table() for _, name in named(words(row))}
    default = {"gaussian"}
    assert {*parts(kind)} - default <= shown


def test_methods_page__says_who_needs_public_data() -> None:
    assert {row["method"] for row in table() if "public unlabelled pool" in row["assumes"]} == {"AE-DPFL", "kNN-DPFL"}


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (["--method", "fedavg"], "NOT PRIVATE: no noise and no clip norm"),
        (["--method", "clip-only"], "NOT PRIVATE: no noise"),
    ],
)
def test_references__say_that_they_protect_nobody(words: list[str], warning: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", *words, "--rounds", "2", "--quiet", "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert warning in result.stdout
    assert "ε = ∞" in result.stdout


@pytest.mark.parametrize(
    "words", [["--method", "fedavg", "--epsilon", "2"], ["--method", "clip-only", "--set", "epsilon=2.0"]]
)
def test_references__do_not_take_an_epsilon(words: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", *words, "--quiet", "--out", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert "means epsilon=inf, but epsilon=2.0 is given" in " ".join(result.stderr.split())
