"""What a report is about. In: run folders, or the folder of a table. Out: records, in groups of like settings.

Everything is read as it lies there, finished or not: a run that goes on has no summary yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedblur.config import canonical
from fedblur.errors import RunError
from fedblur.runfolder import RunFolder
from fedblur.verification import read_json

Row = dict[str, Any]
_NAMED = 2  # settings in a group's name, at most


@dataclass(frozen=True)
class Record:
    """One run, as far as it got."""

    name: str
    label: str  # what it is compared by; seeds share it
    axes: dict[str, Any]  # of the table that it belongs to, without the seed
    config: dict[str, Any]
    rows: list[Row]
    summary: dict[str, Any] | None  # None: it goes on, or was killed
    path: Path | None = None  # None: only its result is kept

    @property
    def seed(self) -> int | None:
        seed: int | None = self.config.get("seed")
        return seed

    @property
    def complete(self) -> bool:
        return self.summary is not None and self.summary["status"] == "complete"

    @property
    def rounds_done(self) -> int:
        return int(self.rows[-1]["round"]) if self.rows else 0

    @property
    def rounds_planned(self) -> int:
        """Of the stage that the run is in, where it has stages (voting)."""
        return int((self.rows[-1].get("rounds") if self.rows else None) or self.config["rounds"])

    def local_only(self, key: str) -> list[tuple[int, Any]]:
        """(round, value) where a round has this figure."""
        found = ((row["round"], row.get("local_only", {}).get(key)) for row in self.rows)
        return [(round_, value) for round_, value in found if value is not None]

    def evaluations(self) -> list[Row]:
        return [row for row in self.rows if row.get("accuracy") is not None]


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
    """All runs in these folders; one that holds none is the user's mistake."""
    records: dict[str, Record] = {}
    for path in paths:
        if not path.exists():
            raise RunError(f"{path} does not exist; give a run folder, or the folder of a table")
        found = _in_folder(path)
        if not found:
            raise RunError(f"{path} holds no run: it has no config.json, cells/ or results/; give a run folder")
        records |= {str((record.path or path / record.name).resolve()): record for record in found}
    return list(records.values())


def _in_folder(path: Path) -> list[Record]:
    if RunFolder(path).config.exists():
        return [read_run(path)]
    if (path / "cells").is_dir() or (path / "results").is_dir():
        return _of_table(path)
    children = sorted(path.iterdir()) if path.is_dir() else []
    return [read_run(child) for child in children if RunFolder(child).config.exists()]


def read_run(path: Path) -> Record:
    """A run folder."""
    folder = RunFolder(path)
    config = folder.resolved()
    summary = read_json(folder.summary)
    return Record(path.resolve().name, method_words(config), {}, config, folder.read_rounds(), summary or None, path)


def _of_table(path: Path) -> list[Record]:
    """The cells that are here, named by their results; and results whose cells are gone."""
    results = {file.stem: read_json(file) for file in sorted((path / "results").glob("*.json"))}
    kept = {key: result for key, result in results.items() if isinstance(result, dict) and "config" in result}
    cells = [cell for cell in (path / "cells").glob("*") if RunFolder(cell).config.exists()]
    records = {cell.name: read_run(cell) for cell in cells}
    known: dict[str, tuple[str, dict[str, Any]]] = {}
    for key, result in kept.items():
        axes = {name: value for name, value in result["axes"].items() if name != "seed"}
        base = records.get(key) or Record(key, "", {}, result["config"], _rows_of(result), result)
        records[key] = replace(base, name=result["cell"], label=result["label"], axes=axes)
        known[_settings(base.config)] = (result["label"], axes)
    for key, record in records.items():  # one that still runs belongs with its other seeds
        label, axes = known.get(_settings(record.config), (record.label, record.axes))
        records[key] = replace(record, label=label, axes=axes)
    return [records[key] for key in sorted(records, key=lambda key: _order(records[key]))]


def _order(record: Record) -> tuple[Any, ...]:
    """Fewer methods first: what others are compared with; then by axes, by seed."""
    return (
        len(record.config["method"]), record.label, json.dumps(record.axes, sort_keys=True), record.seed or 0
    )  # fmt: skip


def _rows_of(result: Mapping[str, Any]) -> list[Row]:
    """Rounds as far as a result keeps them: accuracy, and some rounds' norms."""
    rows: dict[int, Row] = {}
    for round_, accuracy in result.get("curve", []):
        rows[round_] = {"round": round_, "accuracy": accuracy, "epsilon": None, "local_only": {}}
    for norms in result.get("norms", []):
        row = rows.setdefault(norms["round"], {"round": norms["round"], "accuracy": None, "local_only": {}})
        row["local_only"] = {key: value for key, value in norms.items() if key != "round"}
    return [rows[round_] for round_ in sorted(rows)]


def method_words(config: Mapping[str, Any]) -> str:
    """`DP-FedAvg`, `DP-FedAvg + BLUR + LUS`, `FedAvg`, `AE-DPFL`."""
    names: list[str] = [method["name"].upper() for method in config["method"]]
    if names and names[0].endswith("-DPFL"):
        return names[0]
    noiseless = config.get("noise_multiplier") == 0 or str(config.get("epsilon")) == "inf"
    base = "DP-FedAvg" if not noiseless else "FedAvg" if str(config["clip_norm"]) == "inf" else "Clip only"
    return " + ".join([base, *names])


def grouped(records: Sequence[Record]) -> list[Group]:
    """Runs of the same settings but for the seed, in the order in which they come; names tell groups apart."""
    groups: dict[str, Group] = {}
    for record in records:
        key = json.dumps([record.label, record.axes, _settings(record.config)], sort_keys=True)
        groups.setdefault(key, Group(record.label, record.axes)).records.append(record)
    return _told_apart(list(groups.values()))


def _told_apart(groups: list[Group]) -> list[Group]:
    """Where groups would have one name, the settings that they differ in are added to it."""
    same: dict[str, list[Group]] = {}
    for group in groups:
        same.setdefault(group.name, []).append(group)
    return [replace(group, label=_with_settings(group, same[group.name])) for group in groups]


def _with_settings(group: Group, alike: Sequence[Group]) -> str:
    if len(alike) == 1:
        return group.label
    tables = [dict(flatten(_without_seed(each.records[0].config))) for each in alike]
    own = dict(flatten(_without_seed(group.records[0].config)))
    keys = [key for key in own if any(table.get(key) != own[key] for table in tables)]
    words = ", ".join(f"{key} = {own[key]}" for key in keys[:_NAMED]) or group.records[0].name
    return f"{group.label} ({words}{', …' if len(keys) > _NAMED else ''})"


def flatten(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A configuration as `key.of.part: value`, for tables."""
    rows: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            rows += flatten(value, f"{prefix}{key}.")
        else:
            text = "–" if value is None else value if isinstance(value, str) else json.dumps(value)
            rows.append((f"{prefix}{key}", text))
    return rows


def _settings(config: Mapping[str, Any]) -> str:
    """All that seeds have in common, to look things up by."""
    return canonical(_without_seed(config))


def _without_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "seed"}
