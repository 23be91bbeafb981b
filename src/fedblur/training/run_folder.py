"""A run folder: config, engine and summary (.json), rounds.jsonl, ledger.jsonl, checkpoints/, model.safetensors.

The folder is a small state machine, and `RunFolder.stage` is the one place that reads it. Every command asks it.

    stage     what lies there                                      what may be done
    empty     no configuration, no ledger                          run
    prepared  a configuration; no checkpoint, no release           run, of the same settings: it starts again
    begun     a checkpoint                                         resume
    complete  a summary that says so                               resume finishes what a kill left undone: no rounds
    search    the ledger of a search, perhaps with its winner      tune, of the same search
    broken    releases, and no checkpoint                          nothing: they count; start a new run elsewhere

A model is never replaced by one of an earlier round, nor by another of its own round after the ledger was closed with
it. The last line of the ledger of a run that ended holds the digests of model, configuration, summary and rounds.
`RunSummary` is the type of summary.json.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedblur.core.callbacks import RUN_ENDED, Row, figures_of
from fedblur.core.config import Config, canonical, differences
from fedblur.core.errors import ConfigError, RunError
from fedblur.core.files import (
    append,
    clear_temporaries,
    drop_empty,
    locked,
    make_folder,
    missing_folders,
    read_bytes,
    read_json,
    read_json_if_there,
    read_json_lines,
    remove,
    remove_folder,
    sync_file,
    write_atomically,
)
from fedblur.data.population import Federation
from fedblur.privacy.claim import Claim, from_json, to_json, why_not_private
from fedblur.privacy.events import PrivateSelection
from fedblur.privacy.ledger import cut_release, randomness_of, read_randomness, read_spends
from fedblur.privacy.ledger_file import close_ledger, read_closing, read_if_there, read_subject
from fedblur.training.checkpoint import has_checkpoint

Stage = Literal["empty", "prepared", "begun", "complete", "search", "broken"]
NOTHING = "nothing released: no trial was drawn"  # the status of a search that ended so
NO_AUDIT = "the ledger says that a part of the user's own passed no audit"
_MOST_BYTES = 2**36  # of a model
# Neither what is local only nor times may decide the closing line: whoever guesses them could test the guess there.
_UNCLOSED = ("local_only", "seconds")


class FolderInUse(RunError):
    """Another process writes here."""


@dataclass(frozen=True)
class RunSummary:
    """The result of a run that ended: of its final round, never of the best one."""

    status: str  # "complete", or how far it got
    rounds: int
    accuracy: float | None = field(default=None, kw_only=True)  # of a classifier
    loss: float
    accuracy_last_10_evaluations: float | None = field(default=None, kw_only=True)
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
    task: str | None = None  # where it is not classification
    metric: str | None = None  # the headline's name, and every metric's figure, where they are not accuracy alone
    figures: dict[str, float] | None = None
    figures_last_10_evaluations: dict[str, float] | None = None

    def __post_init__(self) -> None:
        if not self.figures and self.accuracy is None:
            raise ValueError("a summary has an accuracy or figures")
        if self.figures and self.metric not in self.figures:
            raise ValueError(f"metric={self.metric!r} is not among figures")
        for name, value in self.local_only.items():
            numbers = value if isinstance(value, list) else [value]
            if not all(number is None or isinstance(number, int | float) for number in numbers):
                raise ValueError(f"local_only.{name} must be a number or a list of numbers")

    @property
    def metrics(self) -> dict[str, float]:
        """Return every metric, the headline first."""
        found = figures_of({"figures": self.figures, "accuracy": self.accuracy})
        first = {} if self.metric is None else {self.metric: found[self.metric]}  # files are sorted by name
        return first | found

    @property
    def headline(self) -> tuple[str, float]:
        """Return the first metric's name and figure: what the run is judged by."""
        return next(iter(self.metrics.items()))

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
        self.personal = path / "personal"  # what stays on clients, in a simulation
        self.local_only = path / "local_only"  # what must never be published
        self.participation = self.local_only / "participation.jsonl"
        self.model = path / "model.safetensors"
        self.summary = path / "summary.json"

    # --- what may be done ---

    def stage(self) -> Stage:
        """Return how far the run has come. Raise a RunError where the ledger is damaged."""
        chain = read_if_there(self.ledger)
        spends = read_spends(chain.links)
        if any(isinstance(event, PrivateSelection) for _, event in spends):
            return "search"
        if self.complete:
            return "complete"
        if has_checkpoint(self.checkpoints):
            return "begun"
        if spends or cut_release(chain):
            return "broken"
        return "prepared" if self.config.exists() else "empty"

    def began(self) -> bool:
        """Return whether there is a run to resume. If not, nothing was released: a checkpoint comes first."""
        return self.stage() in ("begun", "complete")

    def demand_begun(self) -> None:
        """Refuse to resume what did not begin, and say what to do instead."""
        self.resolved()
        stage = self.stage()
        if stage == "prepared":
            raise RunError(
                f"{self.path} ended before its first round; start it again: fedblur run {self.config} --out {self.path}"
            )
        if stage == "search":
            raise RunError(f"{self.path} holds a search; to continue it, run the same fedblur tune again")
        if stage == "broken":
            raise RunError(
                f"{self.path} has releases in its ledger and no checkpoint; restore checkpoints/ from a copy, or start "
                "a new run with another --out (on these clients it adds to the total)"
            )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder: until the end of the block nobody else writes here."""
        new = missing_folders(self.path)
        try:
            make_folder(self.path)
        except RunError as error:
            raise RunError(f"{str(error).rpartition(';')[0]}; choose another --out") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise RunError(f"{self.path} is not writable; choose another --out")
        with locked(self.lock) as mine:
            if not mine:
                raise FolderInUse(f"{self.path} is in use by another process; wait until that ends")
            try:
                for folder in (self.path, self.checkpoints, self.personal):
                    clear_temporaries(folder)
                yield
            finally:
                with contextlib.suppress(OSError):  # some systems keep a file that is open
                    os.unlink(self.lock)
                drop_empty(new)  # if nothing came of it

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
        orphan = self.ledger.exists() and not self.config.exists()
        stage = "search" if orphan else self.stage()
        if stage == "search":
            raise RunError(f"{self.path} holds a ledger and no run: what a search has spent; choose another --out")
        changed = differences(self.resolved(), json.loads(canonical(resolved))) if self.config.exists() else []
        if changed:
            raise RunError(
                f"{self.path} holds a run of another configuration ({'; '.join(changed)}); choose another --out"
            )
        if stage in ("begun", "complete"):
            raise RunError(
                f"{self.path} holds a run of this very configuration; go on with: fedblur resume {self.path}"
            )
        if stage == "broken":
            self.demand_begun()
        self.abandon()
        remove_folder(self.personal)
        remove_folder(self.local_only)
        remove(self.rounds, self.model, self.summary)  # of a run whose checkpoints and ledger were removed by hand
        write_atomically(self.config, (json.dumps(json.loads(canonical(resolved)), indent=2) + "\n").encode())

    def abandon(self) -> None:
        """Take back what a run wrote that never started; anything else stays, and `held` takes back the folder.

        A ledger that holds a release stays, and the configuration that it belongs to. The configuration goes last: a
        folder that is left half taken back is still `prepared`.
        """
        if self.stage() in ("empty", "prepared"):
            remove_folder(self.personal)
            remove_folder(self.local_only)
            remove(self.ledger, self.engine, self.config)

    # --- what is written ---

    def resolved(self) -> dict[str, Any]:
        """Read the configuration that the run was started with."""
        try:
            return read_json(self.config, "restore it or start a new run")
        except (FileNotFoundError, NotADirectoryError):
            near = self.path if self.path.is_dir() else self.path.parent
            runs = [path.parent for path in near.glob("*/config.json")]
            newest = max(runs, key=lambda run: run.stat().st_mtime, default=None)
            advice = "give a folder that fedblur run has written" if newest is None else f"did you mean {newest}?"
            raise RunError(f"{self.path} is not a run folder: it has no config.json; {advice}") from None

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
        record = read_json_if_there(self.engine, "delete it to choose again")
        if record is None:  # a run from before engines were recorded
            return None
        if not {"engine", "device"} <= record.keys():
            raise RunError(f"{self.engine} does not name an engine and a device; delete it to choose again")
        return str(record["engine"]) if record["device"] == device else None

    def append_round(self, row: Row) -> None:
        """Append one line to rounds.jsonl. It holds diagnostics that must not leave: nobody else may read it."""
        append(self.rounds, (json.dumps(row) + "\n").encode(), private=True)

    def read_rounds(self) -> list[Row]:
        """Read all whole rows; a line that a crash cut short, or that was damaged, is left out."""
        return [row for row in read_json_lines(self.rounds)[0] if _is_row(row)]  # type: ignore[misc]

    def truncate_rounds(self, last: int) -> list[Row]:
        """Forget the rounds after `last`: a resumed run computes them again."""
        rows = [row for row in self.read_rounds() if row["round"] <= last]
        write_atomically(self.rounds, "".join(json.dumps(row) + "\n" for row in rows).encode(), private=True)
        return rows

    def write_model(self, tensors: Mapping[str, Tensor], round_: int, personal: Sequence[str] = ()) -> bool:
        """Write the model of this round, unless the one that is there was released already. Return whether it did.

        That is one of a later round, or one of this round that the ledger is closed with. `personal`: the parameters
        that are not in it, since each client has its own; the file says so.
        """
        there = self.model_round()
        if there > round_ or (there == round_ and self._is_closed_with_this_model()):
            return False
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        write_atomically(self.model, save(copies, _made(round_, personal)))
        return True

    def _is_closed_with_this_model(self) -> bool:
        closing = read_closing(read_if_there(self.ledger))
        return closing is not None and closing.get("model") == self.released()["model"]

    def model_round(self) -> int:
        """Return the round of the model that is there; -1: none, or one of version 0.2 or that cannot be read."""
        try:
            data = read_bytes(self.model, most=_MOST_BYTES)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            return int(json.loads(header["__metadata__"]["fedblur"])["round"])
        except (OSError, RunError, ValueError, KeyError, TypeError, RecursionError):
            return -1

    def read_model(self) -> dict[str, Tensor]:
        """Read the model."""
        try:
            return load(read_bytes(self.model, most=_MOST_BYTES))
        except FileNotFoundError:
            raise RunError(f"{self.model} is missing; restore it from a copy") from None
        except (SafetensorError, ValueError, KeyError, RecursionError) as error:
            raise RunError(f"{self.model} cannot be read: {error}; restore it from a copy") from None

    def stored_summary(self) -> RunSummary | None:
        """Return summary.json as it lies there; None for a run that has not ended."""
        table = read_json_if_there(self.summary)
        if table is None or table.get("status") == NOTHING:
            return None
        return from_json(RunSummary, table, self.summary)

    def read_summary(self) -> RunSummary | None:
        """Return the summary; None for a run that has not ended.

        Warning, N and σ are not believed: they follow from the configuration and the ledger's first line.
        """
        summary = self.stored_summary()
        return None if summary is None else self._derived(summary)

    def _derived(self, summary: RunSummary) -> RunSummary:
        resolved, chain = read_json_if_there(self.config) or {}, read_if_there(self.ledger)
        subject, recorded = read_subject(chain), read_randomness(chain)
        sigma = summary.privacy.noise_multiplier if subject is None else subject.noise_multiplier
        seeded = "seed" in (recorded, "seed" in resolved and randomness_of(resolved["seed"]))
        reason = summary.privacy.unclaimed or (NO_AUDIT if recorded == "unaudited part" else None)
        clip_norm = summary.privacy.clip_norm
        privacy = replace(
            summary.privacy,
            noise_multiplier=sigma,
            warning=why_not_private(not seeded, sigma, clip_norm, reason),
        )
        if subject is None:  # a search, or a run of version 0.2
            return replace(summary, privacy=privacy)
        return replace(summary, clients=subject.clients, privacy=replace(privacy, unit=subject.unit))

    @property
    def complete(self) -> bool:
        """Whether the run reached its last round; a run that was stopped has a summary too."""
        summary = self.stored_summary()
        return summary is not None and summary.complete

    def write_summary(self, summary: RunSummary) -> None:
        """Write summary.json, close the ledger, and notify those who make something of it (the privacy statement).

        A private search's winner gets no statement yet: when it was made would tell how many trials there were.
        """
        table = json.loads(canonical(to_json(summary)))
        if summary.figures is not None:  # the headline is the first one
            table["figures"] = {name: table["figures"][name] for name in summary.figures}
        # private: it holds local_only figures, each client's own accuracy among them
        write_atomically(self.summary, (json.dumps(table, indent=2) + "\n").encode(), private=True)
        bound = read_subject(read_if_there(self.ledger)) is not None  # not one of version 0.2
        if summary.privacy.selection is not None or bound:
            sync_file(self.rounds)  # or a power failure takes rows that the closing line stands for
            close_ledger(self.ledger, self.released())
        if summary.privacy.selection is None:
            for notify in RUN_ENDED:
                notify(self.path)

    def released(self) -> dict[str, str]:
        """Return the SHA-256 of model and configuration, and of summary and rounds without what must not leave."""
        model = b""
        with contextlib.suppress(FileNotFoundError):
            model = read_bytes(self.model, most=_MOST_BYTES)
        summary = {
            key: value for key, value in (read_json_if_there(self.summary) or {}).items() if key not in _UNCLOSED
        }
        lines, damaged = read_json_lines(self.rounds)  # others than rows, too: someone else may read them
        rows = [{key: value for key, value in line.items() if key not in _UNCLOSED} for line in lines]
        tables = {"config": read_json_if_there(self.config), "summary": summary, "rounds": [*rows, *[None] * damaged]}
        parts = {"model": model} | {name: canonical(table).encode() for name, table in tables.items()}
        return {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()}


def _made(round_: int, personal: Sequence[str]) -> dict[str, str]:
    return {"fedblur": json.dumps({"round": round_, **({"personal": list(personal)} if personal else {})})}


def _is_row(row: Mapping[str, Any]) -> bool:
    """Return whether a line of rounds.jsonl has the form of a row."""
    numbers = [row.get(key) for key in ("epsilon", "accuracy", "loss", "seconds", "rounds")]
    figures = row.get("figures")
    if figures is not None:
        numbers += list(figures.values()) if isinstance(figures, dict) else [figures]
    return (
        type(row.get("round")) is int
        and ("accuracy" in row or "figures" in row)
        and not isinstance(figures, int | float | str | list)
        and all(
            value is None or (isinstance(value, int | float) and value is not True and value == value)
            for value in numbers
        )
        and isinstance(row.get("local_only", {}), dict)
    )


def default_folder(config: Config, federation: Federation | None = None) -> Path:
    """Return runs/DATASET-DATE-TIME, with a counter if that exists."""
    name = federation.name if federation is not None else config.dataset.part_name
    stem = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [Path(stem), *(Path(f"{stem}-{i}") for i in range(2, 1000))]
    return next(path for path in candidates if not path.exists())
