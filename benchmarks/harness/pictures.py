"""Plots as SVG that is the same text whenever the figures are the same."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure


def save_svg(figure: Figure, path: Path) -> None:
    """Without a date, and with ids that follow from the content."""
    with matplotlib.rc_context({"svg.hashsalt": "fedblur"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
