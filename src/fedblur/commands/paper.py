"""`fedblur paper FOLDER`: a paper's page and plots from its results; `--check` says whether they are up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedblur.commands.run import Json
from fedblur.commands.terminal import print_json
from fedblur.errors import RunError
from fedblur.paper.render import render_page


def paper(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="With tables, results and page/.")],
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a file is not up to date.")] = False,
    results: Annotated[Path | None, typer.Option(help="Results to use (default: as the tables say).")] = None,
    json_: Json = False,
) -> None:
    """Render a paper's page: tables with the paper's figures beside ours, plots, verdicts, cost, what is missing."""
    page, console = render_page(folder, results), Console(stderr=True, soft_wrap=True)
    for line in page.stale:
        console.print(f"{line}; not used", markup=False, highlight=False)
    if check:
        old = page.outdated()
        if old:
            raise RunError(f"{', '.join(old)} does not show the results as they are; run fedblur paper {folder}")
    else:
        page.write()
    if json_:
        drawn = [str(drawing.path) for drawing in page.figures if drawing.series]
        print_json({"page": str(page.path), "figures": drawn, "stale": page.stale, "written": not check})
    if check or json_:
        return
    console.print(f"{page.path} and {sum(bool(d.series) for d in page.figures)} figures", highlight=False)
