"""Tiny worlds for the sweeps: each command on a few clients takes 50 ms. And what leaves such a command is counted."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from fedblur.cli.app import app
from fedblur.core.config import read_toml
from fedblur.experiments import search_runner
from fedblur.experiments.audit import one_shot
from fedblur.experiments.recipe import configure
from fedblur.training import loop
from fedblur.training.machine import Machine
from fedblur.voting import protocol as voting

MACHINE = ["--device", "cpu", "--engine", "sequential", "--quiet"]
_BASE = """
dataset = { name = "synthetic", min_samples = 8, max_samples = 12, held_out_clients = 4 }
clients = 6
rounds = 2
sample_rate = 0.5
noise_multiplier = 1.0
checkpoint_every = 1
eval_every = 1
validation_share = 0.3
local = { steps = 2, batch_size = 4, learning_rate = 0.5 }
"""
_VOTES = 'method = [{ name = "knn-dpfl", student_steps = 3, pool_share = 0.4, student_batch_size = 4 }]\n'
FILES = {
    "private.toml": _BASE,
    "seeded.toml": _BASE.replace("rounds = 2", "rounds = 3").replace("checkpoint_every = 1", "checkpoint_every = 2")
    + "seed = 1\n",
    "table.toml": f"[base]\n{_BASE}[axes]\nseed = [1, 2]\n",
    "private-table.toml": f'[base]\n{_BASE}[[rows]]\nlabel = "private"\n',
    "grid.toml": f"[base]\n{_BASE}seed = 3\n[axes]\nclip_norm = [0.1, 0.2]\n",
    "private-grid.toml": f"[base]\n{_BASE}[axes]\nclip_norm = [0.1, 0.2]\n",
    "votes.toml": _BASE + _VOTES,
    "seeded-votes.toml": _BASE + _VOTES + "seed = 4\n",
}
AUDIT = ["--canaries", "100", "--held-out", "100"]
SEARCH = ["--trials", "2", "--eta", "1"]  # at least one trial
ONE_TRIAL = ["--trials", "1.1", "--eta", "1"]
CROWD = ["--population", "crowd"]
PROXY = ["--proxy", "synthetic", "--proxy-set", "dataset.alpha=0.5"]


_FSYNC = os.fsync
HANG = 60  # seconds of computing, or of waiting: only what never ends reaches it


@dataclass(frozen=True)
class Outcome:
    """What a command printed, and how it ended."""

    status: int
    out: str
    err: str
    bug: str = ""  # a traceback

    @property
    def said(self) -> str:
        return " ".join(f"{self.err}\n{self.out}".split())


def invoke(words: list[str]) -> Outcome:
    """Run a command in this process. Syncing takes most of its time, and matters to a simulated disk alone."""
    quick = contextlib.nullcontext() if os.fsync is not _FSYNC else mock.patch.object(os, "fsync")
    with quick, _no_hang():
        try:
            result = CliRunner().invoke(app, words)
        except Hung:
            return Outcome(70, "", "", f"it hangs:\n{traceback.format_exc()}")
    bug = ""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        bug = "".join(traceback.format_exception(*result.exc_info)) if result.exc_info else repr(result.exception)
    return Outcome(result.exit_code, result.stdout, result.stderr, bug)


def at_home(world: Path) -> AbstractContextManager[object]:
    """Let populations lie in this world: what is written there passes its disk."""
    return mock.patch.dict(os.environ, FEDBLUR_POPULATIONS=str(world / "people"))


class Hung(BaseException):
    """A command that does not end."""


@contextlib.contextmanager
def _no_hang() -> Iterator[None]:
    """Raise `Hung` in a command that does not end; for the main thread, and where there are alarms.

    On a busy machine a command may wait long for its turn: it hangs if it computed for so long, or nothing in so long.
    """
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    began = seen = time.process_time()

    def ring(number: int, frame: object) -> None:
        nonlocal seen
        now = time.process_time()
        if now - began > HANG or now - seen < 0.1:
            raise Hung
        seen = now
        signal.alarm(HANG)

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(HANG)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def demand(words: list[str], status: int = 0) -> Outcome:
    """Run a command that must succeed."""
    outcome = invoke(words)
    assert (outcome.status, outcome.bug) == (status, ""), (words, outcome)
    return outcome


def write_files(root: Path) -> None:
    """Write the configurations."""
    root.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (root / name).write_text(text)


def fresh(kept: Path, world: Path) -> None:
    """Make the world what was kept."""
    shutil.rmtree(world, ignore_errors=True)
    shutil.copytree(kept, world, symlinks=True)


def stopped(
    root: Path, file: str, out: Path, after: int = 1, by: type[BaseException] = KeyboardInterrupt, **more: Any
) -> None:
    """Start a run and stop it after a round. `more`: settings beside those of the file."""

    def stop(row: Any) -> None:
        if row["round"] == after:
            raise by

    config = configure(read_toml(root / file) | more)
    with contextlib.suppress(by):
        loop.train(config, out=out, machine=Machine(device="cpu", engine="sequential"), watch=stop)


# --- what leaves the process ---


@dataclass
class Releases:
    """Every release of the commands in the block, by the ledger that must hold it."""

    found: dict[Path, set[tuple[Any, str]]] = field(default_factory=dict)

    def note(self, ledger: Path, name: Any, content: Any) -> None:
        data = content if isinstance(content, bytes) else content.detach().cpu().numpy().tobytes()
        self.found.setdefault(ledger, set()).add((name, hashlib.sha256(data).hexdigest()))

    @contextlib.contextmanager
    def counted(self) -> Iterator[Releases]:
        """Count what rounds, searches and votes release."""
        run_round, release, labels = loop.run_round, search_runner._release, voting._ElectionRun._release

        def counting(real: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(real)
            def counted_round(protocol: Any, state: Any, rng: Any) -> Any:
                result = real(protocol, state, rng)
                self.note(protocol.ledger.path, result.state.round, result.state.theta)
                return result

            return counted_round

        def winner(trial: Any, winner: Any, out: Any, stated: Any) -> Any:
            self.note(out.ledger, "winner", winner.model.read_bytes())
            return release(trial, winner, out, stated)

        def drawn(running: Any, *values: Any) -> Any:
            result = labels(running, *values)
            self.note(running.election.ledger.path, "labels", result[0])
            return result

        with (
            mock.patch.object(loop, "run_round", counting(run_round)),
            mock.patch.object(one_shot, "run_round", counting(one_shot.run_round)),
            mock.patch.object(search_runner, "_release", winner),
            mock.patch.object(voting._ElectionRun, "_release", drawn),
        ):
            yield self

    def underpaid(self) -> list[str]:
        """Return the ledgers that hold fewer spends than there were releases. Trials of a search release nothing."""
        return [
            f"{path}: {len(names)} releases, {spends(path)} in the ledger"
            for path, names in self.found.items()
            if "-local-only" not in str(path) and len(names) > spends(path)
        ]


def spends(ledger: Path) -> int:
    """Count a ledger's releases as its text has them; a line that was cut short counts."""
    try:
        *lines, torn = ledger.read_bytes().split(b"\n")
    except OSError:
        return 0
    count = 0
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            count += json.loads(line)["body"]["kind"] == "spend"
    return count + bool(torn and lines)


def model_round(folder: Path) -> int:
    """Return the round that a model says it is of; -1: none."""
    try:
        data = (folder / "model.safetensors").read_bytes()
        return int(
            json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["fedblur"])["round"]
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return -1


def shown_but_unpaid(root: Path) -> list[str]:
    """Return folders that show a round which their ledger does not hold."""
    found = []
    for config in root.rglob("config.json"):
        folder = config.parent
        paid = spends(folder / "ledger.jsonl")
        if "local_only" in str(folder):
            continue
        if json.loads(config.read_bytes() or b"{}").get("method", [{}])[:1] and _votes(folder):
            shown = int(
                (folder / "model.safetensors").exists()
                or any(b'"labels"' in path.read_bytes()[:4000] for path in folder.glob("checkpoints/*.safetensors"))
            )
        elif (folder / "checkpoints").exists():
            rounds = [int(path.stem[6:]) for path in folder.glob("checkpoints/round-*.safetensors")]
            shown = max([0, *rounds, model_round(folder)])
        else:
            shown = int((folder / "model.safetensors").exists())
        if shown > paid:
            found.append(f"{folder} shows round {shown}, its ledger holds {paid} releases")
    return found


def uncounted(world: Path) -> list[str]:
    """Return the ledgers of which their population counts fewer releases than they hold, or more than it has reserved.

    Trials of a search are covered by the search. Until it ends, its folder has no configuration.
    """
    known = {}
    for path in world.glob("people/*/runs/*.json"):
        with contextlib.suppress(OSError, ValueError):
            entry = json.loads(path.read_bytes())
            known[entry["ledger"]] = entry["spent"] if entry["spent"] <= entry["allowed"] else -1
    found = []
    for ledger in world.glob("out/**/ledger*.jsonl") if known or (world / "people").exists() else ():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            config = {"population": "of a search"}
            if (ledger.parent / "config.json").exists():
                config = json.loads((ledger.parent / "config.json").read_bytes())
            own = json.loads(ledger.read_bytes().split(b"\n")[0])["body"]["id"]
            covered = "-local-only" in str(ledger)
            if not covered and config.get("population") and known.get(own, 0) < (made := spends(ledger)):
                found.append(f"{ledger} holds {made} releases, its population counts {known.get(own)}")
    return found


def _votes(folder: Path) -> bool:
    return b"-dpfl" in (folder / "config.json").read_bytes()
