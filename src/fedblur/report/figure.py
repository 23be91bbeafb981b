"""A figure of a report: the drawing, its words for those who do not see it, and its numbers as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
DRAWN, LISTED = 120, 40  # points of a line, rows of a table: enough to see and to read


@dataclass(frozen=True)
class Figure:
    """One chart of a page. `local_only`: computed from what no noise protects."""

    key: str  # unique on the page
    title: str
    words: str  # what it shows, in a sentence or two
    svg: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: Sequence[tuple[str, str]] = field(default=())  # (class, name)
    local_only: bool = False


def thin(points: Sequence[T], most: int) -> list[T]:
    """At most so many, evenly spaced, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def table(rows: Iterable[Sequence[str]]) -> list[Sequence[str]]:
    """The rows of a figure's table, thinned."""
    return thin(list(rows), LISTED)
