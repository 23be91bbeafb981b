"""Drawings: round ticks, marks inside the frame, also for the odd values."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedblur.report.charts import LONGEST, thin
from fedblur.report.svg import (
    HEIGHT,
    WIDTH,
    Axis,
    Series,
    axis_of,
    bar_chart,
    hundredths,
    interval_chart,
    line_chart,
    log_ticks,
    ticks,
)
from tests.report.drawing import axis_titles, collisions, points, tips

FINITE = st.floats(1e-6, 1e6)


@given(st.lists(FINITE, min_size=1, max_size=30), st.booleans())
def test_line_chart__every_mark_lies_inside(ys: list[float], log: bool) -> None:
    xs = [float(index) for index in range(len(ys))]
    series = [Series(xs, ys, 0, [(ys, [y * 2 for y in ys])])]
    y = axis_of("norm (ℓ2)", [*ys, 2 * max(ys)], log=log)
    root = ET.fromstring(line_chart("k", series, axis_of("round", xs), y, [(x, f"round {x:g}") for x in xs]))
    assert axis_titles(root) == ["norm (ℓ2)", "round"]
    assert tips(root) == [f"round {x:g}" for x in xs]
    assert not collisions(root)
    for path in root.iter("path"):
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", path.attrib["d"])]
        assert all(0 <= x <= WIDTH for x in numbers[::2])
        assert all(0 <= y <= HEIGHT for y in numbers[1::2])
    assert len(list(root.iter("rect"))) == len(xs)


@given(FINITE, FINITE)
def test_ticks__are_few_round_and_reach_over_both_ends(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    found = ticks(low, high, inside=False)
    assert 2 <= len(found) <= 8
    assert found[0] <= low * (1 + 1e-6)
    assert found[-1] >= high * (1 - 1e-6)


def test_log_ticks__name_decades_when_there_are_many() -> None:
    assert log_ticks(0.009, 2) == pytest.approx([0.01, 0.1, 1])
    assert log_ticks(0.02, 0.3) == pytest.approx([0.02, 0.05, 0.1, 0.2])
    assert len(log_ticks(1e-9, 1e9)) <= 8


def test_axis__a_single_value_has_a_place() -> None:
    assert Axis("", 1.0, 1.0).at(1.0) == 0.5
    assert 0 < axis_of("", [3.0]).at(3.0) < 1


def test_bar_chart__a_class_without_samples_is_a_gap() -> None:
    y = Axis("accuracy (%)", 0, 1, write=hundredths)
    drawn = ET.fromstring(bar_chart("k", [0.5, None, 1.0], ["0", "1", "2"], "class", y, ["a", "b", "c"], [0.7]))
    assert points(drawn) == 2
    assert tips(drawn) == ["a", "b", "c"]
    assert axis_titles(drawn) == ["accuracy (%)", "class"]


@given(st.integers(1, 120), st.booleans())
def test_bar_chart__names_touch_neither_bars_nor_one_another(count: int, edges: bool) -> None:
    shares = [index / count for index in range(count)]
    names = [str(index) for index in range(len(shares) + (1 if edges else 0))]
    drawn = bar_chart("k", shares, names, "class", Axis("%", 0, 1, write=hundredths), ["tip"] * len(shares))
    assert not collisions(ET.fromstring(drawn))


@given(st.lists(st.tuples(st.floats(1, 90), st.just(0.0) | st.floats(0.001, 5)), min_size=1, max_size=8))
def test_interval_chart__names_lie_above_their_ranges(ends: list[tuple[float, float]]) -> None:
    rows = [(index, mean - spread, mean, mean + spread) for index, (mean, spread) in enumerate(ends)]
    x = axis_of("accuracy (%)", [edge for row in rows for edge in row[1:]])
    names = [f"{index}".ljust(LONGEST, "n") for index in range(len(rows))]
    drawn = ET.fromstring(interval_chart("k", rows, names, x, "setting", names))
    assert not collisions(drawn)
    assert axis_titles(drawn) == ["setting", "accuracy (%)"]
    assert tips(drawn) == names


def test_collisions__are_found() -> None:
    """The check itself: a name on a bar, a name on a name, a name outside."""
    text = '<text class="{}" x="{}" y="50">0.5</text>'
    touching = {
        text.format("row", 20) + '<rect class="bar s0" x="30" y="40" width="9" height="30"/>': 1,
        text.format("row", 20) + text.format("tick", 30): 1,
        text.format("tick", 1): 1,
        text.format("row", 20) + text.format("row", 60): 0,
    }
    for marks, found in touching.items():
        assert len(collisions(ET.fromstring(f'<svg viewBox="0 0 200 100">{marks}</svg>'))) == found


def test_charts__words_are_escaped() -> None:
    drawn = interval_chart("k", [(0, 1, 2, 3)], ["<b>&"], axis_of("<x>", [1, 3]), "<y>", ["<i>"])
    assert "<b>" not in drawn
    assert "<i>" not in drawn
    ET.fromstring(drawn)


def test_axis__ticks_of_a_narrow_range_are_told_apart() -> None:
    axis = axis_of("accuracy (%)", [85.61, 85.68])
    written = [axis.write(tick) for tick in axis.ticks()]
    assert written == ["85.6", "85.62", "85.64", "85.66", "85.68"]


def test_thin__keeps_first_and_last() -> None:
    points = list(range(1000))
    assert thin(points, 40)[0] == 0
    assert thin(points, 40)[-1] == 999
    assert len(thin(points, 40)) == 40
    assert thin(points, 2000) == points
