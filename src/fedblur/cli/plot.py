"""`fedblur plot PATH...`: a figure for a paper, from runs or a table's results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedblur.cli.options import Json, Plugin
from fedblur.cli.output import print_json
from fedblur.core.errors import ConfigError
from fedblur.report.records import find_records
from fedblur.report.result_plot import plot_results


def plot(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="The folder of a table, result files, or run folders.")
    ],
    out: Annotated[Path, typer.Option(help="The figure: .pdf, .svg or .png.")] = Path("figure.pdf"),
    metric: Annotated[str | None, typer.Option(metavar="NAME", help="What is drawn (default: the headline).")] = None,
    over: Annotated[
        str | None,
        typer.Option(metavar="AXIS", help="An axis, round or epsilon_spent (default: ε, if it is an axis)."),
    ] = None,
    columns: Annotated[int, typer.Option(help="Columns of the page that the figure is as wide as: 1 or 2.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option(metavar="LABEL", help="Draw only runs of this label; repeatable.")
    ] = None,
    plugin: Plugin = None,
    json_: Json = False,
) -> None:
    """Draw a figure for a paper: a metric over ε or any axis, one line for each label.

    Error bars are standard errors over seeds. Lines differ in colour, dash and marker, so that they can be told apart
    by colour-blind readers and in grey. The command prints what the caption must say: which runs are not private, too.

    Example: `fedblur plot runs/quickstart --out accuracy.pdf`
    """
    records = find_records(paths)
    labels = list(dict.fromkeys(record.label for record in records))
    unknown = next((label for label in only or () if label not in labels), None)
    if unknown is not None:
        raise ConfigError(f"--only {unknown!r} is no label here; there are {', '.join(map(repr, labels))}")
    kept = [record for record in records if not only or record.label in only]
    notes = plot_results(kept, out, metric, over, columns)
    if json_:
        return print_json({"figure": str(out), "caption": notes})
    console = Console(soft_wrap=True)
    console.print(f"Figure: {out}", markup=False, highlight=False)
    return console.print(f"Caption: {' '.join(notes)}", markup=False, highlight=False)
