"""The command line as a whole: JSON everywhere, completion, help, exit codes as documented."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

import fedblur.cli.run
from fedblur.cli import errors
from fedblur.cli.app import app, main
from fedblur.core.registry import parts
from tests.docs.test_commands import wrong

ROOT = Path(__file__).resolve().parents[2]
SERVERS = {"deploy gateway", "watch"}  # they serve until they are stopped, and print no result
QUICK = ["--rounds", "2", "--seed", "1", "--quiet"]


def leaves(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(leaves(typer.main.get_command(app)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "one"
    assert CliRunner().invoke(app, ["run", *QUICK, "--out", str(path)]).exit_code == 0
    return path


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - SERVERS))
def test_json__every_command_that_prints_results_has_it(name: str) -> None:
    assert any("--json" in option.opts for option in COMMANDS[name].params)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help__explains_every_command_and_option(name: str) -> None:
    assert len(COMMANDS[name].help or "") > 20
    (example,) = re.findall(r"^Example: `(fedblur .*)`$", COMMANDS[name].help or "", re.MULTILINE)
    assert example.startswith(f"fedblur {name}")
    assert not wrong(example.removeprefix("fedblur "))
    for option in COMMANDS[name].params:
        assert isinstance(option, click.Option | click.Argument)
        assert getattr(option, "help", None), f"{name}: {option.name}"


@pytest.mark.parametrize(
    "words",
    [
        "run --rounds 2 --seed 1 --out OTHER",
        "resume RUN",
        "plan --clients 100 --sample-rate 0.1 --rounds 10 --epsilon 2",
        "table SPEC --dry-run",
        "table SPEC --out OTHER",
        "tune SPEC --dry-run",
        "audit --worst-case --repetitions 400",
        "statement RUN",
        "data list",
        "data fetch digits",
        "data show plays",
        "ledger show RUN RUN",
        "ledger verify RUN",
        "deploy init OTHER",
    ],
)
def test_json__is_one_document_and_nothing_else(words: str, run: Path, tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text('[base]\nrounds = 2\n[[rows]]\nlabel = "a"\n[[rows]]\nlabel = "b"\nclip_norm = 0.2\n')
    named = {"RUN": str(run), "SPEC": str(spec), "OTHER": str(tmp_path / "other")}
    result = CliRunner().invoke(app, [*(named.get(word, word) for word in words.split()), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)


def complete(line: str) -> list[str]:
    """What bash would offer after this line."""
    words = line.split(" ")
    environment = {
        **os.environ, "_FEDBLUR_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "fedblur"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_completion__reaches_the_shell() -> None:
    assert complete("fedblur run --method blur+l") == ["blur+lus"]


@pytest.mark.parametrize(("flag", "kind"), [("dataset", "dataset"), ("model", "model"), ("method", "method")])
def test_help__names_every_part_and_the_shell_completes_them(flag: str, kind: str) -> None:
    option = next(option for option in COMMANDS["run"].params if option.name == flag)
    for name in parts(kind):  # type: ignore[arg-type]
        assert re.search(rf"\b{name}\b", getattr(option, "help", "")), name
    offered = [item.value for item in option.shell_complete(click.Context(COMMANDS["run"]), "")]
    assert set(parts(kind)) <= set(offered)  # type: ignore[arg-type]


def test_version__is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("fedblur ")


# --- exit codes ---


def documented() -> dict[int, str]:
    text = (ROOT / "docs/exit-codes.md").read_text(encoding="utf-8")
    return {int(code): words for code, words in re.findall(r"^\| (\d+) \| ([^|]+) \|", text, re.MULTILINE)}


def test_exit_codes__the_page_lists_those_of_the_code() -> None:
    assert set(documented()) == {0, errors.FOUND, errors.BAD_INPUT, errors.BUG, errors.STOPPED}


def test_exit_codes__no_command_ends_with_another_one() -> None:
    for path in (ROOT / "src/fedblur/cli").glob("*.py"):
        for used in re.findall(r"(?:typer\.Exit|sys\.exit)\((.*?)\)", path.read_text(encoding="utf-8")):
            assert used in ("", "FOUND", "BAD_INPUT", "BUG", "STOPPED"), f"{path.name}: {used}"


def test_exit_codes__found(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    lines = (copy / "ledger.jsonl").read_text().splitlines()
    (copy / "ledger.jsonl").write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    result = CliRunner().invoke(app, ["ledger", "verify", str(copy), "--json"])
    assert result.exit_code == errors.FOUND
    assert json.loads(result.stdout)[0]["verified"] is False


def test_exit_codes__bad_input_is_one_line(run: Path) -> None:
    result = CliRunner().invoke(app, ["run", "--out", str(run), *QUICK])
    assert result.exit_code == errors.BAD_INPUT
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_exit_codes__a_bug_shows_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*unused: object, **also: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(fedblur.cli.run, "train", broken)
    monkeypatch.setattr(sys, "argv", ["fedblur", "run", "--rounds", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == errors.BUG
    assert "ZeroDivisionError: planted" in said
    assert "please report" in said


def test_exit_codes__stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*unused: object, **also: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fedblur.cli.run, "train", stopped)
    result = CliRunner().invoke(app, ["run", "--rounds", "1"])
    assert result.exit_code == errors.STOPPED
    assert "fedblur resume" in result.stderr
