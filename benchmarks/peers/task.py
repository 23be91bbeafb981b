"""What every system is given and how it is asked for rounds. Only NumPy: each environment has that.

The driver writes "round" to a system's standard input; the system runs a round on the same inputs, and again until
three seconds are over, stores its clipped sum and answers one line of JSON with the seconds of a round on average.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Task:
    """One round's inputs: a model's initial weights, data, and which samples each step of each client reads."""

    model: str
    shape: tuple[int, ...]
    classes: int
    learning_rate: float
    clip_norm: float  # S
    names: tuple[str, ...]  # of the weights, in the order in which they lie in `start`
    shapes: tuple[tuple[int, ...], ...]
    start: Floats  # [d]
    x: Floats  # [samples, *shape], client after client
    y: NDArray[np.int64]  # [samples]
    plan: NDArray[np.int64]  # [clients, steps, batch], indices into x

    @property
    def clients(self) -> int:
        return len(self.plan)

    @property
    def steps(self) -> int:
        return int(self.plan.shape[1])

    @property
    def batch(self) -> int:
        return int(self.plan.shape[2])

    def samples(self, client: int) -> tuple[Floats, NDArray[np.int64]]:
        """A client's samples in the order in which it reads them: step q is rows q·batch to (q+1)·batch."""
        order = self.plan[client].reshape(-1)
        return self.x[order], self.y[order]

    def weights(self) -> dict[str, Floats]:
        """The initial weights by name."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        pieces = np.split(self.start, ends[:-1])
        return {name: piece.reshape(shape) for name, piece, shape in zip(self.names, pieces, self.shapes, strict=True)}

    def flatten(self, tensors: dict[str, Any]) -> Floats:
        """Tensors by name to one vector [d], in the order of `start`."""
        return np.concatenate([np.asarray(tensors[name], dtype=np.float32).reshape(-1) for name in self.names])


TURN = 3.0  # seconds: rounds come one after another, as in a run, not each in what other systems left of the caches
ARRAYS = ("start", "x", "y", "plan")


def save_task(task: Task, path: Path) -> None:
    """Write a task for other environments to read."""
    words = {name: value for name, value in vars(task).items() if name not in ARRAYS}
    arrays = {name: getattr(task, name) for name in ARRAYS}
    np.savez(path, allow_pickle=False, words=np.array(json.dumps(words)), **arrays)


def load_task(path: str | Path) -> Task:
    """Read what `save_task` wrote."""
    with np.load(path) as stored:
        words = json.loads(str(stored["words"]))
        arrays = {name: stored[name] for name in ARRAYS}
    words["shape"], words["names"] = tuple(words["shape"]), tuple(words["names"])
    words["shapes"] = tuple(tuple(shape) for shape in words["shapes"])
    return Task(**words, **arrays)


class Channel:
    """The driver's end of standard input and output; what libraries print goes to standard error instead."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.inputs, self.sum_path = sys.argv[1], sys.argv[2]

    def serve(self, run: Callable[[], Floats], version: str, how: str) -> None:
        """Say what is measured, then run a round for every line that the driver sends."""
        self.answers.write(json.dumps({"version": version, "how": how}) + "\n")
        for _ in sys.stdin:
            began, rounds = time.perf_counter(), 0
            while not rounds or time.perf_counter() - began < TURN:
                total, rounds = run(), rounds + 1
            seconds = (time.perf_counter() - began) / rounds
            np.save(self.sum_path, np.asarray(total, dtype=np.float32))
            self.answers.write(json.dumps({"seconds": seconds}) + "\n")
