"""A run folder: config, engine and summary (.json), rounds.jsonl, ledger.jsonl, checkpoints/, model.safetensors.

`RunSummary` is the type of summary.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedblur.core.callbacks import RUN_ENDED, Row
from fedblur.core.config import Config, canonical, differences
from fedblur.core.errors import ConfigError, RunError
from fedblur.core.files import locked, write_atomically
from fedblur.data.population import Federation
from fedblur.privacy.claim import Claim, from_json, to_json


class FolderInUse(RunError):
    """Another process writes here."""


@dataclass(frozen=True)
class RunSummary:
    """The result of a run that ended: of its final round, never of the best one."""

    status: str  # "complete", or how far it got
    rounds: int
    accuracy: float
    loss: float
    accuracy_last_10_evaluations: float | None
    evaluated_on: str
    data: str
    data_note: str
    clients: int
    parameters: int
    privacy: Claim
    local_only: dict[str, Any]  # never to be published
    seconds: float | None
    versions: dict[str, str]
    sent_coordinates: int | None = None  # k, of a round's release
    machine: str | None = None

    @property
    def complete(self) -> bool:
        return self.status == "complete"


class RunFolder:
    """The folder that a run is written to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.engine = path / "engine.json"
        self.rounds = path / "rounds.jsonl"
        self.ledger = path / "ledger.jsonl"
        self.lock = path / ".lock"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model.safetensors"
        self.summary = path / "summary.json"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder: until the end of the block nobody else writes here."""
        new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.path} cannot be made: {error.strerror}; choose another --out") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise RunError(f"{self.path} is not writable; choose another --out")
        with locked(self.lock) as mine:
            if not mine:
                raise FolderInUse(f"{self.path} is in use by another process; wait until that ends")
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # some systems keep a file that is open
                    self.lock.unlink()
                    if new:
                        self.path.rmdir()  # if nothing came of it

    def in_use(self) -> bool:
        """Return whether another process writes here now."""
        if not self.lock.exists():
            return False
        with locked(self.lock) as mine:
            return not mine

    def begin(self, resolved: Mapping[str, Any]) -> None:
        """Take the folder, which is `held`, for a new run; one that is already there is refused, never overwritten.

        Except a run of these very settings that ended before it began (while its data were loaded): it starts again.
        """
        if self.ledger.exists() and not self.config.exists():
            raise RunError(f"{self.path} holds a ledger and no run: what a search has spent; choose another --out")
        changed = differences(self.resolved(), json.loads(canonical(resolved))) if self.config.exists() else []
        if self.config.exists() and (changed or self.began()):
            what = f"another configuration ({'; '.join(changed)})" if changed else "this very configuration"
            way_out = "choose another --out" if changed else f"go on with: fedblur resume {self.path}"
            raise RunError(f"{self.path} holds a run of {what}; {way_out}")
        write_atomically(self.config, (json.dumps(json.loads(canonical(resolved)), indent=2) + "\n").encode())

    def began(self) -> bool:
        """Return whether anything was saved. If not, nothing was paid: a checkpoint comes before the first release."""
        return self.checkpoints.exists() or self.rounds.exists() or self.summary.exists()

    def abandon(self) -> None:
        """Take back what a run wrote that never started; anything else stays, and `held` takes back the folder."""
        for path in (self.config, self.engine, self.ledger):
            path.unlink(missing_ok=True)

    def resolved(self) -> dict[str, Any]:
        """Read the configuration that the run was started with."""
        try:
            table = json.loads(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            near = self.path if self.path.is_dir() else self.path.parent
            runs = [path.parent for path in near.glob("*/config.json")]
            newest = max(runs, key=lambda run: run.stat().st_mtime, default=None)
            advice = "give a folder that fedblur run has written" if newest is None else f"did you mean {newest}?"
            raise RunError(f"{self.path} is not a run folder: it has no config.json; {advice}") from None
        except (OSError, ValueError) as error:
            raise RunError(f"{self.config} cannot be read: {error}; restore it or start a new run") from None
        if not isinstance(table, dict):
            raise RunError(f"{self.config} is not the configuration of a run; restore it or start a new run")
        return table

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Name the configuration in an error: it may have made sense elsewhere."""
        try:
            yield
        except ConfigError as error:
            raise RunError(f"{self.config}: {error} (was it written by another version of fedblur?)") from None

    def record_engine(self, kind: str, device: str, words: str) -> None:
        """Record which engine computes this run: another one would give other bits."""
        record = {"engine": kind, "device": device, "machine": words}
        write_atomically(self.engine, (json.dumps(record, indent=2) + "\n").encode())

    def recorded_engine(self, device: str) -> str | None:
        """Return the engine that this run was started with on this kind of device; None if that is not known."""
        try:
            record = json.loads(self.engine.read_text(encoding="utf-8"))
            return str(record["engine"]) if record["device"] == device else None
        except FileNotFoundError:  # a run from before engines were recorded
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self.engine} cannot be read: {error}; delete it to choose anew") from None

    def append_round(self, row: Row) -> None:
        """Append one line to rounds.jsonl."""
        try:
            with self.rounds.open("a", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise RunError(f"{self.rounds} cannot be written: {error.strerror}; free space and resume") from None

    def read_rounds(self) -> list[Row]:
        """Read all whole lines; a line that a crash cut short is left out."""
        if not self.rounds.exists():
            return []
        rows = []
        for line in self.rounds.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows

    def truncate_rounds(self, last: int) -> list[Row]:
        """Forget the rounds after `last`: a resumed run computes them again."""
        rows = [row for row in self.read_rounds() if row["round"] <= last]
        write_atomically(self.rounds, "".join(json.dumps(row) + "\n" for row in rows).encode())
        return rows

    def read_summary(self) -> RunSummary | None:
        """Return summary.json; None for a run that has not ended."""
        table = read_json(self.summary)
        return from_json(RunSummary, table, self.summary) if table else None

    @property
    def complete(self) -> bool:
        """Whether the run reached its last round; a run that was stopped has a summary too."""
        summary = self.read_summary()
        return summary is not None and summary.complete

    def write_summary(self, summary: RunSummary) -> None:
        """Write summary.json, and what is made from it (the privacy statement).

        A private search's winner gets no statement yet: when it was made would tell how many trials there were.
        """
        text = json.dumps(json.loads(canonical(to_json(summary))), indent=2)
        write_atomically(self.summary, (text + "\n").encode())
        if summary.privacy.selection is None:
            for notify in RUN_ENDED:
                notify(self.path)


def default_folder(config: Config, federation: Federation | None = None) -> Path:
    """Return runs/DATASET-DATE-TIME, with a counter if that exists."""
    name = federation.name if federation is not None else config.dataset.part_name
    stem = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [Path(stem), *(Path(f"{stem}-{i}") for i in range(2, 1000))]
    return next(path for path in candidates if not path.exists())


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
