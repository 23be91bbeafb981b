"""Tables that are computed: their cells in order of priority, and the printed lines of their results.

Results are kept by their settings (`result_store.py`): a table that was stopped continues where it was, a cell that two
tables have in common is computed once, and a changed setting computes only the cells that it changes.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedblur.core.callbacks import figures_of
from fedblur.core.config import canonical
from fedblur.core.errors import ConfigError, RunError, TimeIsUp, nearest
from fedblur.core.files import (
    demand_digest,
    make_folder,
    parse_json,
    read_bytes,
    with_digest,
    write_atomically,
)
from fedblur.engines.distributed import demand_one_process
from fedblur.experiments.cost_model import COMPILING, estimate, program
from fedblur.experiments.result_store import Result, Results, headline, make_result
from fedblur.experiments.table_spec import Cell, Spec, read_spec
from fedblur.learning.metrics.measures import ACCURACY, Measure, measure_of
from fedblur.training.loop import Row, Watcher, train
from fedblur.training.machine import Machine
from fedblur.training.resume import resume
from fedblur.training.run_folder import FolderInUse, RunFolder

__all__ = ["Cell", "Line", "Spec", "TimeLimit", "aggregate", "pending", "read_spec", "run_cells", "run_table"]

CellWatcher = Callable[[Cell, int], Watcher | None]


@dataclass
class TimeLimit:
    """The time limit of a command. Without minutes there is no limit."""

    minutes: float | None = None
    started: float = field(default_factory=time.monotonic)
    programs: set[Any] = field(default_factory=set)  # compiled in this process

    @property
    def left(self) -> float:
        """Seconds."""
        return float("inf") if self.minutes is None else 60 * self.minutes - (time.monotonic() - self.started)

    def watch(self, inner: Watcher | None) -> Watcher:
        """Stop a cell when the time is up."""

        def tick(row: Row) -> None:
            if inner is not None:
                inner(row)
            if self.left <= 0:
                raise TimeIsUp("the time is up; run the same command again to continue")

        return tick


@dataclass(frozen=True)
class PlannedCell:
    """One cell of a table as the table's folder lists it, begun or not."""

    key: str
    name: str
    label: str
    axes: dict[str, Any]  # in the order of the file, the seed among them
    position: int
    rounds: int
    table: str  # its title
    results: Path  # the folder that its result goes to


def write_plan(spec: Spec, out: Path, results: Path) -> None:
    """Write OUT/tables/NAME.json: all cells of a table, so that a page about the folder can count what is left."""
    cells = [
        {"key": cell.key, "cell": cell.name, "label": cell.label, "axes": list(cell.axes.items()),
         "position": cell.position, "rounds": cell.config.rounds}
        for cell in spec.cells
    ]  # fmt: skip
    plan: dict[str, Any] = {"title": spec.title, "results": os.path.relpath(results, out), "cells": cells}
    plan = with_digest(json.loads(canonical(plan)))
    make_folder(out / "tables")
    write_atomically(out / "tables" / f"{spec.name}.json", (json.dumps(plan) + "\n").encode())


def read_plans(out: Path) -> dict[str, PlannedCell]:
    """Return all cells of the tables that were started in this folder, by key; a damaged list counts as none."""
    found: dict[str, PlannedCell] = {}
    for path in sorted(out.glob("tables/*.json")):
        try:
            plan = parse_json(read_bytes(path), path)
            demand_digest(plan, path, required=True)
            for cell in plan["cells"]:
                found[cell["key"]] = PlannedCell(
                    cell["key"], cell["cell"], cell["label"], dict(cell["axes"]), cell["position"], int(cell["rounds"]),
                    plan["title"], out / plan["results"],
                )  # fmt: skip
        except (OSError, RunError, KeyError, TypeError, ValueError):
            continue
    return found


def pending(specs: Iterable[Spec], found: Mapping[str, Result], only: Collection[str] = ()) -> list[Cell]:
    """Return cells without a result, in the order in which they run: by priority, then as the files have them."""
    cells: dict[str, Cell] = {}
    for cell in sorted((cell for spec in specs for cell in spec.cells), key=lambda cell: cell.priority):
        if cell.key not in found and cell.fits(only):
            cells.setdefault(cell.key, cell)
    return list(cells.values())


def run_table(
    spec: Spec, out: Path, machine: Machine, watch: CellWatcher = lambda cell, index: None
) -> dict[str, Result]:
    """Run every cell that has no result yet; a cell that was stopped continues. Return results by key."""
    results = Results(spec.results or out / "results")
    write_plan(spec, out, results.folder)
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
    """Run these cells in order, as far as the time allows. Return what is left, or what another process computes now.

    `among`: all cells of the table, which number these. `tell` is called with notes on runs that continue.
    """
    demand_one_process("a table")
    limit, numbers = limit or TimeLimit(), {cell.key: number for number, cell in reversed([*enumerate(among)])}
    device, left = machine.torch_device().type, []
    for cell in cells:
        if results.appeared(cell.key):  # another command has computed it meanwhile
            continue
        folder = RunFolder(runs / cell.key)
        seconds = estimate(cell.config, cell.config.clients, device, results.found.values())
        if seconds is None:  # a cell of unknown cost may start, as it can stop and continue later
            seconds = 0.0
        elif device == "cuda" and program(cell.config) not in limit.programs:
            seconds += COMPILING
        if folder.in_use() or seconds >= limit.left:
            left.append(cell)
            continue
        limit.programs.add(program(cell.config))
        watcher = limit.watch(watch(cell, numbers.get(cell.key, 0)))
        try:
            if folder.began():
                run = resume(folder.path, machine=machine, watch=watcher, tell=tell)
            else:
                run = train(cell.config, out=folder.path, machine=machine, watch=watcher)
        except (TimeIsUp, FolderInUse):
            left.append(cell)
            continue
        results.write(cell.key, make_result(_about(cell, machine), cell.config, run.summary, run.rounds))
    return [cell for cell in left if not results.appeared(cell.key)]


def _about(cell: Cell, machine: Machine) -> Result:
    device = machine.torch_device()
    return {
        "table": cell.table,
        "title": cell.title,
        "position": cell.position,  # rows of a report come in the order of the file
        "cell": cell.name,
        "label": cell.label,
        "axes": cell.axes,
        "axis_order": list(cell.axes),  # as in the file; the keys of `axes` are sorted when they are written
        "machine": device.type,
        "hardware": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{os.cpu_count()} CPU cores, {platform.machine()}",
    }


@dataclass(frozen=True)
class Line:
    """One printed row: the mean over seeds."""

    group: str
    label: str
    axes: dict[str, Any]
    seeds: int
    measure: Measure  # the metric that is shown
    mean: float  # of the final round, in the unit in which the metric is shown: of accuracy in percent
    spread: float  # sample standard deviation over seeds; 0 for one seed
    noise_multiplier: float
    epsilon: float
    clipped: float | None
    expected: float | None

    @property
    def accuracy(self) -> float:
        """The mean accuracy in percent, of a table about accuracy."""
        if self.measure != ACCURACY:
            raise RunError(f"this row is about {self.measure.words}, not accuracy: read line.mean")
        return self.mean

    def facts(self) -> dict[str, Any]:
        """Return the row for `--json`: the mean under the metric's name."""
        table = {name: value for name, value in vars(self).items() if name not in ("measure", "mean")}
        return {**table, "metric": self.measure.name, self.measure.name: self.mean}


def aggregate(spec: Spec, results: Mapping[str, Mapping[str, Any]], metric: str | None = None) -> list[Line]:
    """Mean ± standard deviation over seeds; labels in the order of the file, values of an axis by size.

    `metric`: what is shown, instead of the headline; a paper's figures are about the headline.
    """
    found = [results[cell.key] for cell in spec.cells if cell.key in results]
    main = headline(found[0])[0] if found else ACCURACY.name
    measure = measure_of(metric or main)
    known = sorted({name for result in found for name in figures_of(result)} | {"loss"})
    if found and measure.name not in known:
        raise ConfigError(f"metric {metric!r} was not measured in this table: {nearest(measure.name, known)}")
    labels = list(dict.fromkeys(cell.label for cell in spec.cells))  # a label may be spread over rows of the file
    numbers = all(isinstance(v, int | float) for cell in spec.cells for v in cell.shown.values())
    groups: dict[str, list[Cell]] = {}
    for cell in sorted(
        spec.cells, key=lambda cell: (labels.index(cell.label), tuple(cell.shown.values()) if numbers else ())
    ):
        if cell.key in results:
            groups.setdefault(cell.group, []).append(cell)
    lines = []
    for group, cells in groups.items():
        members = [results[cell.key] for cell in cells]
        values = [{"loss": member.get("loss"), **figures_of(member)}.get(measure.name) for member in members]
        scores = [measure.scaled(float(value)) for value in values if value is not None]
        if not scores:
            continue
        shares = [
            share for member in members if (share := member.get("local_only", {}).get("clipped_share")) is not None
        ]
        lines.append(
            Line(
                group=group,
                label=cells[0].label,
                axes=cells[0].shown,
                seeds=len(scores),
                measure=measure,
                mean=statistics.mean(scores),
                spread=statistics.stdev(scores) if len(scores) > 1 else 0.0,
                noise_multiplier=members[0]["privacy"]["noise_multiplier"],
                epsilon=max(float(member["privacy"]["epsilon"]) for member in members),
                clipped=statistics.mean(shares) if shares else None,
                expected=spec.expected.get(group) if measure.name == main else None,
            )
        )
    return lines
