"""`fedblur report RUN...` writes one HTML file about runs; `fedblur watch RUN` serves the same page live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedblur.cli.options import Json, Plugin
from fedblur.cli.output import print_json
from fedblur.core.files import make_folder, write_atomically
from fedblur.report.dashboard import make_report, render
from fedblur.report.records import find_records, not_begun
from fedblur.report.serving import PORT, Live, serve


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or the folder of a table.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file (default: report.html in RUN).")] = None,
    public: Annotated[bool, typer.Option("--public", help="Leave out figures that no noise protects.")] = False,
    plugin: Plugin = None,
    json_: Json = False,
) -> None:
    """Write one HTML file about runs: accuracy, norms, signal and noise, fairness, privacy statement, comparison.

    The page needs no network. It marks figures that no noise protects as local only; --public leaves them out.

    Example: `fedblur report runs/quickstart`
    """
    made = make_report(find_records(runs), public, not_begun(runs).values())
    path = out or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    make_folder(path.parent)
    write_atomically(path, render(made).encode(), private=not public)  # it shows what no noise protects
    if json_:
        print_json({"report": str(path), **made.facts()})
    else:
        Console(soft_wrap=True).print(f"Report: {path}", markup=False, highlight=False)


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder or a table's; it need not exist yet.")],
    port: Annotated[int, typer.Option(help="Port, on this machine only; 0 takes a free one.", min=0, max=65535)] = PORT,
    plugin: Plugin = None,
) -> None:
    """Serve the report of a run on this machine, and update it while the run continues. Ctrl-C ends it.

    The address has a random token: without it, other users of this machine do not see the page.

    Example: `fedblur watch runs/quickstart`
    """
    console = Console(soft_wrap=True)
    try:
        with serve(Live(run), port) as server:
            console.print(f"Watching {run} at {server.url} (Ctrl-C ends it)", highlight=False, markup=False)
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        console.print("stopped watching; the run itself continues", highlight=False)
