"""`fedblur run --data` and `fedblur data describe`: flags about columns, alone and with a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedblur.cli.app import app
from tests.data.test_table import frame, pa

assert pa  # skipped without it

COLUMNS = ["--user-column", "reader", "--target-column", "stars"]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDBLUR_POPULATIONS", str(tmp_path / "populations"))
    frame().to_csv("rows.csv", index=False)
    return tmp_path


def said(*words: str) -> str:
    result = CliRunner().invoke(app, [*words])
    assert result.exception is None, result.exception
    return result.stdout


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_run__a_table_by_flags_is_in_the_run_folder_and_a_file_may_hold_the_rest(rows: Path) -> None:
    (rows / "run.toml").write_text(
        'task = "regression"\nrounds = 1\nsample_rate = 0.5\nseed = 1\nlocal.steps = 1\n'
        '[dataset]\nname = "table"\nuser = "reader"\ntarget = "stars"\nsplit = "users"\n'
    )
    said("run", "run.toml", "--data", "rows.csv", "--feature-columns", "age", "--out", "run", "--quiet")
    stored = json.loads((rows / "run" / "config.json").read_text())["dataset"]
    assert (stored["name"], stored["path"], stored["features"], stored["split"]) == (
        "table",
        "rows.csv",
        ["age"],
        "users",
    )
    assert "verified, 1 releases" in said("ledger", "verify", "run")


def test_flags__that_say_nothing_alone_or_contradict_are_refused() -> None:
    assert "need --data FILE" in refused("run", "--user-column", "reader")
    assert "are both given" in refused("run", "--dataset", "digits", "--data", "rows.csv")


def test_describe__as_json_has_every_column(rows: Path) -> None:
    words = [
        "data",
        "describe",
        "rows.csv",
        *COLUMNS,
        "--feature-columns",
        "age,title",
        "--text-column",
        "title",
        "--json",
    ]
    found = json.loads(said(*words))
    assert (found["users"], found["inputs"], [*found["columns"]]) == (40, {"numbers": [1025]}, ["age", "title"])
    assert found["rows"] == 600


def test_data__commands_about_classes_and_copies_point_to_describe(rows: Path) -> None:
    given = [f"dataset.{key}={value}" for key, value in
             {"path": "rows.csv", "user": "reader", "target": "stars", "features": '["age"]'}.items()]  # fmt: skip
    sets = [word for each in given for word in ("--set", each)]
    assert "fedblur data describe" in refused("data", "show", "table", *sets)
    assert "read where it lies" in refused("data", "fetch", "table")
    assert "read where it lies" in refused("data", "export", "table", "there")
