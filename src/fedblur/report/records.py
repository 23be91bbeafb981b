"""Records: the runs that are shown. In: run folders, tables' folders, results. Out: records in groups of like settings.

Everything is read as it lies there, finished or not: a run that goes on has no summary yet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedblur.core.callbacks import Row, figures_of
from fedblur.core.config import canonical, demand_form
from fedblur.core.errors import ConfigError, RunError, nearest
from fedblur.experiments.result_store import PACKED, Results, read_results, with_local_only
from fedblur.experiments.table import PlannedCell, read_plans
from fedblur.learning.metrics.measures import ACCURACY, LOSS, Measure, measure_of, ordered
from fedblur.privacy.claim import from_json
from fedblur.training.run_folder import RunFolder, RunSummary

_NO_METRICS = ("round", "epsilon", "loss")  # of what a result keeps of a round
_NAMED = 2  # settings in a group's name, at most


@dataclass(frozen=True)
class Record:
    """One run, as far as it got."""

    name: str
    label: str  # what it is compared by; seeds share it
    axes: dict[str, Any]  # of the table that it belongs to, without the seed
    config: dict[str, Any]
    rows: list[Row]
    summary: RunSummary | None  # None: it goes on, or was killed
    path: Path | None = None  # None: only its result is kept
    table: str = ""  # the title of the table that it belongs to
    position: int | None = None  # in that table; None: unknown

    @property
    def seed(self) -> int | None:
        seed: int | None = self.config.get("seed")
        return seed

    @property
    def complete(self) -> bool:
        return self.summary is not None and self.summary.complete

    @property
    def rounds_done(self) -> int:
        return int(self.rows[-1]["round"]) if self.rows else 0

    @property
    def rounds_planned(self) -> int:
        """The rounds of the current stage, where a run has stages (voting)."""
        return int((self.rows[-1].get("rounds") if self.rows else None) or self.config["rounds"])

    def local_only(self, key: str) -> list[tuple[int, Any]]:
        """(round, value) where a round has this figure."""
        found = ((row["round"], row.get("local_only", {}).get(key)) for row in self.rows)
        return [(round_, value) for round_, value in found if value is not None]

    def evaluations(self) -> list[Row]:
        return [row for row in self.rows if figures_of(row)]

    @property
    def measures(self) -> list[Measure]:
        """The metrics that were measured, the headline first."""
        found = self.summary.metrics if self.summary is not None else {}
        for row in reversed(self.rows):
            found = found or figures_of(row)
        return [*dict.fromkeys([*map(measure_of, ordered(found or {"accuracy": 0.0}, self.config)), LOSS])]

    def result(self, measure: Measure) -> float | None:
        """Return a metric of the final round; None where the run has not ended or did not measure it."""
        if self.summary is None:
            return None
        value = {"loss": self.summary.loss, **self.summary.metrics}.get(measure.name)
        return None if value is None or math.isnan(value) else value

    def series(self, measure: Measure) -> list[tuple[Row, float]]:
        """Return the rows that measured a metric, with its value there."""
        found = ((row, {"loss": row.get("loss"), **figures_of(row)}.get(measure.name)) for row in self.rows)
        return [(row, float(value)) for row, value in found if isinstance(value, int | float)]


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    label: str
    axes: dict[str, Any]
    records: list[Record] = field(default_factory=list)

    @property
    def name(self) -> str:
        return ", ".join([self.label, *(f"{key} = {value}" for key, value in self.axes.items())])

    @property
    def first(self) -> Record:
        """The one whose own figures are shown: finished if any is, then by seed."""
        return min(self.records, key=lambda record: (record.summary is None, record.seed or 0))

    @property
    def complete(self) -> list[Record]:
        return [record for record in self.records if record.complete]


def find_records(paths: Iterable[Path]) -> list[Record]:
    """Return all runs in these folders and result files; a folder that holds none is refused."""
    records: dict[str, Record] = {}
    for path in paths:
        if not path.exists():
            raise RunError(f"{path} does not exist; give a run folder, or the folder of a table")
        if path.is_file():
            found = _of_results(path)
        elif RunFolder(path).config.exists():
            found = [read_run(path)]
        elif is_table(path):
            found = _of_table(path)
        elif any(path.glob(f"*{PACKED}")) or any(path.glob("*.json")):
            found = _of_results(path)
        else:
            found = [read_run(child) for child in sorted(path.iterdir()) if RunFolder(child).config.exists()]
        if not found:
            raise RunError(f"{path} holds no run: it has no config.json, cells/ or results/; give a run folder")
        records |= {str((record.path or path / record.name).resolve()): record for record in found}
    return list(records.values())


def is_table(path: Path) -> bool:
    """Return whether this is the folder of a table."""
    return any((path / name).is_dir() for name in ("cells", "results", "tables"))


def not_begun(paths: Iterable[Path]) -> dict[str, PlannedCell]:
    """Return the cells of these tables that have neither a run folder nor a result yet, by key."""
    found: dict[str, PlannedCell] = {}
    for path in paths:
        for key, cell in read_plans(path).items():
            if not RunFolder(path / "cells" / key).config.exists() and not (cell.results / f"{key}.json").exists():
                found[key] = cell
    kept = {key for folder in {cell.results for cell in found.values()} for key in Results(folder).found}  # packed ones
    return {key: cell for key, cell in found.items() if key not in kept}


def read_run(path: Path) -> Record:
    """Read a run folder."""
    folder = RunFolder(path)
    config = folder.resolved()
    demand_form(config, folder.config)
    rows, summary = folder.read_rounds(), folder.read_summary()
    return Record(path.resolve().name, method_words(config), {}, config, rows, summary, path)


def _of_results(path: Path) -> list[Record]:
    """Read result files: a table's packed one, a cell's own, or a folder of them."""
    results = [result for result in read_results(path) if "config" in result]
    return sorted((_of_result(result, path) for result in results), key=_order)


def _of_result(result: Mapping[str, Any], path: Path, run: Record | None = None) -> Record:
    """Return a result as a record; `run` is what its run folder holds, if that is here."""
    name = f"{path}: {result.get('cell')}"
    result = with_local_only(path if path.is_dir() else path.parent, dict(result))
    axes = {axis: result["axes"][axis] for axis in result.get("axis_order") or result["axes"] if axis != "seed"}
    summary = from_json(RunSummary, result, name)
    base = run or Record(result["settings"], "", {}, result["config"], _rows_of(result), summary)
    return replace(
        base, name=result["cell"], label=result["label"], axes=axes, table=result.get("title", ""),
        position=result.get("position"), config=result["config"],
        summary=summary,  # what was kept, should the cell have changed
    )  # fmt: skip


def _of_table(path: Path) -> list[Record]:
    """Read the cells of a table, named by their results or by the table's list; and results whose cells are gone."""
    plan = read_plans(path)
    folders = {path / "results", *(cell.results for cell in plan.values())}
    kept: dict[str, dict[str, Any]] = {}
    homes: dict[str, Path] = {}
    for folder in sorted(folders):
        for result in read_results(folder, strict=False):
            key = result["settings"]
            if "config" in result and (folder == path / "results" or key in plan):  # others lie there too
                kept[key], homes[key] = result, folder
    cells = [cell for cell in (path / "cells").glob("*") if RunFolder(cell).config.exists()]
    records = {cell.name: read_run(cell) for cell in cells}
    known: dict[str, Record] = {}
    for key, result in kept.items():
        records[key] = _of_result(result, homes[key], records.get(key))
        known[_settings(records[key].config)] = records[key]
    for key, record in records.items():
        if key in kept:
            continue
        if cell := plan.get(key):
            axes = {axis: value for axis, value in cell.axes.items() if axis != "seed"}
            about = replace(record, name=cell.name, label=cell.label, axes=axes, table=cell.table)
            records[key] = replace(about, position=cell.position)
        elif like := known.get(_settings(record.config)):  # of an earlier version: with its other seeds
            records[key] = replace(record, label=like.label, axes=like.axes, table=like.table, position=like.position)
    return sorted(records.values(), key=_order)


def _order(record: Record) -> tuple[Any, ...]:
    """Return what sorts runs as in their table's file; older results lack it: fewer methods first, by axes, by seed."""
    place = (record.position is None, record.table, record.position or 0)
    return (
        *place, len(record.config["method"]), record.label, json.dumps(record.axes, sort_keys=True), record.seed or 0
    )  # fmt: skip


def _rows_of(result: Mapping[str, Any]) -> list[Row]:
    """Return the rounds as far as a result keeps them: metrics, loss and ε spent, and some rounds' norms."""
    rows: dict[int, Row] = {}
    for round_, accuracy in result.get("curve", []):  # all that earlier versions kept
        rows[round_] = {"round": round_, "accuracy": accuracy, "epsilon": None, "local_only": {}}
    for measured in result.get("measured", []):
        round_, figures = measured["round"], {k: v for k, v in measured.items() if k not in _NO_METRICS}
        rows[round_] = {
            "round": round_, "figures": figures, "accuracy": figures.get("accuracy"), "loss": measured.get("loss"),
            "epsilon": measured.get("epsilon"), "local_only": {},
        }  # fmt: skip
    for norms in result.get("norms", []):
        row = rows.setdefault(norms["round"], {"round": norms["round"], "accuracy": None, "local_only": {}})
        row["local_only"] = {key: value for key, value in norms.items() if key != "round"}
    return [rows[round_] for round_ in sorted(rows)]


def method_words(config: Mapping[str, Any]) -> str:
    """Return `DP-FedAvg`, `DP-FedAvg + BLUR + LUS`, `FedAvg`, `AE-DPFL`."""
    names: list[str] = [method["name"].upper() for method in config["method"]]
    if names and names[0].endswith("-DPFL"):
        return names[0]
    noiseless = config.get("noise_multiplier") == 0 or str(config.get("epsilon")) == "inf"
    base = "DP-FedAvg" if not noiseless else "FedAvg" if str(config["clip_norm"]) == "inf" else "Clip only"
    return " + ".join([base, *names])


def grouped(records: Sequence[Record]) -> list[Group]:
    """Group runs that differ in their seed only, in the order in which they come; each group has its own name."""
    groups: dict[str, Group] = {}
    for record in records:
        key = json.dumps([record.label, record.axes, _settings(record.config)], sort_keys=True)
        groups.setdefault(key, Group(record.label, record.axes)).records.append(record)
    same: dict[str, list[Group]] = {}
    for group in groups.values():
        same.setdefault(group.name, []).append(group)
    return [replace(group, label=_with_settings(group, same[group.name])) for group in groups.values()]


def _with_settings(group: Group, alike: Sequence[Group]) -> str:
    """Return a group's label, with the settings that tell it from groups of the same name."""
    if len(alike) == 1:
        return group.label
    tables = [dict(flatten(_without_seed(each.records[0].config))) for each in alike]
    own = dict(flatten(_without_seed(group.records[0].config)))
    keys = [key for key in own if any(table.get(key) != own[key] for table in tables)]
    words = ", ".join(f"{key} = {own[key]}" for key in keys[:_NAMED]) or group.records[0].name
    return f"{group.label} ({words}{', …' if len(keys) > _NAMED else ''})"


def headline(groups: Sequence[Group]) -> Measure:
    """Return the metric that these runs are about: the first one's, if all have it."""
    records = [record for group in groups for record in group.records]
    shared = [m for m in records[0].measures if all(m in record.measures for record in records)] if records else []
    return shared[0] if shared else ACCURACY


def measure_named(name: str | None, groups: Sequence[Group]) -> Measure:
    """Return the metric of this name; the headline without one."""
    if name is None:
        return headline(groups)
    known = {measure.name: measure for group in groups for record in group.records for measure in record.measures}
    if name not in known:
        raise ConfigError(f"metric {name!r} was not measured in these runs: {nearest(name, known)}")
    return known[name]


def numeric_axes(groups: Sequence[Group]) -> list[str]:
    """Return the axes that have several numbers, ε first, then those with most values; an axis of words is none."""
    values: dict[str, set[float]] = {}
    for group in groups:
        for name, value in group.axes.items():
            number = as_number(value)
            values.setdefault(name, set()).add(math.nan if number is None else number)
    found = [name for name, numbers in values.items() if not any(map(math.isnan, numbers)) and len(numbers) > 1]
    return sorted(found, key=lambda name: (name != "epsilon", -len(values[name])))


def as_number(value: Any) -> float | None:
    """Return a setting as a number, with what JSON writes for infinity; None for what is no number."""
    if isinstance(value, bool) or not (isinstance(value, int | float) or value == "inf"):
        return None
    return float(value)


def flatten(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return a configuration as `key.of.part: value`, for tables."""
    rows: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            rows += flatten(value, f"{prefix}{key}.")
        else:
            text = "–" if value is None else value if isinstance(value, str) else json.dumps(value)
            rows.append((f"{prefix}{key}", text))
    return rows


def _settings(config: Mapping[str, Any]) -> str:
    """Return all settings but the seed, to look things up by."""
    return canonical(_without_seed(config))


def _without_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "seed"}
