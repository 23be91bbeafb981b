"""A page's plots, drawn from results. Out: SVG files that carry a fingerprint of their data, so that age can be told.

kind = "axis"     accuracy along an axis, one line for each method
kind = "curves"   the same, and accuracy by round beside it
kind = "norms"    norms before clipping by round: median, quartiles, 5 to 95 %, and S
kind = "signal"   accuracy against R over all runs on test data
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedblur.core.config import canonical
from fedblur.core.errors import ConfigError, nearest
from papers.rendering.document import Document
from papers.rendering.words import number, symbol

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1b6ca8", "#c8553d", "#4f8a3c", "#8a5aa8", "#b8860b", "#3a8f8f", "#666666", "#b04a7a", "#202020")
MARKERS = ("o", "^", "s", "D", "v", "P", "X")
_MARK = re.compile(r"fedblur-data:([0-9a-f]{16})")
Plot = Mapping[str, Any]  # one of [[figures]] in paper.toml
Series = dict[str, list[Any]]


@dataclass(frozen=True)
class Drawing:
    """The content of a figure; empty without results."""

    plot: Plot
    series: Series
    path: Path

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(canonical([dict(self.plot), self.series]).encode()).hexdigest()[:16]

    @property
    def current(self) -> bool:
        """Return whether the file on disk shows these data; without data there must be none."""
        if not self.series or not self.path.exists():
            return bool(self.series) == self.path.exists()
        mark = _MARK.search(self.path.read_text(encoding="utf-8"))
        return mark is not None and mark[1] == self.fingerprint

    def write(self) -> None:
        """Draw it, or remove an old one."""
        if self.current:
            return
        if not self.series:
            self.path.unlink()
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _save(self)


def drawings(document: Document) -> dict[str, Drawing]:
    """Return all figures of a page by name."""
    return {
        plot["name"]: Drawing(plot, _kind(plot)[0](document, plot), document.folder / "figures" / f"{plot['name']}.svg")
        for plot in document.figures
    }


def _kind(plot: Plot) -> tuple[Callable[[Document, Plot], Series], Callable[[Figure, Plot, Series], None]]:
    kind = KINDS.get(plot["kind"])
    if kind is None:
        raise ConfigError(f"paper.toml: figure kind {plot['kind']!r} is unknown: {nearest(plot['kind'], KINDS)}")
    return kind


def _save(drawing: Drawing) -> None:
    import matplotlib  # slow to import, and a check of what is current needs none of it
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "fedblur", "font.size": 9, "axes.grid": True, "grid.alpha": 0.25}):
        figure = Figure(figsize=(9.5, 4.0), layout="constrained")
        _kind(drawing.plot)[1](figure, drawing.plot, drawing.series)
        about = {"Date": None, "Description": f"fedblur-data:{drawing.fingerprint}"}
        figure.savefig(drawing.path, format="svg", metadata=about)


# --- what is drawn ---


def _axis_series(document: Document, plot: Plot) -> Series:
    """Return, by method, [value, accuracy, curve, spread]: one seed or the mean; without the axis, at `start`."""
    found: Series = {}
    for row in document.groups(plot["table"]):
        if row.accuracy is not None:
            value = row.axes.get(plot["axis"], plot.get("start"))
            label = plot.get("joined", row.label)
            point = [value, round(row.accuracy, 3), row.results[0]["curve"], round(row.spread or 0.0, 3)]
            found.setdefault(label, []).append(point)
    return {label: sorted(points, key=lambda point: float(point[0])) for label, points in found.items()}


def _norm_series(document: Document, plot: Plot) -> Series:
    found: Series = {}
    for row in document.groups(plot["table"]):
        if row.results and row.results[0]["norms"]:
            entries = row.results[0]["norms"]
            found[row.label] = [[e["round"], *e["norm_quantiles"], e["clip_norm"]] for e in entries]
    return found


def _signal_series(document: Document, plot: Plot) -> Series:
    """Return [R, accuracy, whether the server is the paper's, methods] of noisy test runs, by data and model."""
    found: Series = {}
    for result in sorted(document.own_results(), key=lambda result: str(result["settings"])):
        ratio, config = result["privacy"].get("signal_to_noise"), result["config"]
        if ratio is None or not math.isfinite(float(ratio)) or result["evaluated_on"] != "test":
            continue
        printed = config["server"]["name"] == "sgd" and config["server"]["learning_rate"] == 1
        size = f"{result['parameters'] / 1e6:.3g}M"
        label = f"{config['dataset']['name']}, {config['model']['name']} ({size})"
        methods = " + ".join(method["name"].upper() for method in config["method"]) or "DP-FedAvg"
        if config["mechanism"]["name"] != "gaussian":
            methods += f", {config['mechanism']['name']} noise"
        point = [float(ratio), round(100 * float(result["accuracy"]), 3), printed, methods]
        found.setdefault(label, []).append(point)
    return dict(sorted(found.items()))


# --- how it is drawn ---


def _draw_axis(figure: Figure, plot: Plot, series: Series) -> None:
    axes = figure.subplots()
    _lines(axes, plot, series)


def _lines(axes: Axes, plot: Plot, series: Series) -> None:
    for index, (label, points) in enumerate(series.items()):
        places = [number(point[0]) for point in points] if plot.get("spaced") else [float(p[0]) for p in points]
        axes.errorbar(
            places, [point[1] for point in points], yerr=[point[3] for point in points], marker="o", capsize=2,
            color=COLOURS[index % len(COLOURS)], label=label,
        )  # fmt: skip
    axes.set(xlabel=symbol(plot["axis"]), ylabel="accuracy % (test, final round)", title=plot["title"])
    axes.legend()


def _draw_dots(figure: Figure, plot: Plot, series: Series) -> None:
    """Draw a line for each method, with a dot and its spread for each value of the axis: for many methods.

    Those of the first method go on as lines, to compare with.
    """
    figure.set_size_inches(9.5, 1.2 + 0.22 * len(series))
    axes = figure.subplots()
    values = list(dict.fromkeys(point[0] for points in series.values() for point in points))
    for index, value in enumerate(sorted(values, key=float)):
        dots = [
            (point[1], row, point[3]) for row, points in enumerate(series.values()) for point in points
            if point[0] == value
        ]  # fmt: skip
        places, rows, spreads = zip(*dots, strict=True)
        colour, name = COLOURS[index % len(COLOURS)], f"{symbol(plot['axis'])} = {number(value)}"
        axes.errorbar(places, rows, xerr=spreads, fmt="o", markersize=4, capsize=2, color=colour, label=name)
        if rows[0] == 0:
            axes.axvline(places[0], color=colour, linewidth=0.8, linestyle="--", zorder=0)
    axes.set_yticks(range(len(series)), list(series))
    axes.set(xlabel="accuracy % (test, final round)", title=plot["title"])
    axes.invert_yaxis()
    axes.legend(loc="lower left")


def _draw_curves(figure: Figure, plot: Plot, series: Series) -> None:
    left, right = figure.subplots(1, 2)
    _lines(left, plot, series)
    for index, point in enumerate(point for points in series.values() for point in points):
        rounds, values = zip(*point[2], strict=True)
        name = f"{symbol(plot['axis'])} = {number(point[0])}"
        right.plot(rounds, [100 * v for v in values], color=COLOURS[index % len(COLOURS)], label=name, linewidth=1)
    right.set(xlabel="round", ylabel="accuracy % (test)", title="by round")
    right.legend(fontsize=7)


def _draw_norms(figure: Figure, plot: Plot, series: Series) -> None:
    panels = figure.subplots(1, len(series), sharey=True, squeeze=False)[0]
    for axes, (label, rows) in zip(panels, series.items(), strict=True):
        rounds, q05, q25, median, q75, q95, clip = zip(*rows, strict=True)
        axes.fill_between(rounds, q05, q95, color=COLOURS[0], alpha=0.15, linewidth=0, label="5 to 95 %")
        axes.fill_between(rounds, q25, q75, color=COLOURS[0], alpha=0.35, linewidth=0, label="quartiles")
        axes.plot(rounds, median, color=COLOURS[0], label="median")
        axes.plot(rounds, clip, color="black", linestyle="--", linewidth=1, label="S")
        axes.set(xlabel="round", title=label, yscale="log")
    panels[0].set_ylabel("norm before clipping (local only)")
    panels[0].legend(fontsize=7)


def _draw_signal(figure: Figure, plot: Plot, series: Series) -> None:
    axes = figure.subplots()
    shapes: dict[str, str] = {}
    for index, (label, points) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        axes.scatter([], [], color=colour, label=label)
        for ratio, accuracy, printed, methods in points:
            shape = shapes.setdefault(methods, MARKERS[len(shapes) % len(MARKERS)])
            face = colour if printed else "none"
            axes.scatter([ratio], [accuracy], s=28, marker=shape, edgecolors=colour, facecolors=face)
    for methods, shape in shapes.items():
        axes.scatter([], [], marker=shape, color="black", label=methods)
    axes.axvline(1, color="grey", linestyle=":", linewidth=1)
    axes.set(xscale="log", xlabel="R = √T·pN/(σ√d)", ylabel="accuracy % (test, final round)", title=plot["title"])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


KINDS: dict[str, tuple[Callable[[Document, Plot], Series], Callable[[Figure, Plot, Series], None]]] = {
    "axis": (_axis_series, _draw_axis),
    "dots": (_axis_series, _draw_dots),
    "curves": (_axis_series, _draw_curves),
    "norms": (_norm_series, _draw_norms),
    "signal": (_signal_series, _draw_signal),
}
