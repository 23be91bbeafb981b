"""The progress display of a run: round, its metric, epsilon spent, share of clipped clients, time left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from fedblur.core.callbacks import LOADING, Row, figures_of
from fedblur.learning.metrics.measures import measure_of


class RunProgress:
    """A display that is called with each round's row. `rounds=None`: learnt from the first row (resume).

    Rows of a run in stages name their stage and its length; each stage gets a line.
    """

    def __init__(self, rounds: int | None, quiet: bool, label: str = "round", console: Console | None = None) -> None:
        self.rounds = rounds
        self.quiet = quiet
        self.label = label
        self.epsilon = self.clipped = math.nan
        self.figure = "acc –"
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=7)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, max_width=24)),
            TextColumn("{task.fields[figure]} ε {task.fields[epsilon]} clipped {task.fields[clipped]}"),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=5)),
            console=console or Console(stderr=True),
            disable=quiet,
            expand=True,
        )
        self.tasks: dict[str, TaskID] = {}
        self.cautioned = False

    def __enter__(self) -> RunProgress:
        self.reading = ExitStack()
        self.reading.enter_context(reading_bar(self.quiet, self.progress.console))
        return self  # the display starts with the first round: an earlier error leaves no empty line

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reading.close()
        if self.tasks:
            self.progress.stop()

    def __call__(self, row: Row) -> None:
        if figures := figures_of(row):
            name, value = next(iter(figures.items()))
            measure = measure_of(name)
            words = "acc" if name == "accuracy" else measure.words
            self.figure = f"{words} {measure.shown(value, 1 if measure.percent else None)}"
        if (epsilon := row.get("epsilon")) is not None:
            self.epsilon = epsilon
        if (share := row["local_only"].get("clipped_share")) is not None:
            self.clipped = share
        fields: dict[str, Any] = {
            "figure": self.figure,
            "epsilon": "–" if math.isnan(self.epsilon) else f"{self.epsilon:.2f}",
            "clipped": "–" if math.isnan(self.clipped) else f"{100 * self.clipped:.0f} %",
        }
        stage = row.get("stage", "")
        self.progress.start()
        if stage not in self.tasks:
            label = self.label if not stage else stage if self.label == "round" else f"{self.label}, {stage}"
            self.tasks[stage] = self.progress.add_task(label, total=row.get("rounds", self.rounds), **fields)
        self.progress.update(self.tasks[stage], completed=row["round"], **fields)
        if not self.cautioned and (caution := row["local_only"].get("caution")):
            self.note(f"caution: {caution}")
            self.cautioned = True

    def note(self, text: str) -> None:
        """Print a line above the display."""
        if not self.quiet:
            self.progress.console.print(text, markup=False, highlight=False)


_MANY = 500_000  # rows that take long enough for a bar


@contextmanager
def reading_bar(quiet: bool, console: Console | None = None) -> Iterator[None]:
    """Show how far the reading of a large table is, until the end of the block."""
    shown = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:,.0f} rows"),
        console=console or Console(stderr=True),
        disable=quiet,
        transient=True,
    )
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int | None) -> None:
        if (total or done) < _MANY:
            return
        if what not in tasks:
            shown.start()
            tasks[what] = shown.add_task(what, total=total)
        shown.update(tasks[what], completed=done)
        if done == total and what.startswith("features"):
            shown.stop()

    LOADING.append(show)
    try:
        yield
    finally:
        LOADING.remove(show)
        if tasks:  # one that never started would leave an empty line
            shown.stop()


@contextmanager
def bar(label: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a plain bar; call what it yields with how much is done."""
    with Progress(console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task(escape(label), total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def one_by_one(quiet: bool, console: Console | None = None) -> Iterator[Callable[[int, str], RunProgress]]:
    """Show several runs, one after another: call what it yields with the next run's rounds and its label."""
    with ExitStack() as shown:

        def start(rounds: int, label: str) -> RunProgress:
            shown.close()
            return shown.enter_context(RunProgress(rounds, quiet, label, console))

        yield start
