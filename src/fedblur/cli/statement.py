"""`fedblur statement RUN`: one page on what a run's privacy claim is and rests on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedblur.cli.options import Json, Plugin
from fedblur.cli.output import print_json
from fedblur.report.statement import write_statement


def statement(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    also: Annotated[
        list[Path] | None, typer.Option(help="Another run on the same clients (tuning, an earlier try); repeatable.")
    ] = None,
    tuning: Annotated[str, typer.Option(help="How settings were chosen, in a sentence.")] = "",
    plugin: Plugin = None,
    json_: Json = False,
) -> None:
    """Write statement.md, statement.html and statement.json into the run folder, and print the claim in one line.

    Example: `fedblur statement runs/first --also runs/earlier`
    """
    made, _ = write_statement(run, also or (), tuning)
    if json_:
        print_json(made.facts())
    else:
        typer.echo(made.shown())
