"""The charts of a report. In: records and groups of them. Out: a figure for everything that they have numbers for."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fedblur.core.callbacks import Row
from fedblur.report.comparison import Line
from fedblur.report.records import Group, Record
from fedblur.report.svg import Axis, Series, axis_of, bar_chart, hundredths, interval_chart, line_chart

STYLES = 8  # lines that can be told apart; more groups are in the table only
DRAWN, LISTED = 120, 40  # points of a line, rows of a table: enough to see and to read
LONGEST = 42  # letters of a name in a chart
T = TypeVar("T")
Point = tuple[float, float, float, float]  # x, mean, lowest, highest over seeds


@dataclass(frozen=True)
class Figure:
    """One chart of a page, with a caption and its numbers. `local_only`: computed from what no noise protects."""

    key: str  # unique on the page
    title: str
    words: str  # how to read it, and what it comes to
    svg: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: Sequence[tuple[str, str]] = ()  # (class, name)
    local_only: bool = False


def group_figures(groups: Sequence[Group], lines: Sequence[Line]) -> list[Figure]:
    """Compare groups: accuracy by round, by ε spent and at the end. One group alone is drawn too."""
    shown = list(groups[:STYLES])
    figures = [
        _unless_damaged(lambda: _accuracy(shown, "by-round", "Accuracy by round", "round", lambda row: row["round"])),
        _unless_damaged(
            lambda: _accuracy(shown, "by-epsilon", "Accuracy by ε spent", "ε spent", lambda row: row.get("epsilon"))
        ),
        _ends(lines[:STYLES]) if len(groups) > 1 else None,
    ]
    return [figure for figure in figures if figure is not None]


def _accuracy(
    groups: Sequence[Group], key: str, title: str, label: str, where: Callable[[Row], float | None]
) -> Figure | None:
    found = [(index, group, thin(_over_seeds(group, where), DRAWN)) for index, group in enumerate(groups)]
    lines = [(index, group, points) for index, group, points in found if points]
    if not lines:
        return None
    several = any(len(group.records) > 1 for group in groups)
    words = ["Accuracy on held-out data, measured during training."]
    if several:
        words = ["Lines are means over seeds; shading spans the lowest to the highest seed."]
    if label == "round" and any("stage" in row for group in groups for row in group.records[0].rows):
        words.append("A run in stages (voting, a search) counts the steps of its last stage.")
    best = max(lines, key=lambda line: line[2][-1][1])
    words.append(f"{'Highest at the end' if len(lines) > 1 else 'At the end'}: {percent(best[2][-1][1])}")
    words[-1] += f" ({best[1].name})." if len(lines) > 1 else "."
    series = []
    for index, group, points in lines:
        xs, means, lows, highs = ([point[column] for point in points] for column in range(4))
        series.append(Series(xs, means, index, [(lows, highs)] if len(group.records) > 1 else []))
    low = min(point[2] for _, _, points in lines for point in points)
    high = max(point[3] for _, _, points in lines for point in points)
    name = "held-out accuracy (%)"
    y = Axis(name, 0.0, 1.0, write=hundredths) if low < 0.3 else axis_of(name, [low, high], write=hundredths)
    everything = [x for each in series for x in each.xs]
    tips = []
    for x in thin(sorted(set(everything)), DRAWN):  # at each place: what every line has there, or last had
        before = [[point for point in points if point[0] <= x + 1e-9] for _, _, points in lines]
        values = [f"{g.name} {percent(seen[-1][1]) if seen else '–'}" for (_, g, _), seen in zip(lines, before)]
        tips.append((x, f"{label} {x:.4g}: {'; '.join(values)}"))
    alone = len(lines) == 1
    first = 1 if alone else 0  # column of the tables: a single run needs no name
    rows = [
        row[first:]
        for _, group, points in lines
        for row in listed([group.name, f"{x:.4g}", percent(mean)] for x, mean, _, _ in points)
    ]
    return Figure(
        key,
        title,
        " ".join(words),
        line_chart(key, series, axis_of(label, everything, zero=label != "round"), y, tips),
        ("run", label, "accuracy")[first:],
        rows,
        () if alone else [(f"line s{index}", group.name) for index, group, _ in lines],
    )


def _over_seeds(group: Group, where: Callable[[Row], float | None]) -> list[Point]:
    """Return mean and range where seeds were measured at the same place; a group's seeds spend and evaluate alike."""
    found: dict[float, list[float]] = {}
    for record in group.records:
        measured = [(where(row), row["accuracy"]) for row in record.evaluations()]
        newest = {round(float(x), 9): y for x, y in measured if x is not None and x != math.inf and y is not None}
        for x, y in newest.items():
            found.setdefault(x, []).append(y)
    return [(x, statistics.mean(ys), min(ys), max(ys)) for x, ys in sorted(found.items())]


def _ends(lines: Sequence[Line]) -> Figure | None:
    known = [(index, line, line.mean, line.spread or 0.0) for index, line in enumerate(lines) if line.mean is not None]
    if len(known) < 2:
        return None
    edges = [edge for _, _, mean, spread in known for edge in (mean - spread, mean + spread)]
    names = [line.group.name for _, line, _, _ in known]
    spreads = [f" ± {line.spread:.2f}" if line.spread is not None else "" for _, line, _, _ in known]
    return Figure(
        "ends",
        "Accuracy at the end",
        "Dots are means over seeds; bars reach one standard deviation to either side.",
        interval_chart(
            "ends",
            [(index, mean - spread, mean, mean + spread) for index, _, mean, spread in known],
            [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in names],
            axis_of("held-out accuracy in the last round (%)", edges),
            "setting",
            [f"{name}: {mean:.2f}{pm} %" for name, (_, _, mean, _), pm in zip(names, known, spreads)],
        ),
        ("run", "mean (%)", "standard deviation", "seeds"),
        [
            [line.group.name, f"{mean:.2f}", "–" if line.spread is None else f"{line.spread:.2f}", str(line.seeds)]
            for _, line, mean, _ in known
        ],
    )


def run_figures(record: Record, key: str) -> list[Figure]:
    """Draw what one run measured inside its rounds; all of it is local only."""
    drawers = {"norms": _norms, "clipped": _clipped, "signal": _signal, "classes": _classes, "clients": _clients}
    drawn = [_unless_damaged(functools.partial(draw, record, f"{key}-{name}")) for name, draw in drawers.items()]
    return [figure for figure in drawn if figure is not None]


def _unless_damaged(draw: Callable[[], Figure | None]) -> Figure | None:
    """Draw, or leave the figure out: rows hold diagnostics that nothing protects, and damage leaves any value there."""
    try:
        return draw()
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError):
        return None


def _norms(record: Record, key: str) -> Figure | None:
    """Draw the distribution of update norms before clipping, with the clip norm."""
    points = thin([(t, q) for t, q in record.local_only("norm_quantiles") if q[0] > 0], DRAWN)
    if not points:
        return None
    limit = dict(record.local_only("clip_norm"))
    xs, columns = [t for t, _ in points], [[q[index] for _, q in points] for index in range(5)]
    bounds = [limit[t] for t in xs if t in limit]
    clips = len(bounds) == len(xs)  # not without a clip norm
    series = [Series(xs, columns[2], 0, [(columns[0], columns[4]), (columns[1], columns[3])])]
    legend = [("line s0", "median"), ("band s0", "middle half, and 5 to 95 %")]
    tips = [(t, f"round {t}: median {number(q[2])}, half between {number(q[1])} and {number(q[3])}") for t, q in points]
    return Figure(
        key,
        "Update norms before clipping",
        "Updates above the clip norm S are scaled down to it." if clips else "No clip norm is set: nothing is clipped.",
        line_chart(
            key,
            [*series, Series(xs, bounds, 1)] if clips else series,
            axis_of("round", xs),
            _norm_axis("norm of an update (ℓ2)", [*columns[0], *columns[4], *bounds]),
            [(t, f"{words}, S = {number(limit.get(t))}") for t, words in tips],
        ),
        ("round", "5 %", "25 %", "median", "75 %", "95 %", "clip norm"),
        listed([str(t), *map(number, q), number(limit.get(t))] for t, q in points),
        [*legend, ("line s1", "clip norm S")] if clips else legend,
        local_only=True,
    )


def _clipped(record: Record, key: str) -> Figure | None:
    points = thin(record.local_only("clipped_share"), DRAWN)
    if not points:
        return None
    xs = [float(t) for t, _ in points]
    return Figure(
        key,
        "Share of clipped clients",
        "Clients of each round whose update was longer than the clip norm.",
        line_chart(
            key,
            [Series(xs, [share for _, share in points])],
            axis_of("round", xs),
            Axis("clipped clients (% of the cohort)", 0.0, 1.0, write=hundredths),
            [(t, f"round {t}: {percent(share)} clipped") for t, share in points],
        ),
        ("round", "clipped"),
        listed([str(t), percent(share)] for t, share in points),
        local_only=True,
    )


def _signal(record: Record, key: str) -> Figure | None:
    """Draw the norm of the mean clipped update against that of the noise added to it."""
    limit, noise = dict(record.local_only("clip_norm")), dict(record.local_only("noise_norm"))
    found = [(t, kappa * limit[t], noise[t]) for t, kappa in record.local_only("kappa") if t in limit and t in noise]
    points = thin(found, DRAWN)
    if not points:
        return None
    xs, signals, noises = ([float(point[index]) for point in points] for index in range(3))
    noisy, legend = any(noises), [("line s0", "signal: mean clipped update")]
    ratio = f"The signal of the last round is {signals[-1] / noises[-1]:.2g} times its noise" if noises[-1] else ""
    values = [value for value in (*signals, *noises) if value > 0] or [1.0]
    return Figure(
        key,
        "Signal and noise per round",
        f"{ratio}; noise averages out over rounds." if ratio else "No noise was added in the last round.",
        line_chart(
            key,
            [Series(xs, signals, 0), *([Series(xs, noises, 1)] if noisy else [])],
            axis_of("round", xs),
            _norm_axis("norm of the cohort's mean update (ℓ2)", values),
            [(t, f"round {t}: signal {number(a)}, noise {number(b)}") for t, a, b in points],
        ),
        ("round", "signal", "noise"),
        listed([str(t), number(a), number(b)] for t, a, b in points),
        [*legend, ("line s1", "noise on it (expected norm)")] if noisy else legend,
        local_only=True,
    )


def _norm_axis(title: str, values: Sequence[float]) -> Axis:
    return axis_of(title, values, log=max(values) > 8 * min(values), zero=True)


def _classes(record: Record, key: str) -> Figure | None:
    found: list[tuple[int, Any]] = record.local_only("class_accuracy")
    if not found:
        return None
    shares: list[float | None] = found[-1][1]
    counts: list[int] = record.local_only("class_samples")[-1][1]
    known = [(share, label) for label, share in enumerate(shares) if share is not None]
    names = [str(label) for label in range(len(shares))]
    rows = [[name, percent(share), str(n)] for name, share, n in zip(names, shares, counts)]
    return Figure(
        key,
        "Accuracy by class",
        f"Held-out data after the last round. Lowest: class {min(known)[1]}.",
        bar_chart(
            key,
            shares,
            names,
            "class",
            Axis("held-out accuracy (%)", 0.0, 1.0, write=hundredths),
            [f"class {name}: {share} of {n}" for name, share, n in rows],
            [statistics.mean(share for share, _ in known)],
        ),
        ("class", "accuracy", "samples"),
        rows,
        [("rule", "mean over classes")],
        local_only=True,
    )


def _clients(record: Record, key: str) -> Figure | None:
    """Draw a histogram of training clients by accuracy on their own data."""
    found = record.local_only("client_accuracy")
    if not found:
        return None
    shares = sorted(found[-1][1])
    bins = [sum(1 for share in shares if min(9, int(10 * share)) == index) for index in range(10)]
    names = [f"{10 * index}–{10 * (index + 1)}" for index in range(10)]
    tenth = statistics.mean(shares[: max(1, len(shares) // 10)])
    return Figure(
        key,
        "Accuracy by client",
        f"Training clients on their own samples. The lowest tenth reaches {percent(tenth)} on average.",
        bar_chart(
            key,
            bins,
            [str(edge) for edge in range(0, 101, 10)],
            "accuracy on own samples (%)",
            axis_of("number of clients", [0, *bins], zero=True),
            [f"{name} %: {count} clients" for name, count in zip(names, bins)],
        ),
        ("accuracy (%)", "clients"),
        [[name, str(count)] for name, count in zip(names, bins)],
        local_only=True,
    )


def thin(points: Sequence[T], most: int) -> list[T]:
    """Return at most so many points, evenly spaced, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def listed(rows: Iterable[Sequence[str]]) -> list[Sequence[str]]:
    """Return a table's rows, thinned."""
    return thin(list(rows), LISTED)


def percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
