"""The figures that compare. In: groups of runs. Out: accuracy by round, by ε spent, and at the end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from fedblur.report.comparison import Line
from fedblur.report.figure import DRAWN, Figure, percent, table, thin
from fedblur.report.records import Group, Row
from fedblur.report.svg import Axis, Series, axis_of, interval_chart, line_chart
from fedblur.report.svg import percent as whole

STYLES = 8  # lines that can be told apart; more groups are in the table only
_LONGEST = 48  # letters of a name in a chart
Point = tuple[float, float, float, float]  # x, mean, lowest, highest over seeds


def group_figures(groups: Sequence[Group], lines: Sequence[Line]) -> list[Figure]:
    """What there is to compare; one group alone is drawn too."""
    shown = list(groups[:STYLES])
    figures = [
        _accuracy(shown, "by-round", "Accuracy by round", "round", lambda row: row["round"]),
        _accuracy(shown, "by-epsilon", "Accuracy by ε spent", "ε spent", lambda row: row.get("epsilon")),
        _ends(lines[:STYLES]) if len(groups) > 1 else None,
    ]
    return [figure for figure in figures if figure is not None]


def _accuracy(
    groups: Sequence[Group], key: str, title: str, label: str, where: Callable[[Row], float | None]
) -> Figure | None:
    lines = [(index, group, _over_seeds(group, where)) for index, group in enumerate(groups)]
    lines = [(index, group, thin(points, DRAWN)) for index, group, points in lines if points]
    if not lines:
        return None
    series, rows = [], []
    for index, group, points in lines:
        xs, means, lows, highs = ([point[column] for point in points] for column in range(4))
        series.append(Series(group.name, xs, means, index, [(lows, highs)] if len(group.records) > 1 else []))
        rows += table([group.name, f"{x:.4g}", percent(mean)] for x, mean, _, _ in points)
    ends = "; ".join(_course(group, label, points) for _, group, points in lines)
    several = any(len(group.records) > 1 for group in groups)
    shaded = " Mean over seeds, shaded from the lowest to the highest." if several else ""
    if any("stage" in row for group in groups for row in group.records[0].rows) and label == "round":
        shaded += " A run in stages (voting, a search) counts parts of its last stage instead of rounds."
    everything = [x for each in series for x in each.xs]
    x = axis_of(label, everything, zero=label != "round")
    drawn = line_chart(key, series, x, _height(series), tips=_tips(label, lines))
    legend = [(f"line s{index}", group.name) for index, group, _ in lines] if len(lines) > 1 else []
    header = ("run", label, "accuracy")
    one = len(lines) == 1
    return Figure(key, title, f"{ends}.{shaded}", drawn, header[one:], [row[one:] for row in rows], legend)


def _course(group: Group, label: str, points: Sequence[Point]) -> str:
    """Where a line begins and where it ends, in words."""
    (first, low, *_), (last, high, *_) = points[0], points[-1]
    return f"{group.name}: {percent(low)} at {label} {first:.3g}, {percent(high)} at {label} {last:.3g}"


def _height(series: Sequence[Series]) -> Axis:
    values = [y for each in series for y in each.ys]
    values += [y for each in series for low, high in each.bands for y in (*low, *high)]
    low, high = min(values), max(values)
    return Axis("", 0.0, 1.0, write=whole) if low < 0.3 else axis_of("", [low, min(1.0, high)], write=whole)


def _tips(label: str, lines: Sequence[tuple[int, Group, list[Point]]]) -> list[str]:
    """For each place of the first line: what every line has there, or last had."""
    tips = []
    for x, *_ in lines[0][2]:
        values = []
        for _, group, points in lines:
            before = [point for point in points if point[0] <= x + 1e-9]
            values.append(f"{group.name} {percent(before[-1][1])}" if before else f"{group.name} –")
        tips.append(f"{label} {x:.4g}: {'; '.join(values)}")
    return tips


def _over_seeds(group: Group, where: Callable[[Row], float | None]) -> list[Point]:
    """Mean and range where seeds were measured at the same place; a group's seeds spend and evaluate alike."""
    found: dict[float, list[float]] = {}
    for record in group.records:
        measured = [(where(row), float(row["accuracy"])) for row in record.evaluations()]
        last = {
            round(float(x), 9): y for x, y in measured if x is not None and x != math.inf
        }  # the newest at each place
        for x, y in last.items():
            found.setdefault(x, []).append(y)
    return [(x, statistics.mean(ys), min(ys), max(ys)) for x, ys in sorted(found.items())]


def _ends(lines: Sequence[Line]) -> Figure | None:
    """The final accuracy of each group, with its standard deviation over seeds."""
    known = [(index, line, line.mean, line.spread or 0.0) for index, line in enumerate(lines) if line.mean is not None]
    if len(known) < 2:
        return None
    edges = [edge for _, _, mean, spread in known for edge in (mean - spread, mean + spread)]
    x = axis_of("accuracy at the end, %", edges)
    rows = [(index, mean - spread, mean, mean + spread) for index, _, mean, spread in known]
    names = [shortened(line.group.name) for _, line, _, _ in known]
    words = "; ".join(f"{line.group.name} {_score(line)} %" for _, line, _, _ in known)
    return Figure(
        "ends",
        "Accuracy at the end",
        f"{words}. Dots are means, bars one standard deviation over seeds.",
        interval_chart("ends", rows, names, x),
        ("run", "mean %", "std", "seeds"),
        [
            [line.group.name, f"{mean:.2f}", "–" if line.spread is None else f"{spread:.2f}", str(line.seeds)]
            for _, line, mean, spread in known
        ],
    )


def shortened(name: str) -> str:
    """A name that fits into a chart."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def _score(line: Line) -> str:
    return f"{line.mean:.2f}" + ("" if line.spread is None else f" ± {line.spread:.2f}")
