"""A table of a paper = base + axes + rows, expanded by code (DESIGN §7). Results are kept by the hash of the cell.

[base]                     # the shared configuration
[axes]                     # cartesian; `seed` is averaged over, the others make the rows of the printed table
[[rows]]                   # what is compared: a label and what differs from the base
[expected]                 # a paper's figures, "LABEL | axis=value" = accuracy in percent, printed beside ours
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedblur.checkpoint import write_atomically
from fedblur.config import Config, apply_overrides, canonical, config_hash, from_dict, read_toml
from fedblur.engines.distributed import demand_one_process
from fedblur.errors import ConfigError, nearest
from fedblur.runfolder import RunFolder
from fedblur.setup import Machine
from fedblur.train import Watcher, resume, train

_SECTIONS = {"title", "note", "tuning", "base", "axes", "rows", "expected"}


@dataclass(frozen=True)
class Cell:
    """One run of a table."""

    label: str
    axes: dict[str, Any]
    config: Config

    @property
    def key(self) -> str:
        return config_hash(self.config)

    @property
    def shown(self) -> dict[str, Any]:
        """The axes that make rows of the printed table; seeds are averaged over."""
        return {name: value for name, value in self.axes.items() if name != "seed"}

    @property
    def group(self) -> str:
        """The printed row that this cell belongs to: `LABEL | epsilon=2`."""
        return " | ".join([self.label, *(f"{name}={value}" for name, value in self.shown.items())])


@dataclass(frozen=True)
class Spec:
    """A table to be computed."""

    title: str
    note: str
    cells: tuple[Cell, ...]
    expected: dict[str, float]
    tuning: str = ""  # how the settings were chosen: for the privacy statements


def read_spec(path: Path) -> Spec:
    """Expand a TOML file into cells; every configuration is checked before the first one runs."""
    table = read_toml(path)
    unknown = next((key for key in table if key not in _SECTIONS), None)
    if unknown is not None:
        raise ConfigError(f"{path}: unknown section {unknown!r}: {nearest(unknown, _SECTIONS)}")
    rows = table.get("rows") or [{"label": "run"}]
    cells = tuple(
        itertools.chain.from_iterable(_expand(table.get("base", {}), table.get("axes", {}), row) for row in rows)
    )
    expected = table.get("expected", {})
    stray = next((key for key in expected if key not in {cell.group for cell in cells}), None)
    if stray is not None:
        raise ConfigError(
            f"{path}: expected {stray!r} is no row of the table: {nearest(stray, (c.group for c in cells))}"
        )
    return Spec(table.get("title", path.stem), table.get("note", ""), cells, expected, table.get("tuning", ""))


def _expand(base: Mapping[str, Any], axes: Mapping[str, list[Any]], row: Mapping[str, Any]) -> Iterator[Cell]:
    if not isinstance(row.get("label"), str):
        raise ConfigError(f"each of [[rows]] needs a label; {dict(row)!r} has none")
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"axes.{name}={values!r} must be a list of at least one value")
    merged = {**base, **{key: value for key, value in row.items() if key != "label"}}
    for point in itertools.product(*axes.values()):
        chosen = dict(zip(axes, point, strict=True))
        table = apply_overrides(merged, [])
        for name, value in chosen.items():  # dotted axes reach into parts: "method.blur.strength" = [0, 0.4]
            table = apply_overrides(table, [f"{name}={json.dumps(value)}"]) if "." in name else table | {name: value}
        yield Cell(row["label"], chosen, from_dict(table))


def run_table(
    spec: Spec,
    out: Path,
    machine: Machine,
    watch: Callable[[Cell, int], Watcher | None] = lambda cell, index: None,
) -> dict[str, dict[str, Any]]:
    """Run every cell that has no result yet; a cell that was stopped goes on. Returns results by key."""
    demand_one_process("a table")
    results: dict[str, dict[str, Any]] = {}
    for index, cell in enumerate(spec.cells):
        path = out / "results" / f"{cell.key}.json"
        if path.exists():
            results[cell.key] = json.loads(path.read_text())
            continue
        summary = _run_cell(cell, out / "cells" / cell.key, machine, watch(cell, index))
        results[cell.key] = json.loads(canonical({"label": cell.label, "axes": cell.axes, **summary}))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(results[cell.key], indent=2) + "\n").encode())
    return results


def _run_cell(cell: Cell, folder: Path, machine: Machine, watch: Watcher | None) -> dict[str, Any]:
    started = RunFolder(folder).checkpoints.exists()
    run = (
        resume(folder, machine=machine, watch=watch)
        if started
        else train(cell.config, out=folder, machine=machine, watch=watch)
    )
    return run.summary


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
    """Mean ± standard deviation over seeds, in the order of the file."""
    groups: dict[str, list[Cell]] = {}
    for cell in spec.cells:
        if cell.key in results:
            groups.setdefault(cell.group, []).append(cell)
    return [
        _line(cells[0], [results[cell.key] for cell in cells], spec.expected.get(group))
        for group, cells in groups.items()
    ]


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
