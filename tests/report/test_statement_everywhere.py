"""A run that ends has its privacy statement, however it was started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedblur
from fedblur.cli.app import app
from fedblur.core.callbacks import RUN_ENDED
from fedblur.core.config import LocalTraining
from fedblur.core.files import write_atomically
from fedblur.report import statement
from tests.flower.world import LoopGrid, deployment, federated

SHORT = fedblur.Config(
    dataset="digits", clients=40, rounds=2, sample_rate=0.2, local=LocalTraining(steps=1, batch_size=4)
)


def stated(run: Path) -> dict[str, Any]:
    """The facts of the statement, which all three files hold."""
    facts: dict[str, Any] = json.loads((run / "statement.json").read_text())
    for name in ("statement.md", "statement.html"):
        assert facts["ledger"]["head"] in (run / name).read_text()
    assert facts["ledger_findings"] == []
    return facts


def test_train__writes_the_statement(tmp_path: Path) -> None:
    run = fedblur.train(SHORT, out=tmp_path / "run")
    facts = stated(run.path)
    assert facts["private"] is True
    assert facts["epsilon"]["pld"] == run.epsilon
    assert facts["releases"] == 2


def test_cli__run_writes_the_statement_once_and_prints_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def write(path: Path, content: bytes) -> None:
        written.append(path.name)
        write_atomically(path, content)

    monkeypatch.setattr(statement, "write_atomically", write)
    (tmp_path / "run.toml").write_text('dataset = "digits"\nclients = 40\nrounds = 1\nlocal.steps = 1\n')
    result = CliRunner().invoke(app, ["run", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert written == ["statement.md", "statement.html", "statement.json"]
    assert statement.read_statement(tmp_path / "run").shown() in result.stdout


def test_resume__writes_the_statement_of_all_rounds(tmp_path: Path) -> None:
    def stop(row: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedblur.train(SHORT, out=tmp_path / "run", watch=stop)
    assert stated(tmp_path / "run")["releases"] == 1
    assert "stopped after 1 of 2 rounds" in (tmp_path / "run/statement.md").read_text()
    fedblur.resume(tmp_path / "run", tell=lambda text: None)
    assert stated(tmp_path / "run")["releases"] == 2


def test_voting__writes_the_statement(tmp_path: Path) -> None:
    config = replace(SHORT, method={"name": "knn-dpfl", "student_steps": 20}, clients=60)
    facts = stated(fedblur.train(config, out=tmp_path / "run").path)
    assert facts["claim"]["queries"] > 0
    assert facts["releases"] == 1


def test_flower__writes_the_statement(tmp_path: Path) -> None:
    task = deployment(tmp_path, 4, rounds=1, seed=None)
    facts = stated(federated(task, LoopGrid(task, 4, "central"), tmp_path / "run", "central").path)
    assert "real nodes, over Flower" in facts["claim"]["trust_model"]


def test_statement__is_written_because_the_root_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedblur.training.run_folder.RUN_ENDED", [])
    fedblur.train(SHORT, out=tmp_path / "run")
    assert not (tmp_path / "run/statement.md").exists()
    assert len(RUN_ENDED) == 1
