"""A figure for a paper. In: complete runs and a metric. Out: one line a setting over an axis of the table, or by round.

Lines differ in colour, dash and marker: they can be told apart by colour-blind readers and in grey. Letters are
embedded as TrueType, which journals ask for. The sizes are those of one column and of two.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedblur.core.errors import ConfigError, nearest
from fedblur.core.files import make_folder, write_atomically
from fedblur.learning.metrics.measures import Measure
from fedblur.report.comparison import Line, compare, over_axis, symbol
from fedblur.report.plots import check_suffix, picture
from fedblur.report.records import Group, Record, grouped, measure_named, numeric_axes
from fedblur.report.result_table import in_full, reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C510A")  # Okabe and Ito
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (7, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTHS = {1: 3.4, 2: 7.0}  # inches, of a column and of a page with two
_STYLE: Any = {
    "font.size": 8, "axes.labelsize": 8, "legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "axes.linewidth": 0.6, "lines.linewidth": 1.2, "lines.markersize": 3.5, "pdf.fonttype": 42, "ps.fonttype": 42,
    "svg.fonttype": "none", "svg.hashsalt": "fedblur", "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "axes.grid": True, "grid.color": "#dddddd", "grid.linewidth": 0.5, "axes.axisbelow": True,
}  # fmt: skip
_PLACES = {"round": "round", "epsilon_spent": "ε spent"}  # besides the axes of a table
_MOST = len(COLOURS)


def plot_results(
    records: Sequence[Record], path: Path, metric: str | None = None, over: str | None = None, columns: int = 1
) -> list[str]:
    """Draw the figure and return what its caption must say."""
    check_suffix(path)
    if columns not in WIDTHS:
        raise ConfigError(f"columns={columns} must be 1 or 2")
    groups = [group for group in grouped(records) if group.complete]
    if not groups:
        raise ConfigError("no run here is complete; there is nothing to draw yet")
    measure = measure_named(metric, groups)
    axes = numeric_axes(groups)
    known = {**dict.fromkeys(axes, ""), **_PLACES}
    if over is not None and over not in known:
        raise ConfigError(f"--over {over!r} is no axis of numbers here: {nearest(over, known)}")
    place = over or (axes[0] if axes else "round")
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        from matplotlib.figure import Figure

        width = WIDTHS[columns]
        figure = Figure(figsize=(width, 0.72 * width if columns == 1 else 0.42 * width), layout="constrained", dpi=300)
        drawn = figure.subplots()
        lines = compare(groups, measure)
        words = _by_round(drawn, groups, measure, place) if place in _PLACES else _over(drawn, lines, place)
        drawn.set_ylabel(f"held-out {measure.title}")
        _legend(figure, drawn)
        notes, form = [*words, *_warnings(lines)], path.suffix[1:].lower()
        drawing = picture(figure, form, _metadata(form, measure, place, notes))
    make_folder(path.parent)
    write_atomically(path, drawing)
    return notes


def _over(axes: Axes, lines: Sequence[Line], axis: str) -> list[str]:
    """Draw a line for each setting over an axis of the table, with bars over seeds."""
    curves, apart = over_axis(lines, axis)
    _demand_few(len(curves) + len(apart))
    places = sorted({x for curve in curves for x, _ in curve.points})
    if len(places) < 2:
        raise ConfigError(f"{axis} has fewer than two values among the complete runs; give another --over")
    log = places[0] > 0 and places[-1] > 8 * places[0]
    for style, curve in enumerate(curves):
        # Bars of two lines at one place lie side by side.
        aside = (style - (len(curves) - 1) / 2) * 0.012
        span = math.log(places[-1] / places[0]) if log else places[-1] - places[0]
        xs = [x * math.exp(aside * span) if log else x + aside * span for x, _ in curve.points]
        means = [line.mean for _, line in curve.points]
        errors = [line.error or 0.0 for _, line in curve.points]
        axes.errorbar(
            xs, means, yerr=errors if any(errors) else None, color=COLOURS[style], linestyle=DASHES[style],  # type: ignore[arg-type]
            marker=MARKERS[style], capsize=2, elinewidth=0.8, label=curve.name,
        )  # fmt: skip
    for style, (name, line) in enumerate(apart, len(curves)):
        assert line.mean is not None  # `over_axis` leaves out what has none
        axes.axhline(line.mean, color=COLOURS[style], linestyle=DASHES[style], linewidth=1.0, label=name)
    if log:
        axes.set_xscale("log")
    if len(places) <= 10:
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.minorticks_off()
    axes.set_xlabel(symbol(axis))
    several = any(line.seeds > 1 for line in lines)
    words = ["Final round, held-out data; means over seeds, bars of one standard error." if several else "Final round."]
    return words + ([f"Horizontal lines are settings without a finite {symbol(axis)}."] if apart else [])


def _by_round(axes: Axes, groups: Sequence[Group], measure: Measure, place: str) -> list[str]:
    """Draw what each setting measured during training; shading spans one standard error over seeds."""
    from matplotlib.ticker import MaxNLocator

    _demand_few(len(groups))
    for style, group in enumerate(groups):
        found: dict[float, list[float]] = {}
        for record in group.complete:
            for row, value in record.series(measure):
                x = row["round"] if place == "round" else row.get("epsilon")
                if x is not None and math.isfinite(x):
                    found.setdefault(round(float(x), 9), []).append(measure.scaled(value))
        xs = sorted(found)
        means = [statistics.mean(found[x]) for x in xs]
        errors = [statistics.stdev(found[x]) / math.sqrt(len(found[x])) if len(found[x]) > 1 else 0.0 for x in xs]
        every = max(1, len(xs) // 8)
        axes.plot(
            xs, means, color=COLOURS[style], linestyle=DASHES[style], marker=MARKERS[style], markevery=every,
            label=", ".join([group.label, *(f"{symbol(key)} = {value}" for key, value in group.axes.items())]),
        )  # fmt: skip
        if any(errors):
            low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
            axes.fill_between(xs, low, high, color=COLOURS[style], alpha=0.15, linewidth=0)
    axes.set_xlabel(_PLACES[place])
    if place == "round":
        axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))
    if not axes.has_data():
        raise ConfigError(f"these runs have no {measure.words} by {_PLACES[place]}; give another --over")
    several = any(len(group.complete) > 1 for group in groups)
    return ["Held-out data" + ("; means over seeds, shading of one standard error." if several else ".")]


def _demand_few(lines: int) -> None:
    if lines > _MOST:
        raise ConfigError(f"{lines} lines cannot be told apart, {_MOST} can; give --only LABEL, or another --over")


def _legend(figure: Any, axes: Axes) -> None:
    """Put the legend above the plot, where it hides no line."""
    handles, names = axes.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda index: COLOURS.index(_colour(handles[index])))
    handles, names = [handles[index] for index in order], [names[index] for index in order]
    if len(names) > 1:
        longest = max(map(len, names))
        fit = int(figure.get_figwidth() * 17 / (longest + 7))  # letters of an inch at this size
        figure.legend(handles, names, loc="outside upper center", ncols=max(1, min(len(names), fit)))


def _colour(handle: Any) -> str:
    """Return the colour of a line, or of a line with error bars."""
    line = handle[0] if isinstance(handle, tuple) else handle
    return str(line.get_color())


def _warnings(lines: Sequence[Line]) -> list[str]:
    """Return which settings protect nobody, for the caption."""
    found: dict[str, list[str]] = {}
    for line in lines:
        if why := reason(line):
            found.setdefault(why, []).append(line.group.label)
    whole = len(lines)
    words = []
    for why, labels in found.items():
        who = "all runs" if len(labels) == whole else ", ".join(dict.fromkeys(labels))
        words.append(f"{in_full(why)} ({who}).")
    return words


def _metadata(form: str, measure: Measure, place: str, notes: Sequence[str]) -> dict[str, Any]:
    """Return what the file says of itself, without a date: the same results make the same bytes."""
    title, about = f"{measure.words} over {symbol(place)}", " ".join(notes)
    if form == "pdf":
        return {"Title": title, "Subject": about, "CreationDate": None}
    if form == "svg":
        return {"Title": title, "Description": about, "Date": None}
    return {"Title": title, "Description": about}
