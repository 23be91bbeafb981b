"""Charts as SVG that needs no script: colours come from the page's style sheet, values under the pointer from titles.

In: series of points. Out: the text of one `<svg>`. Classes say what a mark is (`s0`, `band`, `rule`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 285
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 30, 42  # around the plot: the vertical axis has its title above it
BESIDE = 6  # between the bars of two lines at one place
ROW = 52  # height of an interval chart's row
Format = Callable[[float], str]


def short(value: float) -> str:
    """Return a round number: all digits of the step between ticks, or none after the point from a thousand on."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.6g}"


def hundredths(value: float) -> str:
    """Return a share as a percentage without its sign, which stands in the axis title."""
    return f"{100 * value:.6g}"


@dataclass(frozen=True)
class Series:
    """A line, with bands around it where there are any."""

    xs: Sequence[float]
    ys: Sequence[float]
    style: int = 0
    bands: Sequence[tuple[Sequence[float], Sequence[float]]] = ()  # (low, high), widest first
    errors: Sequence[tuple[float, float]] | None = None  # each point is a dot, with a bar from low to high


@dataclass(frozen=True)
class Axis:
    """A direction of a chart: its title with the unit, its range, and how its values are written."""

    title: str
    low: float
    high: float
    log: bool = False
    write: Format = short
    marks: Sequence[float] = ()  # instead of round numbers

    def at(self, value: float) -> float:
        """Return a value's place, between 0 and 1."""
        if self.log:
            value, low, high = math.log(max(value, self.low)), math.log(self.low), math.log(self.high)
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5

    def x(self, value: float) -> float:
        return round(LEFT + self.at(value) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - self.at(value) * (HEIGHT - TOP - BOTTOM), 1)

    def ticks(self) -> list[float]:
        if self.marks:
            return [*self.marks]
        return log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high)


def axis_of(
    title: str, values: Sequence[float], *, log: bool = False, zero: bool = False, write: Format = short
) -> Axis:
    """Return an axis around these values that ends in round numbers."""
    low, high = min(values), max(values)
    if log:
        return Axis(title, 10 ** (math.log10(low) - 0.05), 10 ** (math.log10(high) + 0.05), True, write)
    steps = ticks(min(0.0, low) if zero else low, high, inside=False)
    return Axis(title, steps[0], steps[-1], False, write)


def ticks(low: float, high: float, wanted: int = 5, inside: bool = True) -> list[float]:
    """Return round numbers from low to high; `inside=False` reaches over both ends."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    rough = (high - low) / wanted
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    slack = 1e-9
    first = math.ceil(low / step - slack) if inside else math.floor(low / step + slack)
    last = math.floor(high / step + slack) if inside else math.ceil(high / step - slack)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 5 of each decade while they are few; else the decades, or every few of them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    every = max(1, (last - first) // 6)
    found = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    return [value for value in found if low <= value <= high]


def line_chart(name: str, series: Sequence[Series], x: Axis, y: Axis, tips: Sequence[tuple[float, str]],
               rules: Sequence[tuple[int, float]] = ()) -> str:  # fmt: skip
    """Draw lines over an axis; each tip is (x, what to show under the pointer there), each rule (style, level)."""
    parts = [_title(y.title, above=True), _title(x.title), _levels(y)]
    parts += [_tick(x.x(tick), x.write(tick)) for tick in x.ticks()]
    parts += [_across(f"range s{style}", y.y(level)) for style, level in rules]
    dotted = [each for each in series if each.errors is not None]
    for each in series:
        for low, high in each.bands:
            edge = [*zip(each.xs, high, strict=True), *reversed([*zip(each.xs, low, strict=True)])]
            parts.append(f'<path class="band s{each.style}" d="M{_path(edge, x, y)}Z"/>')
    for each in series:
        points = [*zip(each.xs, each.ys, strict=True)]
        aside = 0.0
        if each.errors is not None:
            aside = BESIDE * (dotted.index(each) - (len(dotted) - 1) / 2)
            for (at, value), (bottom, top) in zip(points, each.errors, strict=True):
                parts.append(_error(x.x(at) + aside, y.y(top), y.y(bottom), each.style))
                parts.append(_dot(x.x(at) + aside, y.y(value), 4, each.style))
        if len(points) == 1:
            parts.append(_dot(x.x(points[0][0]), y.y(points[0][1]), 3, each.style))
        else:
            parts.append(f'<path class="line s{each.style}" d="M{_path(points, x, y, aside)}"/>')
    return _svg(name, [*parts, _strips([x.x(value) for value, _ in tips], [words for _, words in tips])])


def bar_chart(name: str, heights: Sequence[float | None], names: Sequence[str], x_title: str, y: Axis,
              tips: Sequence[str], rules: Sequence[float] = ()) -> str:  # fmt: skip
    """Draw a bar for each name; None leaves a gap. One name more than bars: the edges between them are named."""
    wide = (WIDTH - LEFT - RIGHT) / max(1, len(heights))
    centres = [LEFT + wide * (index + 0.5) for index in range(len(heights))]
    first = centres[0] if len(names) == len(heights) else LEFT
    every = max(1, -(-sum(len(word) + 1 for word in names) // 36))  # so that names do not touch
    parts = [_title(y.title, above=True), _title(x_title), _levels(y)]
    parts += [_tick(first + wide * index, word) for index, word in [*enumerate(names)][::every]]
    for centre, height in zip(centres, heights, strict=True):
        if height is not None:
            top = y.y(height)
            size = f'width="{max(1.0, wide * 0.78):.1f}" height="{max(0.5, HEIGHT - BOTTOM - top):.1f}"'
            parts.append(f'<rect class="bar s0" x="{centre - wide * 0.39:.1f}" y="{top}" {size}/>')
    parts += [_across("rule", y.y(level)) for level in rules]
    return _svg(name, [*parts, _strips(centres, tips)])


def interval_chart(name: str, rows: Sequence[tuple[int, float, float, float]], names: Sequence[str],
                   x: Axis, y_title: str, tips: Sequence[str]) -> str:  # fmt: skip
    """Draw a dot with a range for each row, (style, low, middle, high), its name above it."""
    height = TOP + ROW * len(rows) + BOTTOM
    bottom = height - BOTTOM
    parts = [_title(y_title, above=True), _title(x.title, height=height)]
    for tick in x.ticks():
        at = x.x(tick)
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(_tick(at, x.write(tick), height))
    for index, ((style, low, middle, high), word, tip) in enumerate(zip(rows, names, tips, strict=True)):
        top = TOP + ROW * index
        y = top + 32
        parts.append(f'<text class="row" x="{LEFT}" y="{top + 16}">{escape(word)}</text>')
        parts.append(f'<line class="range s{style}" x1="{x.x(low)}" x2="{x.x(high)}" y1="{y}" y2="{y}"/>')
        parts.append(_dot(x.x(middle), y, 5, style))
        parts.append(_hit(LEFT, top, WIDTH - LEFT - RIGHT, ROW, tip))
    return _svg(name, parts, height)


def _svg(name: str, parts: Sequence[str], height: int = HEIGHT) -> str:
    labels = f'role="img" aria-labelledby="{name}-title {name}-words"'
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" {labels}>{"".join(parts)}</svg>'


def _title(title: str, above: bool = False, height: int = HEIGHT) -> str:
    """Write an axis title: the vertical one above the plot, where it can be read without turning the head."""
    if above:
        return f'<text class="axis above" x="4" y="14">{escape(title)}</text>'
    return f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 6}">{escape(title)}</text>'


def _levels(y: Axis) -> str:
    return "".join(
        _across("grid", y.y(tick))
        + f'<text class="tick end" x="{LEFT - 8}" y="{y.y(tick) + 4:.1f}">{escape(y.write(tick))}</text>'
        for tick in y.ticks()
    )


def _across(kind: str, at: float) -> str:
    return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'


def _tick(at: float, word: str, height: int = HEIGHT) -> str:
    return f'<text class="tick" x="{at:.1f}" y="{height - BOTTOM + 17}">{escape(word)}</text>'


def _path(points: Sequence[tuple[float, float]], x: Axis, y: Axis, aside: float = 0.0) -> str:
    return "L".join(f"{x.x(a) + aside} {y.y(b)}" for a, b in points)


def _dot(x: float, y: float, radius: int, style: int) -> str:
    return f'<circle class="dot s{style}" cx="{x}" cy="{y}" r="{radius}"/>'


def _error(x: float, top: float, bottom: float, style: int) -> str:
    return f'<line class="range s{style}" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'


def _strips(at: Sequence[float], tips: Sequence[str]) -> str:
    """Cover the plot with upright strips: pointing near a value is enough."""
    edges = [LEFT, *((a + b) / 2 for a, b in itertools.pairwise(at)), WIDTH - RIGHT]
    return "".join(
        _hit(low, TOP, high - low, HEIGHT - TOP - BOTTOM, tip)
        for tip, (low, high) in zip(tips, itertools.pairwise(edges), strict=True)
    )


def _hit(x: float, y: float, width: float, height: float, tip: str) -> str:
    place = f'x="{x:.1f}" y="{y}" width="{max(0.1, width):.1f}" height="{height}"'
    return f'<rect class="hit" {place}><title>{escape(tip)}</title></rect>'
