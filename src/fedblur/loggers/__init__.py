"""Runs in the tool that a team has already. A logger is a watcher: it hears each round, and writes it elsewhere.

What it writes stays on this machine, or it is less: figures that no noise protects are named `local_only/...`, and a
logger whose records go over a network leaves them out.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from fedblur.errors import ConfigError, nearest
from fedblur.watching import Row, Watcher

_KNOWN = {"tensorboard": "TensorBoardLogger", "mlflow": "MlflowLogger"}
NAMES = tuple(_KNOWN)


class Logger(Protocol):
    """Made with a run folder, called with each round, closed at the end."""

    @property
    def note(self) -> str:
        """Where records go and what they hold."""
        ...

    def __call__(self, row: Row) -> None: ...

    def close(self) -> None: ...


def make_logger(name: str, folder: Path) -> Logger:
    """A logger by name; what it needs is imported now, so that nothing is spent before it is missed."""
    if name not in _KNOWN:
        raise ConfigError(f"logger {name!r} is unknown: {nearest(name, _KNOWN)}")
    logger: Logger = getattr(importlib.import_module(f"fedblur.loggers.{name}"), _KNOWN[name])(folder)
    return logger


@contextmanager
def with_loggers(names: Sequence[str], folder: Path, watch: Watcher | None = None) -> Iterator[tuple[Watcher, str]]:
    """A watcher that tells all of them, and what to say about where records go."""
    with ExitStack() as stack:
        loggers = [make_logger(name, folder) for name in dict.fromkeys(names)]
        for logger in loggers:
            stack.callback(logger.close)

        def tell(row: Row) -> None:
            for each in (*loggers, *((watch,) if watch is not None else ())):
                each(row)

        yield tell, "\n".join(logger.note for logger in loggers)


def figures(row: Row, local: bool) -> dict[str, float]:
    """A round's numbers by name; `local=False` leaves out all that no noise protects."""
    known = {key: row.get(key) for key in ("accuracy", "loss", "epsilon")}
    if local:
        known |= {f"local_only/{key}": value for key, value in row.get("local_only", {}).items()}
        known["local_only/seconds"] = row.get("seconds")
        quantiles = row.get("local_only", {}).get("norm_quantiles")
        known["local_only/median_norm"] = quantiles[2] if quantiles else None
    return {key: float(value) for key, value in known.items() if isinstance(value, int | float)}
