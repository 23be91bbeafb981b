"""Callbacks: the watcher gets each round's row as soon as it is written, `RUN_ENDED` the folder of a run that ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from fedblur.core.errors import OwnFunctionError


class Row(TypedDict):
    """The figures of a round: one line of rounds.jsonl. Some rounds are not evaluated."""

    round: int  # rounds done; of a voting protocol, steps of the stage
    epsilon: NotRequired[float | None]  # spent so far
    accuracy: NotRequired[float | None]  # of a classifier; None: this round was not evaluated
    figures: NotRequired[dict[str, float] | None]  # every metric, the headline first, where they are not accuracy alone
    loss: NotRequired[float | None]  # the mean over samples; of a classifier in nats
    seconds: NotRequired[float]
    local_only: dict[str, Any]  # diagnostics: never released, never accounted
    stage: NotRequired[str]  # of a voting protocol
    rounds: NotRequired[int]  # of that stage


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a round, the headline first; none where it was not evaluated."""
    if row.get("figures"):
        return dict(row["figures"])
    accuracy = row.get("accuracy")
    return {} if accuracy is None else {"accuracy": accuracy}


Watcher = Callable[[Row], None]
Examine = Callable[[Any], Mapping[str, float]]  # a function of the user's: an evaluated model -> figures by name
SAVED = "progress saved"  # begins a note on what stopped a run, "... in FOLDER": all that was paid for is on disk
LOADING: list[Callable[[str, int, int | None], object]] = []  # who shows that a table is read: what, rows, of how many
RUN_ENDED: list[Callable[[Path], object]] = []  # filled by `fedblur/__init__.py`, the one place that knows all rooms


def examined(function: Examine, model: Any, known: Mapping[str, float]) -> dict[str, float]:
    """Return the figures that a function of the user's finds, without NaN. Raise an OwnFunctionError if it fails."""
    try:
        found = function(model)
    except Exception as error:  # whatever it raises: what was paid for must be saved
        reason = (str(error).splitlines() or [""])[0]
        raise OwnFunctionError(f"on_evaluate failed: {type(error).__name__}: {reason}; fix it and resume") from error
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(value, int | float) and not isinstance(value, bool)
        for name, value in found.items()
    ):
        raise OwnFunctionError(f'on_evaluate returned {found!r:.80}, must be figures by name, like {{"score": 0.5}}')
    taken = next((name for name in found if name in known), None)
    if taken is not None:
        raise OwnFunctionError(f"on_evaluate returned {taken!r}, which is a metric of this run; choose another name")
    return {name: float(value) for name, value in found.items() if value == value}


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
