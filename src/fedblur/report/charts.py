"""The charts of a report. In: records and groups of them. Out: a figure for everything that they have numbers for."""

from __future__ import annotations

import functools
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fedblur.core.callbacks import Row
from fedblur.learning.metrics.measures import ACCURACY, Measure, measure_of
from fedblur.report.comparison import Line, over_axis, symbol
from fedblur.report.records import Group, Record, numeric_axes
from fedblur.report.svg import Axis, Series, axis_of, bar_chart, hundredths, interval_chart, line_chart, short

STYLES = 8  # lines that can be told apart; more groups are in the table only
DRAWN, LISTED = 120, 40  # points of a line, rows of a table: enough to see and to read
MOST_AXES, MOST_MARKS = 2, 8  # of a table, with a chart each; values of one that are its ticks
BINS = 10  # of a histogram
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
    """Compare groups by their metric: over a table's axis, by round, by ε spent and at the end."""
    shown, measure = list(groups[:STYLES]), lines[0].measure if lines else ACCURACY
    title = measure.capital
    figures = [
        *(
            _unless_damaged(functools.partial(_over_axis, lines, axis, title))
            for axis in numeric_axes(groups)[:MOST_AXES]
        ),
        _unless_damaged(lambda: _curves(shown, measure, "by-round", f"{title} by round", "round", _round)),
        _unless_damaged(lambda: _curves(shown, measure, "by-epsilon", f"{title} by ε spent", "ε spent", _epsilon)),
        _ends(lines[:STYLES], title) if len(groups) > 1 else None,
    ]
    more = f" The first {STYLES} of {len(groups)} settings; the comparison has all." if len(groups) > STYLES else ""
    return [
        replace(figure, words=figure.words + ("" if figure.key.startswith("over-") else more))
        for figure in figures
        if figure is not None
    ]


def _round(row: Row) -> float | None:
    return row["round"]


def _epsilon(row: Row) -> float | None:
    return row.get("epsilon")


def _over_axis(lines: Sequence[Line], axis: str, title: str) -> Figure | None:
    """Draw the metric over an axis of the table: a curve for each label, a level for what has no place there."""
    measure, sign = lines[0].measure, symbol(axis)
    curves, apart = over_axis(lines, axis)
    if not any(len(curve.points) > 1 for curve in curves):
        return None
    left = max(0, len(curves) + len(apart) - STYLES)
    curves, apart = curves[:STYLES], apart[: max(0, STYLES - len(curves))]
    series, rows = [], []
    for style, curve in enumerate(curves):
        edges = [_ends_of(line) for _, line in curve.points]
        means = [mean for _, mean, _ in edges]
        series.append(
            Series([x for x, _ in curve.points], means, style, errors=[(low, high) for low, _, high in edges])
        )
        rows += [[curve.name, f"{x:g}", *_cells(line)] for x, line in curve.points]
    rules = [(style, _ends_of(line)[1]) for style, (_, line) in enumerate(apart, len(curves))]
    rows += [[name, "–", *_cells(line)] for name, line in apart]
    places = sorted({x for each in series for x in each.xs})
    log, room = places[0] > 0 and places[-1] > 8 * places[0], 0.06 * (places[-1] - places[0])
    low, high = (places[0] / 1.15, places[-1] * 1.15) if log else (places[0] - room, places[-1] + room)
    scale = Axis(sign, low, high, log, marks=places if len(places) <= MOST_MARKS else ())
    heights = [edge for each in series for pair in each.errors or () for edge in pair] + [level for _, level in rules]
    several = any(line.seeds > 1 for line in lines)
    words = f"Final round, held-out data. {'Means over seeds; bars reach one standard deviation.' if several else ''}"
    words += f" Horizontal lines are settings without a finite {sign}." if rules else ""
    tips = []
    for place in places:
        here = [f"{curve.name} {_cells(line)[0]}" for curve in curves for x, line in curve.points if x == place]
        tips.append((place, f"{sign} = {place:g}: {'; '.join(here)}"))
    key = f"over-{re.sub('[^a-z0-9]+', '-', axis.lower())}"
    return Figure(
        key,
        f"{title} over {sign}",
        words + (f" {left} more settings are in the comparison only." if left else ""),
        line_chart(
            key,
            series,
            scale,
            axis_of(f"held-out {measure.title}", heights),
            tips,
            rules,
        ),
        ("setting", sign, measure.title, "standard deviation", "seeds"),
        rows,
        [(f"line s{style}", curve.name) for style, curve in enumerate(curves)]
        + [(f"range s{style}", name) for style, (name, _) in enumerate(apart, len(curves))],
    )


def _ends_of(line: Line) -> tuple[float, float, float]:
    """Return low, mean and high of a line that has a mean."""
    assert line.mean is not None
    return line.mean - (line.spread or 0.0), line.mean, line.mean + (line.spread or 0.0)


def _cells(line: Line) -> list[str]:
    """Return mean, standard deviation and seeds."""
    digits = line.measure.digits
    spread = "–" if line.spread is None else f"{line.spread:.{digits}f}"
    return ["–" if line.mean is None else f"{line.mean:.{digits}f}", spread, str(line.seeds)]


def _curves(
    groups: Sequence[Group], measure: Measure, key: str, title: str, label: str, where: Callable[[Row], float | None]
) -> Figure | None:
    found = [(index, group, thin(_over_seeds(group, measure, where), DRAWN)) for index, group in enumerate(groups)]
    lines = [(index, group, points) for index, group, points in found if points]
    if not lines:
        return None
    several = any(len(group.records) > 1 for group in groups)
    words = [f"{measure.capital} on held-out data, measured during training."]
    if several:
        words = ["Lines are means over seeds; shading spans the lowest to the highest seed."]
    if label == "round" and any("stage" in row for group in groups for row in group.records[0].rows):
        words.append("A run in stages (voting, a search) counts the steps of its last stage.")
    best = (max if measure.larger_is_better else min)(lines, key=lambda line: line[2][-1][1])
    digits = 1 if measure.percent else measure.digits
    words.append(f"{f'{measure.best} at the end' if len(lines) > 1 else 'At the end'}: ")
    words[-1] += measure.shown(best[2][-1][1], digits) + (f" ({best[1].name})." if len(lines) > 1 else ".")
    series = []
    for index, group, points in lines:
        xs, means, lows, highs = ([point[column] for point in points] for column in range(4))
        series.append(Series(xs, means, index, [(lows, highs)] if len(group.records) > 1 else []))
    low = min(point[2] for _, _, points in lines for point in points)
    high = max(point[3] for _, _, points in lines for point in points)
    name = f"held-out {measure.title}"
    write = hundredths if measure.percent else short
    y = Axis(name, 0.0, 1.0, write=write) if measure.percent and low < 0.3 else axis_of(name, [low, high], write=write)
    everything = [x for each in series for x in each.xs]
    tips = []
    for x in thin(sorted(set(everything)), DRAWN):  # at each place: what every line has there, or last had
        before = [[point for point in points if point[0] <= x + 1e-9] for _, _, points in lines]
        values = [
            f"{g.name} {measure.shown(seen[-1][1], digits) if seen else '–'}" for (_, g, _), seen in zip(lines, before)
        ]
        tips.append((x, f"{label} {x:.4g}: {'; '.join(values)}"))
    alone = len(lines) == 1
    first = 1 if alone else 0  # column of the tables: a single run needs no name
    rows = [
        row[first:]
        for _, group, points in lines
        for row in listed([group.name, f"{x:.4g}", measure.shown(mean, digits)] for x, mean, _, _ in points)
    ]
    return Figure(
        key,
        title,
        " ".join(words),
        line_chart(key, series, axis_of(label, everything, zero=label != "round"), y, tips),
        ("run", label, measure.words)[first:],
        rows,
        () if alone else [(f"line s{index}", group.name) for index, group, _ in lines],
    )


def _over_seeds(group: Group, measure: Measure, where: Callable[[Row], float | None]) -> list[Point]:
    """Return mean and range where seeds were measured at the same place; a group's seeds spend and evaluate alike."""
    found: dict[float, list[float]] = {}
    for record in group.records:
        measured = [(where(row), value) for row, value in record.series(measure)]
        newest = {round(float(x), 9): y for x, y in measured if x is not None and x != math.inf}
        for x, y in newest.items():
            found.setdefault(x, []).append(y)
    return [(x, statistics.mean(ys), min(ys), max(ys)) for x, ys in sorted(found.items())]


def _ends(lines: Sequence[Line], title: str) -> Figure | None:
    known = [(index, line) for index, line in enumerate(lines) if line.mean is not None]
    if len(known) < 2:
        return None
    measure = lines[0].measure
    rows = [(index, *_ends_of(line)) for index, line in known]
    names = [line.group.name for _, line in known]
    sign = " %" if measure.percent else ""
    tips = []
    for name, (_, line) in zip(names, known, strict=True):
        mean, spread, _ = _cells(line)
        tips.append(f"{name}: {mean}{'' if line.spread is None else f' ± {spread}'}{sign}")
    return Figure(
        "ends",
        f"{title} at the end",
        "Dots are means over seeds; bars reach one standard deviation to either side.",
        interval_chart(
            "ends",
            rows,
            [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in names],
            axis_of(
                f"held-out {measure.words} in the last round{' (%)' if measure.percent else ''}",
                [edge for _, low, _, high in rows for edge in (low, high)],
            ),
            "setting",
            tips,
        ),
        ("run", "mean (%)" if measure.percent else "mean", "standard deviation", "seeds"),
        [[line.group.name, *_cells(line)] for _, line in known],
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
        return _client_figures(record, key)
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


def _client_figures(record: Record, key: str) -> Figure | None:
    """Draw a histogram of training clients by another metric than accuracy on their own data."""
    found, names = record.local_only("client_figures"), record.local_only("client_metric")
    values = sorted(value for value in found[-1][1] if value is not None) if found else []
    if not values or not names:
        return None
    measure = measure_of(names[-1][1])
    axis = axis_of(measure.title, [measure.scaled(value) for value in values])
    width = (axis.high - axis.low) / BINS or 1.0
    places = [min(BINS - 1, int((measure.scaled(value) - axis.low) / width)) for value in values]
    bins = [places.count(index) for index in range(BINS)]
    edges = [f"{axis.low + index * width:.4g}" for index in range(BINS + 1)]
    spans = [f"{low} to {high}" for low, high in itertools.pairwise(edges)]
    worst = values[: max(1, len(values) // 10)] if measure.larger_is_better else values[-max(1, len(values) // 10) :]
    return Figure(
        key,
        f"{measure.capital} by client",
        f"Training clients on their own samples. The worst tenth: {measure.shown(statistics.mean(worst))} on average.",
        bar_chart(
            key,
            bins,
            edges,
            f"{measure.title} on own samples",
            axis_of("number of clients", [0, *bins], zero=True),
            [f"{span}: {count} clients" for span, count in zip(spans, bins, strict=True)],
        ),
        (measure.title, "clients"),
        [[span, str(count)] for span, count in zip(spans, bins, strict=True)],
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
