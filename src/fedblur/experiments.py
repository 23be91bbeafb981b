"""Runs the cells of tables, what decides most first, and makes printed lines of their results.

Results are kept by their settings (`results.py`): a table that was stopped goes on where it was, a cell that two
tables have in common is computed once, and a changed setting computes only the cells that it changes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedblur.costs import COMPILING, estimate, program
from fedblur.engines.distributed import demand_one_process
from fedblur.errors import RunError
from fedblur.results import Result, Results, hardware, make_result
from fedblur.runfolder import FolderInUse, RunFolder
from fedblur.setup import Machine
from fedblur.spec import Cell, Spec, read_spec
from fedblur.train import Row, Run, Watcher, resume, train

__all__ = ["Cell", "Line", "Spec", "TimeLimit", "aggregate", "pending", "read_spec", "run_cells", "run_table"]

CellWatcher = Callable[[Cell, int], Watcher | None]


class TimeIsUp(KeyboardInterrupt):
    """Stops a cell between two rounds; what was paid for is saved, as when a user stops it."""


@dataclass
class TimeLimit:
    """How long a command may run. Without minutes there is no limit."""

    minutes: float | None = None
    started: float = field(default_factory=time.monotonic)
    programs: set[Any] = field(default_factory=set)  # compiled in this process

    @property
    def left(self) -> float:
        """Seconds."""
        return float("inf") if self.minutes is None else 60 * self.minutes - (time.monotonic() - self.started)

    def allows(self, seconds: float | None) -> bool:
        """Whether there is time for a cell; one of unknown cost may start, as it can be stopped and go on later."""
        return self.left > (0.0 if seconds is None else seconds)

    def watch(self, inner: Watcher | None) -> Watcher:
        """Stops a cell when the time is up."""

        def tick(row: Row) -> None:
            if inner is not None:
                inner(row)
            if self.left <= 0:
                raise TimeIsUp

        return tick


def pending(specs: Iterable[Spec], found: Mapping[str, Result], only: Iterable[str] = ()) -> list[Cell]:
    """Cells without a result, in the order of decision: by priority, then as the files have them."""
    patterns = list(only)
    cells: dict[str, Cell] = {}
    for cell in sorted((cell for spec in specs for cell in spec.cells), key=lambda cell: cell.priority):
        if cell.key not in found and cell.fits(patterns):
            cells.setdefault(cell.key, cell)
    return list(cells.values())


def run_table(
    spec: Spec, out: Path, machine: Machine, watch: CellWatcher = lambda cell, index: None
) -> dict[str, Result]:
    """Run every cell that has no result yet; a cell that was stopped goes on. Returns results by key."""
    results = Results(spec.results or out / "results")
    left = run_cells(pending([spec], results.found), results, out / "cells", machine, watch, spec.cells)
    if left:
        raise RunError(f"{len(left)} cells of {spec.title} are being computed by another process; wait for it")
    return {cell.key: results.found[cell.key] for cell in spec.cells}


def run_cells(
    cells: Iterable[Cell],
    results: Results,
    runs: Path,
    machine: Machine,
    watch: CellWatcher = lambda cell, index: None,
    among: Iterable[Cell] = (),
    limit: TimeLimit | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Cell]:
    """Run these cells in order, as far as the time allows; returns those that are left. `among` numbers them, and
    `tell` hears of runs that go on.

    Cells that another process computes at the moment are left to it.
    """
    demand_one_process("a table")
    limit, numbers = limit or TimeLimit(), {cell.key: number for number, cell in reversed([*enumerate(among)])}
    device, left = machine.torch_device().type, []
    for cell in cells:
        if results.appeared(cell.key):  # another command has computed it meanwhile
            continue
        busy = RunFolder(runs / cell.key).in_use()
        if busy or not limit.allows(_seconds(cell, results, device, limit)):
            left.append(cell)
            continue
        limit.programs.add(program(cell.config))
        watcher = watch(cell, numbers.get(cell.key, 0))
        try:
            run = _run_cell(cell, runs / cell.key, machine, limit.watch(watcher), tell)
        except (TimeIsUp, FolderInUse):
            left.append(cell)
            continue
        results.write(cell.key, make_result(_about(cell, machine), cell.config, run.summary, run.rounds))
    return [cell for cell in left if not results.appeared(cell.key)]


def _about(cell: Cell, machine: Machine) -> Result:
    where = {"machine": machine.torch_device().type, "hardware": hardware(machine.torch_device())}
    return {"table": cell.table, "cell": cell.name, "label": cell.label, "axes": cell.axes, **where}


def _seconds(cell: Cell, results: Results, device: str, limit: TimeLimit) -> float | None:
    known = estimate(cell.config, cell.config.clients, device, results.found.values())
    compiling = COMPILING if device == "cuda" and program(cell.config) not in limit.programs else 0.0
    return None if known is None else known + compiling


def _run_cell(cell: Cell, folder: Path, machine: Machine, watch: Watcher, tell: Callable[[str], None]) -> Run:
    if RunFolder(folder).checkpoints.exists():
        return resume(folder, machine=machine, watch=watch, tell=tell)
    return train(cell.config, out=folder, machine=machine, watch=watch)


@dataclass(frozen=True)
class Line:
    """One printed row: the mean over seeds."""

    group: str
    label: str
    axes: dict[str, Any]
    seeds: int
    accuracy: float  # percent, final round
    spread: float  # sample standard deviation over seeds; 0 for one seed
    noise_multiplier: float
    epsilon: float
    clipped: float | None
    expected: float | None


def aggregate(spec: Spec, results: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Mean ± standard deviation over seeds; labels in the order of the file, values of an axis by size."""
    groups: dict[str, list[Cell]] = {}
    for cell in sorted(spec.cells, key=_place(spec)):
        if cell.key in results:
            groups.setdefault(cell.group, []).append(cell)
    return [
        _line(cells[0], [results[cell.key] for cell in cells], spec.expected.get(group))
        for group, cells in groups.items()
    ]


def _place(spec: Spec) -> Callable[[Cell], tuple[Any, ...]]:
    """Where a cell stands in the printed table: a label may be spread over several rows of the file."""
    labels = list(dict.fromkeys(cell.label for cell in spec.cells))
    numbers = all(isinstance(v, int | float) for cell in spec.cells for v in cell.shown.values())
    return lambda cell: (labels.index(cell.label), tuple(cell.shown.values()) if numbers else ())


def _line(cell: Cell, members: list[Mapping[str, Any]], expected: float | None) -> Line:
    scores = [100 * member["accuracy"] for member in members]
    shares = [share for member in members if (share := member["local_only"]["clipped_share"]) is not None]
    return Line(
        group=cell.group,
        label=cell.label,
        axes=cell.shown,
        seeds=len(members),
        accuracy=statistics.mean(scores),
        spread=statistics.stdev(scores) if len(scores) > 1 else 0.0,
        noise_multiplier=members[0]["privacy"]["noise_multiplier"],
        epsilon=max(float(member["privacy"]["epsilon"]) for member in members),
        clipped=statistics.mean(shares) if shares else None,
        expected=expected,
    )
