"""What version 0.2 wrote is read, resumed and shown: run folders, a table, a deployed app (fixtures/version_0_2)."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedblur
from tests.commandline import invoke

MADE = Path(__file__).parent / "fixtures/version_0_2"
LOCAL = fedblur.Machine(device="cpu")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A copy that a test may write to."""
    return Path(shutil.copytree(MADE, tmp_path / "made"))


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_run_folder__is_resumed_to_the_model_of_a_run_that_was_never_stopped(made: Path) -> None:
    before = lines(made / "stopped/ledger.jsonl")
    run = fedblur.resume(made / "stopped", machine=LOCAL, tell=lambda text: None)
    whole = json.loads((MADE / "whole/summary.json").read_text())
    assert lines(made / "stopped/ledger.jsonl")[: len(before)] == before
    assert len(lines(made / "stopped/ledger.jsonl")) == len(lines(MADE / "whole/ledger.jsonl"))
    assert (run.accuracy, run.epsilon) == (whole["accuracy"], whole["privacy"]["epsilon"])
    ours, theirs = load_file(made / "stopped/model.safetensors"), load_file(MADE / "whole/model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name])
    assert [json.loads(row)["round"] for row in lines(made / "stopped/rounds.jsonl")] == list(range(1, 13))


def test_run_folder__that_is_complete_spends_nothing_when_resumed(made: Path) -> None:
    before = (made / "private/ledger.jsonl").read_bytes()
    assert fedblur.resume(made / "private", machine=LOCAL, tell=lambda text: None).epsilon <= 8
    assert (made / "private/ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize("run", ["whole", "private", "votes", "table/cells/040f77f7a93b"])
def test_run_folder__is_verified_stated_and_shown(made: Path, run: str) -> None:
    invoke("ledger", "verify", made / run)
    said = json.loads(invoke("statement", made / run, "--json"))
    old = json.loads((MADE / run / "summary.json").read_text())
    assert said["epsilon"]["pld"] == pytest.approx(old["privacy"]["epsilon"], rel=1e-6)
    assert said["private"] == (run == "private")
    page = made / "report.html"
    invoke("report", made / run, "--out", page)
    assert "ε" in page.read_text(encoding="utf-8")


def part_of(new: Any, old: Any) -> Any:
    """Return what `old` says of `new`: a later version may say more, also further down."""
    return {key: part_of(new[key], old[key]) for key in old} if isinstance(old, dict) else new


def test_statement__says_what_version_0_2_said_of_the_same_run(made: Path) -> None:
    old = json.loads((MADE / "private/statement.json").read_text())
    new = json.loads(invoke("statement", made / "private", "--json"))
    del old["made"]
    assert part_of(new, old) == old


def test_table__computes_nothing_again_and_shows_what_was_found(made: Path) -> None:
    kept = {path.name: path.read_bytes() for path in (made / "table/results").iterdir()}
    shown = json.loads(invoke("table", made / "table.toml", "--out", made / "table", "--json"))
    accuracies = sorted(json.loads(text)["accuracy"] for text in kept.values())
    assert sorted(line["accuracy"] for line in shown["lines"]) == pytest.approx([100 * each for each in accuracies])
    assert {path.name: path.read_bytes() for path in (made / "table/results").iterdir()} == kept
    assert len(list((made / "table/cells").iterdir())) == 2


def test_app__made_by_deploy_init_starts_with_the_modules_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    flwr = pytest.importorskip("flwr")
    monkeypatch.syspath_prepend(str(MADE / "app/app"))
    try:
        import federation.client_app  # type: ignore[import-not-found]
        import federation.server_app  # type: ignore[import-not-found]

        assert isinstance(federation.client_app.app, flwr.clientapp.ClientApp)
        assert isinstance(federation.server_app.app, flwr.serverapp.ServerApp)
        assert federation.client_app.task.configuration().clients == 3
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "federation"]:
            del sys.modules[name]
