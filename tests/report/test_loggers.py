"""TensorBoard and MLflow by their real packages: every round, resumed once, and nothing unprotected to a server."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from fedblur.report.loggers import figures, make_logger
from tests.commandline import invoke

SHORT = ("--rounds", 3, "--clients", 40, "--quiet")
ROW = {
    "round": 1, "epsilon": 0.5, "accuracy": 0.25, "loss": 2.0, "seconds": 0.1,
    "local_only": {"cohort": 9, "clipped_share": 0.5, "norm_quantiles": [1, 2, 3, 4, 5], "kappa": None},
}  # fmt: skip


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def test_figures__what_no_noise_protects_is_named_so_or_left_out() -> None:
    assert figures(ROW, local=False) == {"accuracy": 0.25, "loss": 2.0, "epsilon": 0.5}
    assert set(figures(ROW, local=True)) - set(figures(ROW, local=False)) == {
        "local_only/cohort", "local_only/clipped_share", "local_only/seconds", "local_only/median_norm",
    }  # fmt: skip


def test_tensorboard__holds_every_round_once_also_after_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (pip install 'fedblur[tensorboard]')")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    invoke("run", *SHORT, "--out", run, "--logger", "tensorboard", "--set", "checkpoint_every=2", "--seed", 0)
    max((run / "checkpoints").iterdir()).unlink()  # back to round 2
    (run / "summary.json").unlink()
    invoke("resume", run, "--quiet", "--logger", "tensorboard")
    found = EventAccumulator(str(run / "tensorboard")).Reload()
    rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    points = found.Scalars("local_only/clipped_share")
    assert [point.step for point in points] == [1, 2, 3]
    assert [point.value for point in points] == pytest.approx([row["local_only"]["clipped_share"] for row in rows])
    assert [point.step for point in found.Scalars("accuracy")] == [1, 2, 3]
    assert (run / "tensorboard").stat().st_mode & 0o077 == 0


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # between MLflow and its own database library
@pytest.mark.usefixtures("no_server")
def test_mlflow__holds_every_round_and_the_settings(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed (pip install 'fedblur[mlflow]')")
    from mlflow.tracking import MlflowClient

    run = tmp_path / "run"
    invoke("run", *SHORT, "--out", run, "--logger", "mlflow")
    assert (run / "mlflow.db").stat().st_mode & 0o077 == 0
    known = json.loads((run / "mlflow.json").read_text())
    client = MlflowClient(tracking_uri=known["uri"])
    kept = client.get_run(known["run"])
    assert kept.info.status == "FINISHED"
    assert json.loads(kept.data.params["rounds"]) == 3
    assert "local only" in kept.data.tags["fedblur.note"]
    assert [each.step for each in client.get_metric_history(known["run"], "local_only/cohort")] == [
        1,
        2,
        3,
    ]  # a cohort may be empty, and has no share then


@pytest.mark.usefixtures("no_server")
def test_mlflow__a_server_gets_nothing_that_is_local_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed (pip install 'fedblur[mlflow]')")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://tracking.example")
    logger = make_logger("mlflow", tmp_path)
    assert logger.local is False  # type: ignore[attr-defined]
    assert "no local_only figures" in logger.note
    sent: list[str] = []

    class Server:
        def log_metric(self, run: str, name: str, value: float, step: int) -> None:
            sent.append(name)

    logger._client = Server()  # type: ignore[attr-defined]
    logger(ROW)
    assert sent == ["accuracy", "loss", "epsilon"]


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow.tracking")]
)
def test_logger__a_missing_package_is_named_with_its_line_before_anything_is_spent(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(os.environ, "MLFLOW_DISABLE_TELEMETRY", "true")
    shown = " ".join(invoke("run", *SHORT, "--out", tmp_path / "run", "--logger", name, status=2).split())
    assert f"pip install 'fedblur[{name}]'" in shown
    assert not (tmp_path / "run").exists()


def test_logger__an_unknown_name_is_refused(tmp_path: Path) -> None:
    shown = invoke("run", *SHORT, "--out", tmp_path / "run", "--logger", "tensorbord", status=2)
    assert "did you mean 'tensorboard'?" in " ".join(shown.split())
