"""A table of a paper as data: base + axes + rows, expanded into cells by code (DESIGN §7).

tuning = "..."             # how the settings were chosen, for the privacy statements
results = "results"        # where results are kept, from this file's folder; tables of one paper share them
[base]                     # the shared configuration
[shared.NAME]              # settings of some rows, put over the base by `use = ["NAME", ...]`, in this order
[axes]                     # cartesian; `seed` is averaged over, the others make the rows of the printed table
[[rows]]                   # what is compared: a label and what differs from the base; "server.momentum" = 0.5 changes
                           # one setting of a part. A label may come again with other `axes` of its own; `priority` says
                           # what is run first (1 before 2, 5 if not said)
[expected]                 # a paper's figures, "LABEL | axis=value" = our metric there (accuracy: %), printed beside it
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fedblur.core.config import Config, apply_overrides, config_hash
from fedblur.core.errors import ConfigError, nearest
from fedblur.core.plugins import read_config
from fedblur.experiments.recipe import configure

_SECTIONS = {"title", "note", "tuning", "results", "base", "shared", "axes", "rows", "expected"}
_ROW = {"label", "use", "axes", "priority"}  # the other keys of a row are settings
_PRIORITY = 5
_MOST_CELLS = 10_000  # of a row


@dataclass(frozen=True)
class Cell:
    """One run of a table."""

    label: str
    axes: dict[str, Any]
    config: Config
    table: str = ""
    priority: int = _PRIORITY  # what decides most is run first
    title: str = ""  # of the table
    position: int = 0  # in the table, from 0

    @functools.cached_property
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

    @property
    def name(self) -> str:
        """`table1: LABEL | epsilon=2 | seed=0`."""
        seed = f" | seed={self.config.seed}" if self.config.seed is not None else ""
        return f"{self.table}: {self.group}{seed}"

    def fits(self, patterns: Collection[str]) -> bool:
        """Return whether one of the patterns is found in the name; * stands for anything. No pattern: all fit."""
        return not patterns or any(fnmatchcase(self.name, f"*{pattern}*") for pattern in patterns)


@dataclass(frozen=True)
class Spec:
    """A table to be computed."""

    name: str
    title: str
    note: str
    cells: tuple[Cell, ...]
    expected: dict[str, float]
    results: Path | None = None  # a folder that the file names
    tuning: str = ""  # how the settings were chosen: for the privacy statements

    def only(self, patterns: Collection[str]) -> Spec:
        """Return the table of the cells that fit these patterns."""
        return replace(self, cells=tuple(cell for cell in self.cells if cell.fits(patterns)))


def read_spec(path: Path, overrides: Iterable[str] = ()) -> Spec:
    """Expand a TOML file into cells; every configuration is checked before the first one runs."""
    table = read_config(path)
    unknown = next((key for key in table if key not in _SECTIONS), None)
    if unknown in {field.name for field in fields(Config)}:
        raise ConfigError(f"{path} is the configuration of one run; start it with: fedblur run {path}")
    if unknown is not None:
        raise ConfigError(f"{path}: unknown section {unknown!r}: {nearest(unknown, _SECTIONS)}")
    sections = {name: table.get(name, {}) for name in ("base", "shared", "axes", "expected")}
    if isinstance(sections["shared"], Mapping):
        sections |= {f"shared.{name}": value for name, value in sections["shared"].items()}
    wrong = next((name for name, value in sections.items() if not isinstance(value, Mapping)), None)
    if wrong is not None:
        raise ConfigError(f"{path}: {wrong} = {sections[wrong]!r} must be a section, [{wrong}] with settings below it")
    for name in ("title", "note", "tuning", "results"):
        if not isinstance(table.get(name, ""), str):
            raise ConfigError(f"{path}: {name} = {table[name]!r} must be a text")
    if "\0" in table.get("results", ""):
        raise ConfigError(f"{path}: results = {table['results']!r} must be the path of a folder")
    rows = table.get("rows") or [{"label": "run"}]
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"{path}: rows = {table['rows']!r} must be sections, [[rows]] with a label below each")
    cells: dict[tuple[str, str], Cell] = {}
    for row in rows:
        for cell in _expand(path.stem, table, row, list(overrides)):
            cell = replace(cell, title=table.get("title", path.stem), position=len(cells))
            cells.setdefault((cell.name, cell.key), cell)  # a row that comes again may overlap
    counts = Counter(name for name, _ in cells)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:  # they would be averaged as if they were seeds
        raise ConfigError(f"{path}: rows give {twice!r} different settings; give them different labels")
    expected = table.get("expected", {})
    wrong = next(
        (key for key, value in expected.items() if isinstance(value, bool) or not isinstance(value, int | float)), None
    )
    if wrong is not None:
        raise ConfigError(f"{path}: expected {wrong!r} = {expected[wrong]!r} must be a number (accuracy: in percent)")
    stray = next((key for key in expected if key not in {cell.group for cell in cells.values()}), None)
    if stray is not None:
        raise ConfigError(
            f"{path}: expected {stray!r} is no row of the table: {nearest(stray, (c.group for c in cells.values()))}"
        )
    results = path.parent / table["results"] if "results" in table else None
    return Spec(
        path.stem, table.get("title", path.stem), table.get("note", ""), tuple(cells.values()), expected, results,
        table.get("tuning", ""),
    )  # fmt: skip


def _expand(name: str, table: Mapping[str, Any], row: Mapping[str, Any], overrides: list[str]) -> Iterator[Cell]:
    """Yield the cells of one row."""
    if not isinstance(row.get("label"), str):
        raise ConfigError(f"each of [[rows]] needs a label; {dict(row)!r} has none")
    axes, priority = row.get("axes", table.get("axes", {})), row.get("priority", _PRIORITY)
    if not isinstance(axes, Mapping):
        raise ConfigError(f"axes={axes!r} of row {row['label']!r} must be a table, like axes = {{ seed = [0, 1] }}")
    for axis, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"axes.{axis}={values!r} must be a list of at least one value, like {axis} = [2, 4]")
    if not isinstance(priority, int):
        raise ConfigError(f"priority={priority!r} of row {row['label']!r} must be a whole number")
    names, shared = row.get("use", []), table.get("shared", {})
    if not isinstance(names, list):
        raise ConfigError(f'use={names!r} of row {row["label"]!r} must be a list, like use = ["emnist", "cnn"]')
    unknown = next((name for name in names if not isinstance(name, str) or name not in shared), None)
    if unknown is not None:
        raise ConfigError(
            f"row {row['label']!r} uses {unknown!r}, which [shared] has not: {nearest(str(unknown), shared)}"
        )
    settings = _over({}, table.get("base", {}))
    for part in (*(shared[name] for name in names), {key: row[key] for key in row if key not in _ROW}):
        settings = _over(settings, part)
    if math.prod(len(values) for values in axes.values()) > _MOST_CELLS:
        raise ConfigError(f"the axes of row {row['label']!r} give more than {_MOST_CELLS:,} cells; shorten them")
    for point in itertools.product(*axes.values()):
        chosen = dict(zip(axes, point, strict=True))
        config = configure(apply_overrides(_over(settings, chosen), overrides))
        yield Cell(row["label"], chosen, config, name, priority)


def _over(settings: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with changes; dotted ones reach into parts: "method.blur.strength" = 0.4."""
    for name, value in changes.items():
        if "." in name:
            written = json.dumps(value).replace("Infinity", "inf")  # as TOML has it
            settings = apply_overrides(settings, [f"{name}={written}"])
        else:
            settings = settings | {name: value}
    return settings
