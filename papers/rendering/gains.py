"""Differences of accuracies at equal settings and seeds, in percentage points, and how large chance makes them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedblur.core.config import canonical
from papers.rendering.document import Document, Group
from papers.rendering.words import in_order, setting

Part = Mapping[str, Any]  # of a claim, as claims.toml has it


@dataclass(frozen=True)
class Gain:
    """Method less baseline at one setting, over the seeds that both have."""

    axes: dict[str, Any]
    points: float
    seeds: int

    def __str__(self) -> str:
        where = setting(self.axes)
        return f"{self.points:+.2f}" + (f" at {where}" if where else "")


def gains(document: Document, table: str, method: str, baseline: str, part: Part) -> list[Gain]:
    """Return the gain at every setting where both are measured; `at` limits an axis to some of its values."""
    found = []
    for row in document.groups(table):
        if row.label != method or not _wanted(row, part):
            continue
        other = document.group(table, baseline, row.axes)
        seeds = sorted(row.by_seed.keys() & other.by_seed.keys()) if other is not None else []
        if other is not None and seeds:
            points = statistics.mean(row.by_seed[seed] - other.by_seed[seed] for seed in seeds)
            found.append(Gain(row.axes, points, len(seeds)))
    return sorted(found, key=lambda gain: in_order(gain.axes.values()))


def _wanted(row: Group, part: Part) -> bool:
    return all(row.axes.get(axis) in values for axis, values in part.get("at", {}).items())


def seed_spread(document: Document, table: str) -> float:
    """Return the deviation over seeds: pooled over this table, else over all, else the largest ± in the paper."""
    for names in ([table], list(document.specs)):
        spreads = {
            canonical(sorted(cell.key for cell in row.cells)): row.spread
            for name in names
            for row in document.groups(name)
        }
        known = [spread for spread in spreads.values() if spread is not None]
        if known:
            return math.sqrt(statistics.mean(spread**2 for spread in known))
    return max((pm for rows in document.printed.values() for _, pm in rows.values() if pm is not None), default=1.0)


def chance(document: Document, table: str, seeds: int) -> float:
    """Return two standard errors of a difference of two means over so many seeds."""
    return 2 * seed_spread(document, table) * math.sqrt(2 / seeds)


def printed_gains(document: Document, source: str, method: str, baseline: str) -> list[float]:
    """Return the paper's own gains, at every setting that it prints."""
    rows, found = document.printed[source], []
    for name, (value, _) in rows.items():
        label, *axes = name.split(" | ")
        other = rows.get(" | ".join([baseline, *axes]), rows.get(baseline))
        if label == method and other is not None:
            found.append(value - other[0])
    return found


def span(values: Sequence[float]) -> str:
    """Write the smallest and the largest value."""
    low, high = f"{min(values):+.2f}", f"{max(values):+.2f}"
    return low if low == high else f"{low} to {high}"
