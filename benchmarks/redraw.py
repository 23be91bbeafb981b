"""Draw cpu.svg and scaling.svg anew from the stored results, without measuring: `python benchmarks/redraw.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import scaling
from harness.report import plot, read_report


def redraw(results: Path, out: Path) -> None:
    """Both pictures of a folder of results."""
    plot(read_report(results / "cpu.json"), out / "cpu.svg")
    scaling.plot(json.loads((results / "scaling.json").read_text(encoding="utf-8")), out / "scaling.svg")


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "results"
    redraw(folder, folder)
