"""`python -m papers.rendering FOLDER ...`: each paper's page and plots from its results; `--check` writes nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedblur.core.errors import FedBlurError, RunError
from papers.rendering.render import Page, render_page


def main(words: Sequence[str] | None = None) -> int:
    """Render the pages and return the exit status: 2 for bad input, or for a page that --check finds out of date."""
    parser = argparse.ArgumentParser("python -m papers.rendering", description="Render papers' pages from results.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="holds tables, results and page/")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    parser.add_argument("--results", type=Path, help="results to use (default: those that the tables name)")
    options = parser.parse_args(words)
    try:
        for folder in options.folders:
            _show(render_page(folder, options.results), folder, options.check)
    except FedBlurError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


def _show(page: Page, folder: Path, check: bool) -> None:
    for line in page.stale:
        print(f"{line}; not used", file=sys.stderr)
    if not check:
        page.write()
        print(f"{page.path} and {sum(bool(drawing.series) for drawing in page.figures)} figures")
    elif old := page.outdated():
        raise RunError(f"{', '.join(old)} is out of date; run python -m papers.rendering {folder}")


if __name__ == "__main__":
    sys.exit(main())
