"""Every example runs as it stands, in a new folder, and says what it promises."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commandline import forgotten_parts, invoke

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


def example(name: str) -> Any:
    """Return an example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_own_model__is_forty_lines_and_private_with_its_statement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = EXAMPLES / "own_model.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    accuracy, epsilon = map(float, re.search(r"accuracy ([\d.]+) .* epsilon ([\d.]+)", said).groups())  # type: ignore[union-attr]
    assert accuracy > 0.7
    assert epsilon == 4.0
    (statement,) = (tmp_path / "runs").glob("arrays-*/statement.md")
    assert "not private" not in statement.read_text(encoding="utf-8")


def test_own_method__is_used_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line: tests/core/test_plugins.py."""
    monkeypatch.chdir(tmp_path)
    words = ["run", str(EXAMPLES / "own_method.toml"), "--set", "method.project.radius=2", "--rounds", "3", "--quiet"]
    with forgotten_parts():
        assert re.search(r"^status +complete\b", invoke(*words))
    (config,) = (tmp_path / "runs").glob("*/config.json")
    assert '"name": "project"' in config.read_text(encoding="utf-8")


def test_own_method__the_commands_in_its_docstring_are_right() -> None:
    text = (EXAMPLES / "own_method.py").read_text(encoding="utf-8")
    assert "--plugin examples/own_method.py --method project" in text
    assert "fedblur run examples/own_method.toml" in text


def test_ratings__are_divided_within_each_user() -> None:
    ratings = example("ratings")
    data = ratings.stand_in(users=50)
    part = ratings.parts(data.users)
    for user in range(50):
        mine = part[data.users == user]
        assert (mine == ratings.TEST).sum() == len(mine) // 5
        assert (mine == ratings.VALIDATION).sum() == 3 * len(mine) // 10 - len(mine) // 5
    tuned, final = ratings.federation(data, "validation"), ratings.federation(data)
    assert len(final.train.y) == (part != ratings.TEST).sum()  # what validated trains in the end
    assert len(tuned.train.y) + len(tuned.test) == len(final.train.y)
    assert final.test_owners is not None
    assert (final.test_owners.numpy() == data.users[part == ratings.TEST]).all()


def test_quickstart__has_three_rows_and_make_run_ends_with_the_report_s_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rule = re.search(r"^run:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert rule is not None
    table, report = (line.split("fedblur ")[1].split() for line in rule[1].splitlines())
    assert table == ["table", "examples/quickstart.toml", "--out", "runs/quickstart"]
    assert report == ["report", "runs/quickstart"]
    short = ["--set", "rounds=2", "--set", "eval_every=1"]
    invoke("table", EXAMPLES / "quickstart.toml", *table[2:], *short, "--quiet")
    last = invoke(*report).splitlines()[-1]
    page = (tmp_path / last.removeprefix("Report: ")).read_text(encoding="utf-8")
    for label in ("DP-FedAvg", "DP-FedAvg + BLUR + LUS", "recipe, untuned"):
        assert label in page
