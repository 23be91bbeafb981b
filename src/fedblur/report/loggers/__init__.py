"""Loggers: callbacks that write each round into the tool that a team already uses.

Figures that no noise protects are named `local_only/...` and stay on this machine: a logger whose records go over a
network leaves them out, unless it is asked for them (`--log-local-only`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedblur.core.callbacks import Row, Watcher, figures_of
from fedblur.core.errors import ConfigError, nearest

_KNOWN = {"tensorboard": "TensorBoardLogger", "mlflow": "MlflowLogger", "wandb": "WandbLogger"}
NAMES = tuple(_KNOWN)


@dataclass(frozen=True)
class Occasion:
    """The run that a logger writes about."""

    folder: Path  # of the run
    table: Path | None = None  # the folder of the table that it belongs to
    title: str = ""  # the cell of that table, for people
    local_only: bool = False  # whether records on other machines may hold figures that no noise protects

    @property
    def home(self) -> Path:
        """The folder that records on this machine go to: one for all cells of a table."""
        return self.table or self.folder

    @property
    def name(self) -> str:
        """The name that people see."""
        return self.title or self.folder.resolve().name

    @property
    def group(self) -> str:
        """The name of the table."""
        return "" if self.table is None else self.table.resolve().name


class Logger(Protocol):
    """A callback that is made for a run, called with each round, and closed at the end."""

    @property
    def note(self) -> str:
        """Say where records go and what they hold."""

    def __call__(self, row: Row) -> None: ...

    def close(self) -> None: ...


def make_logger(name: str, occasion: Occasion) -> Logger:
    """Return a logger by name. It imports what it needs now: a missing package is found before any ε is spent."""
    if name not in _KNOWN:
        raise ConfigError(f"logger {name!r} is unknown: {nearest(name, _KNOWN)}")
    logger: Logger = getattr(importlib.import_module(f"fedblur.report.loggers.{name}"), _KNOWN[name])(occasion)
    return logger


@contextmanager
def with_loggers(
    names: Sequence[str], occasion: Occasion, watch: Watcher | None = None
) -> Iterator[tuple[Watcher, str]]:
    """Yield a callback that calls all of them, and a note on where records go."""
    with ExitStack() as stack:
        loggers = [make_logger(name, occasion) for name in dict.fromkeys(names)]
        for logger in loggers:
            stack.callback(logger.close)

        def notify(row: Row) -> None:
            for each in (*loggers, *((watch,) if watch is not None else ())):
                each(row)

        yield notify, "\n".join(logger.note for logger in loggers)


def where_loggers_write(names: Sequence[str], occasion: Occasion) -> list[str]:
    """Return each logger's note on where records go; a logger that cannot be used is refused."""
    return [make_logger(name, occasion).note for name in dict.fromkeys(names)]


def figures(row: Row, local: bool) -> dict[str, float]:
    """Return a round's numbers by name; `local=False` leaves out all that no noise protects."""
    known: dict[str, Any] = {**figures_of(row), "loss": row.get("loss"), "epsilon": row.get("epsilon")}
    if local:
        known |= {f"local_only/{key}": value for key, value in row.get("local_only", {}).items()}
        known["local_only/seconds"] = row.get("seconds")
        quantiles = row.get("local_only", {}).get("norm_quantiles")
        known["local_only/median_norm"] = quantiles[2] if quantiles else None
    return {key: float(value) for key, value in known.items() if isinstance(value, int | float)}
