"""Results of a table's cells: one small JSON file each, in a folder that several tables may share.

A result holds the configuration it was computed with, and is found again by it, not by its name: a setting that the
library has since learned counts as left at its default; a setting that has changed makes the result stale. A stale
result is reported, never used.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fedblur.checkpoint import write_atomically
from fedblur.config import Config, canonical, config_hash, differences, from_dict, to_dict
from fedblur.errors import ConfigError, FedBlurError, RunError

Result = dict[str, Any]
_MOST_ROUNDS = 60  # of norms that are kept: enough to draw


@dataclass(frozen=True)
class Stale:
    """A result that no cell wants any more, and why."""

    path: Path
    name: str  # of the cell it was computed for
    reason: str

    def __str__(self) -> str:
        return f"stale: {self.path.name} ({self.name}): {self.reason}"


class Results:
    """The results in a folder, by the key of their configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, Result] = {}
        self.paths: dict[str, Path] = {}
        self.broken: list[Stale] = []
        for path in sorted(folder.glob("*.json")):
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            key = config_hash(from_dict(result["config"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.broken.append(Stale(path, "unknown", f"it cannot be read ({error!r})"))
        except FedBlurError as error:  # a setting that is gone, or now refused
            self.broken.append(Stale(path, result.get("cell", "unknown"), str(error)))
        else:
            self.found[key], self.paths[key] = result, path

    def appeared(self, key: str) -> bool:
        """Whether there is a result by now; another process may have written it since this one began."""
        path = self.folder / f"{key}.json"
        if key not in self.found and path.exists():
            self._read(path)
        return key in self.found

    def write(self, key: str, result: Result) -> Result:
        """Keep a finished cell's result; returned as JSON gives it back."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.paths[key] = self.folder / f"{key}.json"
        self.found[key] = json.loads(canonical(result))
        write_atomically(self.paths[key], (json.dumps(self.found[key], indent=1) + "\n").encode())
        return self.found[key]

    def stale(self, wanted: dict[str, Config], names: dict[str, str], tables: Iterable[str]) -> list[Stale]:
        """Results of these tables that none of the wanted cells (by key; `names` by key) is computed with."""
        by_name = {names[key]: config for key, config in wanted.items()}
        left = []
        for key, result in self.found.items():
            if key in wanted or result.get("table") not in set(tables):
                continue
            name, now = result.get("cell", "unknown"), by_name.get(result.get("cell", ""))
            changes = [] if now is None else differences(result["config"], json.loads(canonical(to_dict(now))))
            left.append(Stale(self.paths[key], name, "; ".join(changes) or "the table has no such cell any more"))
        return [*left, *self.broken]


def make_result(about: Result, config: Config, summary: Result, rows: list[Result]) -> Result:
    """What is kept of a run: its settings and summary, accuracy by round, and norms where updates have any."""
    if summary["status"] != "complete":
        raise RunError(f"{about['cell']} is {summary['status']}: only complete runs are results")
    return {
        **about,
        "settings": config_hash(config),
        "date": datetime.now(UTC).date().isoformat(),
        **summary,
        "curve": [[row["round"], round(row["accuracy"], 5)] for row in rows if row["accuracy"] is not None],
        "norms": _norms(rows) if summary["privacy"]["warning"] else [],  # exact: not of people who are protected
        "config": to_dict(config),
    }


def _norms(rows: list[Result]) -> list[Result]:
    """Quantiles of the norms before clipping, by round: `local_only`, thinned out evenly."""
    measured = [row for row in rows if row["local_only"].get("norm_quantiles")]
    step = max(1, -(-len(measured) // _MOST_ROUNDS))
    chosen = [row for row in measured if (row["round"] - 1) % step == 0 or row is measured[-1]]
    kept = ("norm_quantiles", "trained_norm_quantiles", "clip_norm", "clipped_share", "kappa", "alpha_bar", "beta")
    return [{"round": row["round"]} | {key: _short(row["local_only"].get(key)) for key in kept} for row in chosen]


def _short(value: Any) -> Any:
    """Four significant digits are enough to draw."""
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def hardware(device: torch.device) -> str:
    """What the device is, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPU cores, {platform.machine()}"


def demand_folder(folder: Path) -> None:
    """A results folder that is a file is the user's mistake."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"results={str(folder)!r} is not a folder; give one for small JSON files")
