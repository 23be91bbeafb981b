"""A run folder: config, engine and summary (.json), rounds.jsonl, ledger.jsonl, checkpoints/, model.safetensors."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedblur.checkpoint import write_atomically
from fedblur.config import Config, canonical, differences
from fedblur.data.population import Federation
from fedblur.errors import ConfigError, RunError
from fedblur.locking import alone


class FolderInUse(RunError):
    """Another process writes here."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run is written."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def engine(self) -> Path:
        return self.path / "engine.json"

    @property
    def rounds(self) -> Path:
        return self.path / "rounds.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else's to write until the end of the block."""
        new = not self.path.exists()
        self._make()
        with alone(self.lock) as mine:
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
        """Whether another process writes here now."""
        if not self.lock.exists():
            return False
        with alone(self.lock) as mine:
            return not mine

    def begin(self, resolved: Mapping[str, Any]) -> None:
        """Take the folder, which is `held`, for a new run; one that is already there is refused, never overwritten.

        Except a run of these very settings that ended before it began (while its data were loaded): it begins anew.
        """
        if self.ledger.exists() and not self.config.exists():
            raise RunError(f"{self.path} holds a ledger and no run: what a search has spent; choose another --out")
        changed = differences(self.resolved(), json.loads(canonical(resolved))) if self.config.exists() else []
        if self.config.exists() and (changed or self.began()):
            what = f"another configuration ({'; '.join(changed)})" if changed else "this very configuration"
            way_out = "choose another --out" if changed else f"go on with: fedblur resume {self.path}"
            raise RunError(f"{self.path} holds a run of {what}; {way_out}")
        write_atomically(self.config, (json.dumps(json.loads(canonical(resolved)), indent=2) + "\n").encode())

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.path} cannot be made: {error.strerror}; choose another --out") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise RunError(f"{self.path} is not writable; choose another --out")

    def began(self) -> bool:
        """Whether anything was saved; if not, nothing was paid for: a first checkpoint comes before a first release."""
        return self.checkpoints.exists() or self.rounds.exists() or self.summary.exists()

    def abandon(self) -> None:
        """Take back what a run wrote that never started; anything else stays, and `held` takes back the folder."""
        for path in (self.config, self.engine, self.ledger):
            path.unlink(missing_ok=True)

    def resolved(self) -> dict[str, Any]:
        """The configuration that the run was started with."""
        try:
            table = json.loads(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunError(f"{self.path} is not a run folder: it has no config.json; {self._suggestion()}") from None
        except (OSError, ValueError) as error:
            raise RunError(f"{self.config} cannot be read: {error}; restore it or start a new run") from None
        if not isinstance(table, dict):
            raise RunError(f"{self.config} is not the configuration of a run; restore it or start a new run")
        return table

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A configuration that makes no sense here may have done so elsewhere: say whose it is."""
        try:
            yield
        except ConfigError as error:
            raise RunError(f"{self.config}: {error} (was it written by another version of fedblur?)") from None

    def _suggestion(self) -> str:
        """The newest run nearby."""
        near = self.path if self.path.is_dir() else self.path.parent
        runs = [path.parent for path in near.glob("*/config.json")]
        newest = max(runs, key=lambda run: run.stat().st_mtime, default=None)
        return "give a folder that fedblur run has written" if newest is None else f"did you mean {newest}?"

    def record_engine(self, kind: str, device: str, words: str) -> None:
        """Which engine computes this run: another one would give other bits."""
        record = {"engine": kind, "device": device, "machine": words}
        write_atomically(self.engine, (json.dumps(record, indent=2) + "\n").encode())

    def recorded_engine(self, device: str) -> str | None:
        """The engine that this run was started with on this kind of device; None where that is not known."""
        try:
            record = json.loads(self.engine.read_text(encoding="utf-8"))
            return str(record["engine"]) if record["device"] == device else None
        except FileNotFoundError:  # a run from before engines were recorded
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self.engine} cannot be read: {error}; delete it to choose anew") from None

    def append_round(self, row: Mapping[str, Any]) -> None:
        """One line of rounds.jsonl."""
        try:
            with self.rounds.open("a", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise RunError(f"{self.rounds} cannot be written: {error.strerror}; free space and resume") from None

    def read_rounds(self) -> list[dict[str, Any]]:
        """All whole lines; a line that a crash cut short is left out."""
        if not self.rounds.exists():
            return []
        rows = []
        for line in self.rounds.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows

    def truncate_rounds(self, last: int) -> list[dict[str, Any]]:
        """Forget the rounds after `last`: a resumed run computes them again."""
        rows = [row for row in self.read_rounds() if row["round"] <= last]
        write_atomically(self.rounds, "".join(json.dumps(row) + "\n" for row in rows).encode())
        return rows

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_atomically(self.summary, (json.dumps(json.loads(canonical(summary)), indent=2) + "\n").encode())


def default_folder(config: Config, federation: Federation | None = None) -> Path:
    """runs/DATASET-DATE-TIME, with a counter where that exists."""
    name = federation.name if federation is not None else config.dataset.part_name
    stem = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [Path(stem), *(Path(f"{stem}-{i}") for i in range(2, 1000))]
    return next(path for path in candidates if not path.exists())
