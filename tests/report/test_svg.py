"""Drawings: round ticks, marks inside the frame, also for the odd values."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedblur.report.figure import thin
from fedblur.report.svg import (
    HEIGHT,
    WIDTH,
    Axis,
    Series,
    axis_of,
    bar_chart,
    interval_chart,
    line_chart,
    log_ticks,
    ticks,
)

FINITE = st.floats(1e-6, 1e6)


@given(st.lists(FINITE, min_size=1, max_size=30), st.booleans())
def test_line_chart__every_mark_lies_inside(ys: list[float], log: bool) -> None:
    xs = [float(index) for index in range(len(ys))]
    series = [Series("a", xs, ys, 0, [(ys, [y * 2 for y in ys])])]
    drawn = line_chart("k", series, axis_of("x", xs), axis_of("y", [*ys, 2 * max(ys)], log=log), ["tip"] * len(xs))
    root = ET.fromstring(drawn)
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
    drawn = bar_chart("k", [0.5, None, 1.0], ["0", "1", "2"], "class", Axis("", 0, 1), [0.7], ["a", "b", "c"])
    assert drawn.count('class="bar') == 2
    assert drawn.count('class="hit"') == 3


def test_charts__words_are_escaped() -> None:
    drawn = interval_chart("k", [(0, 1, 2, 3)], ["<b>&"], axis_of("<x>", [1, 3]))
    assert "<b>" not in drawn
    ET.fromstring(drawn)


def test_thin__keeps_first_and_last() -> None:
    points = list(range(1000))
    assert thin(points, 40)[0] == 0
    assert thin(points, 40)[-1] == 999
    assert len(thin(points, 40)) == 40
    assert thin(points, 2000) == points
