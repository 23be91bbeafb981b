"""Charts as SVG, drawn here and not in the browser: they need no script, and take their colours from the page's style.

In: series of points. Out: the text of one `<svg>`. Classes say what a mark is (`s0`, `band`, `rule`); the style sheet
says how it looks in the light and in the dark.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 42
Format = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """A line, with bands below and above it where there are any."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: int = 0
    bands: Sequence[tuple[Sequence[float], Sequence[float]]] = ()  # (low, high), widest first


@dataclass(frozen=True)
class Axis:
    """One direction of a chart: which values, where they lie, and how they are written."""

    label: str
    low: float
    high: float
    log: bool = False
    write: Format = field(default=lambda value: f"{value:g}")

    def at(self, value: float) -> float:
        """Between 0 and 1."""
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
        return log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high)


def percent(value: float) -> str:
    return f"{100 * value:.4g} %"


def axis_of(
    label: str, values: Sequence[float], *, log: bool = False, zero: bool = False, write: Format | None = None
) -> Axis:
    """An axis around these values, to round numbers."""
    low, high = min(values), max(values)
    if log:
        return Axis(label, 10 ** (math.log10(low) - 0.05), 10 ** (math.log10(high) + 0.05), True, write or _short)
    low = min(0.0, low) if zero else low
    steps = ticks(low, high, inside=False)
    return Axis(label, steps[0], steps[-1], False, write or _short)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def ticks(low: float, high: float, wanted: int = 5, inside: bool = True) -> list[float]:
    """Round numbers from low to high; `inside=False` reaches over both ends."""
    if high <= low:
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    rough = (high - low) / wanted
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    slack = 1e-9
    first = math.ceil(low / step - slack) if inside else math.floor(low / step + slack)
    last = math.floor(high / step + slack) if inside else math.ceil(high / step - slack)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 in each decade while they are few; else the decades, or every few of them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    every = max(1, (last - first) // 6)
    found = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    return [value for value in found if low <= value <= high]


def line_chart(name: str, series: Sequence[Series], x: Axis, y: Axis, tips: Sequence[str] = ()) -> str:
    """Lines over an axis; `tips` are the words for each x of the first series."""
    parts = [_grid(x, y)]
    for each in series:
        parts += [_band(each.xs, low, high, each.style, x, y) for low, high in each.bands]
    parts += [_line(each, x, y) for each in series]
    if series and tips:
        parts.append(_hits([x.x(value) for value in series[0].xs], tips))
    return _svg(name, parts)


def bar_chart(name: str, heights: Sequence[float | None], names: Sequence[str], x_label: str, y: Axis,
              rules: Sequence[float] = (), tips: Sequence[str] = ()) -> str:  # fmt: skip
    """A column for each name; None leaves a gap."""
    wide = (WIDTH - LEFT - RIGHT) / max(1, len(names))
    centres = [LEFT + wide * (index + 0.5) for index in range(len(names))]
    every = max(1, -(-sum(len(word) + 1 for word in names) // 48))  # so that names do not touch
    parts = [_levels(y), *(_word(centre, name) for centre, name in [*zip(centres, names)][::every])]
    parts.append(f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{escape(x_label)}</text>')
    for centre, height in zip(centres, heights, strict=True):
        if height is not None:
            top = y.y(height)
            size = f'width="{max(1.0, wide * 0.78):.1f}" height="{max(0.5, HEIGHT - BOTTOM - top):.1f}"'
            parts.append(f'<rect class="bar s0" x="{centre - wide * 0.39:.1f}" y="{top}" {size}/>')
    parts += [_rule(rule, y) for rule in rules]
    parts.append(_hits(centres, tips))
    return _svg(name, parts)


def interval_chart(name: str, rows: Sequence[tuple[int, float, float, float]], y_names: Sequence[str], x: Axis) -> str:
    """A dot with a range on each line, from above: (style, low, middle, high)."""
    step = (HEIGHT - TOP - BOTTOM) / max(1, len(rows))
    parts = [_uprights(x)]
    for index, ((style, low, middle, high), word) in enumerate(zip(rows, y_names, strict=True)):
        y = round(TOP + step * (index + 0.6), 1)
        span = f'x1="{x.x(low)}" x2="{x.x(high)}" y1="{y}" y2="{y}"'
        parts.append(f'<line class="range s{style}" {span}/><circle class="dot s{style}" cx="{x.x(middle)}" cy="{y}"')
        parts[-1] += f' r="5"/><text class="row" x="{LEFT}" y="{y - 9:.1f}">{escape(word)}</text>'
    return _svg(name, parts)


def _svg(name: str, parts: Sequence[str]) -> str:
    labels = f'role="img" aria-labelledby="{name}-title {name}-words"'
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" {labels}>{"".join(parts)}</svg>'


def _grid(x: Axis, y: Axis) -> str:
    words = "".join(_word(x.x(tick), x.write(tick)) for tick in x.ticks())
    label = f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{escape(x.label)}</text>'
    return _levels(y) + words + label


def _levels(y: Axis) -> str:
    lines = []
    for tick in y.ticks():
        at = y.y(tick)
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        lines.append(f'<text class="tick end" x="{LEFT - 6}" y="{at + 4:.1f}">{escape(y.write(tick))}</text>')
    return "".join(lines)


def _uprights(x: Axis) -> str:
    lines = [
        f'<line class="grid" x1="{x.x(tick)}" x2="{x.x(tick)}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        + _word(x.x(tick), x.write(tick))
        for tick in x.ticks()
    ]
    label = f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{escape(x.label)}</text>'
    return "".join(lines) + label


def _word(at: float, word: str) -> str:
    return f'<text class="tick" x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}">{escape(word)}</text>'


def _line(series: Series, x: Axis, y: Axis) -> str:
    points = [f"{x.x(a)} {y.y(b)}" for a, b in zip(series.xs, series.ys, strict=True)]
    if len(points) == 1:
        a, b = points[0].split()
        return f'<circle class="dot s{series.style}" cx="{a}" cy="{b}" r="3"/>'
    return f'<path class="line s{series.style}" d="M{"L".join(points)}"/>'


def _band(xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], style: int, x: Axis, y: Axis) -> str:
    up = [f"{x.x(a)} {y.y(b)}" for a, b in zip(xs, highs, strict=True)]
    down = [f"{x.x(a)} {y.y(b)}" for a, b in zip(xs, lows, strict=True)]
    return f'<path class="band s{style}" d="M{"L".join([*up, *reversed(down)])}Z"/>'


def _rule(level: float, y: Axis) -> str:
    """A level that all is compared with."""
    at = y.y(level)
    return f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'


def _hits(at: Sequence[float], tips: Sequence[str]) -> str:
    """Upright strips that carry the words for what lies under the pointer."""
    edges = [LEFT, *((a + b) / 2 for a, b in itertools.pairwise(at)), WIDTH - RIGHT]
    return "".join(
        f'<rect class="hit" data-tip="{escape(tip)}" data-x="{place:.1f}" x="{low:.1f}" y="{TOP}" '
        f'width="{max(0.1, high - low):.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
        for place, tip, (low, high) in zip(at, tips, itertools.pairwise(edges), strict=True)
    )
