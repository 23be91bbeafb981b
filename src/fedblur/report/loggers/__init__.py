"""Loggers: callbacks that write each round into the tool that a team already uses.

Figures that no noise protects are named `local_only/...` and stay on this machine: a logger whose records go over a
network leaves them out.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from fedblur.core.callbacks import Row, Watcher, figures_of
from fedblur.core.errors import ConfigError, nearest

_KNOWN = {"tensorboard": "TensorBoardLogger", "mlflow": "MlflowLogger"}
NAMES = tuple(_KNOWN)


class Logger(Protocol):
    """A callback that is made with a run folder, called with each round, and closed at the end."""

    @property
    def note(self) -> str:
        """Say where records go and what they hold."""

    def __call__(self, row: Row) -> None: ...

    def close(self) -> None: ...


def make_logger(name: str, folder: Path) -> Logger:
    """Return a logger by name. It imports what it needs now: a missing package is found before any ε is spent."""
    if name not in _KNOWN:
        raise ConfigError(f"logger {name!r} is unknown: {nearest(name, _KNOWN)}")
    logger: Logger = getattr(importlib.import_module(f"fedblur.report.loggers.{name}"), _KNOWN[name])(folder)
    return logger


@contextmanager
def with_loggers(names: Sequence[str], folder: Path, watch: Watcher | None = None) -> Iterator[tuple[Watcher, str]]:
    """Yield a callback that calls all of them, and a note on where records go."""
    with ExitStack() as stack:
        loggers = [make_logger(name, folder) for name in dict.fromkeys(names)]
        for logger in loggers:
            stack.callback(logger.close)

        def notify(row: Row) -> None:
            for each in (*loggers, *((watch,) if watch is not None else ())):
                each(row)

        yield notify, "\n".join(logger.note for logger in loggers)


def figures(row: Row, local: bool) -> dict[str, float]:
    """Return a round's numbers by name; `local=False` leaves out all that no noise protects."""
    known: dict[str, Any] = {**figures_of(row), "loss": row.get("loss"), "epsilon": row.get("epsilon")}
    if local:
        known |= {f"local_only/{key}": value for key, value in row.get("local_only", {}).items()}
        known["local_only/seconds"] = row.get("seconds")
        quantiles = row.get("local_only", {}).get("norm_quantiles")
        known["local_only/median_norm"] = quantiles[2] if quantiles else None
    return {key: float(value) for key, value in known.items() if isinstance(value, int | float)}
