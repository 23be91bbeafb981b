"""Rounds as metrics of an MLflow run: in RUN/mlflow.db, or where MLFLOW_TRACKING_URI says.

A tracking server is another machine, so `local_only` figures are written to files on this one and never sent there.
"""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import urlsplit

from fedblur.core.callbacks import Row
from fedblur.core.errors import ConfigError
from fedblur.core.files import append, read_json_if_there, write_atomically
from fedblur.report.loggers import Occasion, figures
from fedblur.training.run_folder import RunFolder

EXPERIMENT = "fedblur"
_LONGEST = 500  # characters of a parameter


class MlflowLogger:
    """One metric for each figure of a round; the settings are the run's parameters."""

    def __init__(self, occasion: Occasion) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing about a private run is told to anyone
        try:
            import sqlalchemy  # noqa: F401  # its own store on this machine needs it
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise ConfigError(
                "--logger mlflow needs MLflow and SQLAlchemy, which are not here; pip install 'fedblur[mlflow]'"
            ) from None
        self.occasion, self.folder, self.store = occasion, occasion.folder, occasion.home / "mlflow.db"
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.store.resolve().as_posix()}"
        scheme = urlsplit(self.uri).scheme
        self.local = scheme in ("", "file", "sqlite") or len(scheme) == 1  # a drive's letter
        self._make: Any = MlflowClient
        self._client: Any = None
        self._run = ""

    @property
    def note(self) -> str:
        held = "another machine: metrics, loss and ε only, no local_only figures"
        if self.local:
            held = "local only: the guarantee does not protect them"
        elif self.occasion.local_only:
            held = "another machine, with local_only figures, as asked"
        return f"MLflow records: {self.uri} ({held})"

    def __call__(self, row: Row) -> None:
        if self._client is None:
            if self.local and "MLFLOW_TRACKING_URI" not in os.environ:
                append(self.store, b"", private=True)  # SQLite fills it, and keeps its mode
            self._client = self._make(tracking_uri=self.uri)
            known = read_json_if_there(self.folder / "mlflow.json", "delete it") or {}  # of a run that is resumed
            same = known.get("uri") == self.uri and "run" in known
            self._run = str(known["run"]) if same else self._new_run()
        stage = f"{row['stage']}/" if "stage" in row else ""
        for name, value in figures(row, self.local or self.occasion.local_only).items():
            self._client.log_metric(self._run, stage + name, value, step=row["round"])

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run, "FINISHED" if RunFolder(self.folder).complete else "KILLED")

    def _new_run(self) -> str:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else self._client.create_experiment(EXPERIMENT)
        tags = {"mlflow.runName": self.occasion.name, "fedblur.note": self.note}
        tags |= {"fedblur.table": self.occasion.group} if self.occasion.group else {}
        run = str(self._client.create_run(experiment, tags=tags).info.run_id)
        for key, value in RunFolder(self.folder).resolved().items():
            self._client.log_param(run, key, json.dumps(value)[:_LONGEST])
        write_atomically(self.folder / "mlflow.json", json.dumps({"uri": self.uri, "run": run}).encode())
        return run
