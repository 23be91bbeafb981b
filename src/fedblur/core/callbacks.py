"""Callbacks: the watcher gets each round's row as soon as it is written, `RUN_ENDED` the folder of a run that ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired, TypedDict


class Row(TypedDict):
    """The figures of a round: one line of rounds.jsonl. Some rounds are not evaluated."""

    round: int  # rounds done; of a voting protocol, steps of the stage
    epsilon: NotRequired[float | None]  # spent so far
    accuracy: float | None
    loss: NotRequired[float | None]  # in nats
    seconds: NotRequired[float]
    local_only: dict[str, Any]  # diagnostics: never released, never accounted
    stage: NotRequired[str]  # of a voting protocol
    rounds: NotRequired[int]  # of that stage


Watcher = Callable[[Row], None]
SAVED = "progress saved"  # a note on the exception that stopped a run, once all that was paid for is on disk
RUN_ENDED: list[Callable[[Path], object]] = []  # filled by `fedblur/__init__.py`, the one place that knows all rooms


def with_header(header: str, tell: Callable[[str], None], watch: Watcher | None) -> Watcher:
    """Return a watcher that tells the header with the first round: a run that may not go on says why, nothing else."""
    told = False

    def watching(row: Row) -> None:
        nonlocal told
        if not told:
            told = True
            tell(header)
        if watch is not None:
            watch(row)

    return watching
