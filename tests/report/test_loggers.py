"""TensorBoard, MLflow and W&B by their real packages: every round, and nothing unprotected to a server."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fedblur.report.loggers import Occasion, figures, make_logger
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
    logger = make_logger("mlflow", Occasion(tmp_path))
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
    ("name", "package"),
    [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow.tracking"), ("wandb", "wandb")],
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


def test_mlflow__a_server_gets_local_only_figures_where_that_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed (pip install 'fedblur[mlflow]')")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://tracking.example")
    logger = make_logger("mlflow", Occasion(tmp_path, local_only=True))
    assert "with local_only figures, as asked" in logger.note


def test_tensorboard__of_a_table_has_a_run_for_each_cell(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (pip install 'fedblur[tensorboard]')")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    spec = tmp_path / "two.toml"
    spec.write_text('[base]\nrounds = 2\nclients = 40\n[axes]\nseed = [0, 1]\n[[rows]]\nlabel = "a/b"\n')
    invoke("table", spec, "--out", tmp_path / "out", "--quiet", "--logger", "tensorboard")
    runs = sorted(path.name for path in (tmp_path / "out/tensorboard").iterdir())
    assert runs == ["a_b _ seed=0", "a_b _ seed=1"]
    found = EventAccumulator(str(tmp_path / "out/tensorboard" / runs[0])).Reload()
    assert [point.step for point in found.Scalars("accuracy")] == [1, 2]


# --- Weights & Biases ---


class FakeRun:
    """What a logger uses of a W&B run."""

    id = "an-id"

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []
        self.ended: int | None = None

    def define_metric(self, name: str, step_metric: str | None = None) -> None: ...

    def log(self, row: dict[str, object]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.ended = exit_code


class FakeWandb:
    """The W&B package, as far as a logger uses it: it keeps what it is given."""

    def __init__(self) -> None:
        self.errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))
        self.runs: list[FakeRun] = []
        self.given: list[dict[str, object]] = []

    def Settings(self, **settings: object) -> dict[str, object]:  # its name there
        return settings

    def init(self, **given: object) -> FakeRun:
        self.given.append(given)
        self.runs.append(FakeRun())
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    made = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", made)  # type: ignore[arg-type]
    monkeypatch.setenv("WANDB_MODE", "offline")
    return made


def test_wandb__gets_metrics_and_settings_and_nothing_that_is_local_only(wandb: FakeWandb, tmp_path: Path) -> None:
    run = tmp_path / "run"
    invoke("run", *SHORT, "--out", run, "--logger", "wandb", "--set", "checkpoint_every=2", "--seed", 0)
    (kept,), (given,) = wandb.runs, wandb.given
    assert [set(row) for row in kept.rows] == [{"round", "accuracy", "loss", "epsilon"}] * 3
    assert [row["round"] for row in kept.rows] == [1, 2, 3]
    assert kept.ended == 0
    assert given["name"] == "run"
    assert given["config"]["rounds"] == 3  # type: ignore[index]
    settings = given["settings"]
    assert settings == {
        "console": "off", "disable_git": True, "disable_code": True, "x_disable_meta": True, "x_disable_stats": True,
        "host": "-", "silent": True,
    }  # fmt: skip
    assert json.loads((run / "wandb.json").read_text()) == {"run": "an-id"}
    (run / "summary.json").unlink()
    max((run / "checkpoints").iterdir()).unlink()
    invoke("resume", run, "--quiet", "--logger", "wandb")
    assert (wandb.given[1]["id"], wandb.given[1]["resume"]) == ("an-id", "allow")


def test_wandb__gets_local_only_figures_where_that_was_asked(wandb: FakeWandb, tmp_path: Path) -> None:
    invoke("run", *SHORT, "--out", tmp_path / "run", "--logger", "wandb", "--log-local-only")
    assert "local_only/cohort" in wandb.runs[0].rows[0]


def test_wandb__of_a_table_groups_its_cells(wandb: FakeWandb, tmp_path: Path) -> None:
    spec = tmp_path / "two.toml"
    spec.write_text('[base]\nrounds = 2\nclients = 40\n[axes]\nseed = [0, 1]\n[[rows]]\nlabel = "a"\n')
    invoke("table", spec, "--out", tmp_path / "out", "--quiet", "--logger", "wandb")
    assert [given["name"] for given in wandb.given] == ["a | seed=0", "a | seed=1"]
    assert {given["group"] for given in wandb.given} == {"out"}
    assert [run.ended for run in wandb.runs] == [0, 0]


def test_wandb__without_a_login_is_refused_before_anything_is_spent(
    wandb: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    shown = " ".join(invoke("run", *SHORT, "--out", tmp_path / "run", "--logger", "wandb", status=2).split())
    assert "run wandb login" in shown
    assert not (tmp_path / "run").exists()


def test_wandb__the_real_package_writes_offline_what_it_was_given(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (pip install 'fedblur[wandb]')")
    script = "from fedblur.cli.app import main; main()"
    words = [str(word) for word in ("run", *SHORT, "--out", tmp_path / "run", "--logger", "wandb")]
    subprocess.run(
        [sys.executable, "-c", script, *words], env={**os.environ, "WANDB_MODE": "offline"}, check=True, timeout=300
    )
    (kept,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    data = kept.read_bytes()
    assert data.count(b"epsilon") >= 3
    assert b"local_only/" not in data
    assert b"clipped_share" not in data
    if len(name := platform.node()) > 5:  # a short one may be part of a random id
        assert name.encode() not in data
