"""What a chart's SVG shows, read without a browser: axis titles, words under the pointer, and boxes of labels."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET

FONT, LETTER = 13.5, 0.6  # pixels, and the width of a letter in them: more than most
PADDING = 10  # of a card: a drawing may reach into it
Box = tuple[float, float, float, float]  # left, top, right, bottom


def charts(page: str) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r'<svg class="chart".*?</svg>', page, re.DOTALL)]


def axis_titles(chart: ET.Element) -> list[str]:
    return [text.text or "" for text in chart.iter("text") if "axis" in text.attrib["class"]]


def tips(chart: ET.Element) -> list[str]:
    return [title.text or "" for rect in chart.iter("rect") if rect.get("class") == "hit" for title in rect]


def points(chart: ET.Element) -> int:
    """How many values are drawn: bars, dots, or the places of the longest line."""
    lines = [path.attrib["d"].count("L") + 1 for path in chart.iter("path") if "line" in path.attrib["class"]]
    marks = [mark for mark in chart.iter() if mark.get("class", "").startswith(("bar ", "dot "))]
    return max([len(marks), *lines])


def collisions(chart: ET.Element) -> list[str]:
    """Labels that touch one another, a bar, a dot or a range, or that leave the drawing."""
    _, _, width, height = map(float, chart.attrib["viewBox"].split())
    labels = [(text.text or "", _label(text)) for text in chart.iter("text")]
    marks = [(mark.attrib["class"], box) for mark in chart.iter() if (box := _mark(mark)) is not None]
    touching = [f"{a} / {b}" for (a, p), (b, q) in itertools.combinations(labels, 2) if _overlap(p, q)]
    touching += [f"{a} / {b}" for a, p in labels for b, q in marks if _overlap(p, q)]
    inside = [(a, p[0] >= -PADDING and p[2] <= width + PADDING and p[1] >= 0 and p[3] <= height) for a, p in labels]
    return touching + [f"{a} leaves" for a, held in inside if not held]


def _label(text: ET.Element) -> Box:
    x, y, wide = float(text.attrib["x"]), float(text.attrib["y"]), FONT * LETTER * len(text.text or "")
    kind = text.attrib["class"].split()
    left = x - wide if "end" in kind else x if {"row", "above"} & {*kind} else x - wide / 2
    return (left, y - 0.75 * FONT, left + wide, y + 0.25 * FONT)


def _mark(mark: ET.Element) -> Box | None:
    kind, number = mark.get("class", "").split(" ")[0], {k: float(v) for k, v in mark.attrib.items() if k in _NUMBERS}
    if kind == "bar":
        return (number["x"], number["y"], number["x"] + number["width"], number["y"] + number["height"])
    if kind == "dot":
        x, y, r = number["cx"], number["cy"], number["r"]
        return (x - r, y - r, x + r, y + r)
    if kind == "range":
        return (number["x1"], number["y1"] - 1.5, number["x2"], number["y2"] + 1.5)
    return None


_NUMBERS = {"x", "y", "width", "height", "cx", "cy", "r", "x1", "x2", "y1", "y2"}


def _overlap(p: Box, q: Box) -> bool:
    return p[0] < q[2] and q[0] < p[2] and p[1] < q[3] and q[1] < p[3]
