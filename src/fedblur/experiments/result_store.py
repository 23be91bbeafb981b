"""Results of a table's cells: one small JSON file each, in a folder that several tables may share.

A finished table's files can be packed into one, TABLE.jsonl.gz: JSON lines, one a cell, compressed. Both are read.

A result holds the configuration it was computed with, and is found again by it, not by its name: a setting that the
library has since learned counts as left at its default; a setting that has changed makes the result stale. A stale
result is reported, never used.

These files are made to be shared, so they hold nothing that is local only: no norms, no share of clipped clients, and
no seconds, since a round takes longer the more clients came. Those lie in a folder of their own, RESULTS-local-only,
which only its owner can read. Results of earlier versions hold both in one file; they are read as before.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedblur.core.callbacks import Row, figures_of
from fedblur.core.config import Config, canonical, config_hash, differences, from_dict, to_dict
from fedblur.core.decompression import read_at_most
from fedblur.core.errors import FedBlurError, RunError
from fedblur.core.files import (
    demand_digest,
    locked,
    make_folder,
    parse_json,
    read_bytes,
    read_json_if_there,
    remove,
    with_digest,
    write_atomically,
)
from fedblur.learning.metrics.measures import ordered

Result = dict[str, Any]
PACKED = ".jsonl.gz"
_UNREADABLE = (OSError, EOFError, zlib.error, ValueError, RunError)
_MOST_BYTES = 512 * 2**20  # of a packed file without its compression
_MOST_ROUNDS = 60  # of norms that are kept: enough to draw
LOCAL_ONLY = ("local_only", "norms", "seconds")  # keys of a result that must not be shared


@dataclass(frozen=True)
class Stale:
    """A result that no cell wants any more, and why."""

    path: Path
    name: str  # of the cell it was computed for
    reason: str

    def __str__(self) -> str:
        return f"stale: {self.path.name} ({self.name}): {self.reason}"


class Results:
    """The results in a folder by the key of their configuration: a file for each cell, or packed by table.

    `found` also has what is local only, as far as it is on this machine.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, Result] = {}
        self.paths: dict[str, Path] = {}
        self.broken: list[Stale] = []
        for path in _files(folder):
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            results = _parse(path)
        except _UNREADABLE as error:
            self.broken.append(Stale(path, "unknown", f"it cannot be read ({error!r})"))
            return
        for result in results:
            try:
                key = config_hash(from_dict(result["config"]))
            except (ValueError, KeyError, TypeError) as error:
                self.broken.append(Stale(path, "unknown", f"it cannot be read ({error!r})"))
            except FedBlurError as error:  # a setting that is gone, or now refused
                self.broken.append(Stale(path, result.get("cell", "unknown"), str(error)))
            else:
                self.found[key], self.paths[key] = with_local_only(self.folder, result), path

    def appeared(self, key: str) -> bool:
        """Return whether there is a result by now; another process may have written it since this one began."""
        path = self.folder / f"{key}.json"
        if key not in self.found and path.exists():
            self._read(path)
        return key in self.found

    def write(self, key: str, result: Result) -> Result:
        """Keep a finished cell's result; returned as JSON gives it back. What is local only goes to its own folder."""
        whole = json.loads(canonical(result))
        shared = with_digest(shareable(whole))
        local = with_digest({name: whole[name] for name in LOCAL_ONLY if name in whole})
        make_folder(self.folder)
        private = local_only_folder(self.folder)
        make_folder(private, private=True)
        self.paths[key] = self.folder / f"{key}.json"
        write_atomically(private / f"{key}.json", (json.dumps(local, indent=1) + "\n").encode(), private=True)
        write_atomically(self.paths[key], (json.dumps(shared, indent=1) + "\n").encode())
        self.found[key] = {**read_local_only(self.folder, key), **shared}
        return self.found[key]

    def stale(self, wanted: dict[str, Config], names: dict[str, str], tables: Iterable[str]) -> list[Stale]:
        """Find results of these tables that belong to none of the wanted cells (by key; `names` by key)."""
        by_name = {names[key]: config for key, config in wanted.items()}
        left = []
        for key, result in self.found.items():
            if key in wanted or result.get("table") not in set(tables):
                continue
            name, now = result.get("cell", "unknown"), by_name.get(result.get("cell", ""))
            changes = [] if now is None else differences(result["config"], json.loads(canonical(to_dict(now))))
            left.append(Stale(self.paths[key], name, "; ".join(changes) or "the table has no such cell any more"))
        return [*left, *self.broken]


def _files(folder: Path) -> list[Path]:
    """Return the files that hold results; a cell's own file comes later and replaces what is packed."""
    return [*sorted(folder.glob(f"*{PACKED}")), *sorted(folder.glob("*.json"))]


def _parse(path: Path) -> list[Result]:
    lines = [read_bytes(path)]
    if path.name.endswith(PACKED):
        with gzip.open(path) as file:
            lines = read_at_most(file, _MOST_BYTES).splitlines()
    results = [parse_json(line, path) for line in lines]
    for result in results:
        demand_digest(result, path, "delete it, and fedblur table makes it again")
    return results


def read_results(path: Path, strict: bool = True) -> list[Result]:
    """Return the results in a file or folder as they were written, by the names of their cells.

    A result of settings that this version no longer accepts is among them. A damaged file, or one that holds something
    else, is a RunError; without `strict` it is left out.
    """
    found: dict[str, Result] = {}
    for file in [path] if path.is_file() else _files(path):
        try:
            found |= {str(result["settings"]): result for result in _parse(file)}
        except (*_UNREADABLE, KeyError, TypeError) as error:
            if strict:
                raise RunError(f"{file} holds no results of a table, or is damaged ({error!r})") from None
    return _by_cell(found.values())


def pack(folder: Path) -> dict[Path, int]:
    """Move each cell's own file into TABLE.jsonl.gz beside it; return how many results each file then holds.

    A packed file is whole on disk before the files in it are removed. Equal results make equal bytes.
    """
    lock = folder / ".packing"
    with locked(lock) as mine:
        if not mine:
            raise RunError(f"another command packs {folder}; wait until that ends")
        try:
            tables: dict[Path, list[Path]] = {}
            for path in sorted(folder.glob("*.json")):
                name = str(read_results(path)[0].get("table") or "results")
                if Path(name).name != name:
                    raise RunError(f"{path} names a table {name!r}, which cannot be a file's name")
                tables.setdefault(folder / f"{name}{PACKED}", []).append(path)
            counts = {}
            for packed, paths in tables.items():
                kept = {result["settings"]: result for result in (read_results(packed) if packed.exists() else [])}
                kept |= {result["settings"]: result for path in paths for result in read_results(path)}
                lines = [json.dumps(result, separators=(",", ":")) + "\n" for result in _by_cell(kept.values())]
                write_atomically(packed, gzip.compress("".join(lines).encode(), mtime=0))
                for path in paths:
                    remove(path)
                counts[packed] = len(kept)
            return counts
        finally:
            remove(lock)


def shareable(result: Mapping[str, Any]) -> Result:
    """Return a result without what is local only."""
    return {key: value for key, value in result.items() if key not in LOCAL_ONLY}


def local_only_folder(results: Path) -> Path:
    """Return the folder of what must stay on this machine, beside the one that may be shared."""
    folder = results.resolve()
    return folder.with_name(f"{folder.name}-local-only")


def read_local_only(results: Path, key: str) -> Result:
    """Return what is local only of a result; where it is not on this machine, or damaged, that nothing is known."""
    unknown: Result = {"local_only": {}, "norms": [], "seconds": None}
    path = local_only_folder(results) / f"{key}.json"
    try:
        table = read_json_if_there(path) or {}
        demand_digest(table, path)
    except RunError:
        return unknown
    return unknown | {name: table[name] for name in LOCAL_ONLY if name in table}


def with_local_only(results: Path, result: Result) -> Result:
    """Return a result with what is local only; results of earlier versions hold that themselves."""
    return {**read_local_only(results, str(result.get("settings"))), **result}


def _by_cell(results: Iterable[Result]) -> list[Result]:
    return sorted(results, key=lambda result: (str(result.get("cell")), str(result["settings"])))


def make_result(about: Result, config: Config, summary: Result, rows: list[Row]) -> Result:
    """Return what is kept of a run: settings and summary, figures by round, and norms if updates have any."""
    if summary["status"] != "complete":
        raise RunError(f"{about['cell']} is {summary['status']}: only complete runs are results")
    return {
        **about,
        "settings": config_hash(config),
        "date": datetime.now(UTC).date().isoformat(),
        **summary,
        "curve": [[row["round"], round(value, 5)] for row in rows if (value := row.get("accuracy")) is not None],
        "measured": [_measured(row) for row in rows if figures_of(row)],
        "norms": _norms(rows) if summary["privacy"]["warning"] else [],  # exact: not of people who are protected
        "config": to_dict(config),
    }


def _measured(row: Row) -> Result:
    """Return what an evaluated round says to everyone: what was measured on held-out data, and the ε spent."""
    kept = {"round": row["round"], "epsilon": row.get("epsilon"), "loss": row.get("loss"), **figures_of(row)}
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in kept.items()}


def headline(result: Mapping[str, Any]) -> tuple[str, float]:
    """Return the metric that a result is about, with its figure of the final round."""
    figures = figures_of(result)
    return next(iter(ordered(figures, result["config"]).items()))


def _norms(rows: list[Row]) -> list[Result]:
    """Return quantiles of the norms before clipping, by round: `local_only`, thinned out evenly."""
    measured = [row for row in rows if row["local_only"].get("norm_quantiles")]
    step = max(1, -(-len(measured) // _MOST_ROUNDS))
    chosen = [row for row in measured if (row["round"] - 1) % step == 0 or row is measured[-1]]
    kept = ("norm_quantiles", "trained_norm_quantiles", "clip_norm", "clipped_share", "kappa", "alpha_bar", "beta")
    return [{"round": row["round"]} | {key: _short(row["local_only"].get(key)) for key in kept} for row in chosen]


def _short(value: Any) -> Any:
    """Round to four significant digits, which are enough to draw."""
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
