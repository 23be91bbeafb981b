"""`fedblur results PATH [CELL]`: what a table's results hold. `--format` exports them, `--pack` makes one file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedblur.cli.options import Json, Plugin
from fedblur.cli.output import print_json
from fedblur.core.callbacks import figures_of
from fedblur.core.errors import ConfigError, RunError
from fedblur.experiments.result_store import Result, headline, pack, read_results
from fedblur.learning.metrics.measures import measure_of, ordered
from fedblur.report.records import find_records
from fedblur.report.result_table import make_table, written
from fedblur.report.table import print_whole
from fedblur.report.text import rounded_up, words_of_figure

_SHOWN = 3  # cells that an ambiguous word could mean


def results(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A .jsonl.gz or .json file of results, or a folder of them.")
    ],
    cell: Annotated[
        str | None, typer.Argument(metavar="CELL", help="A cell's name or key, or a part that only one cell has.")
    ] = None,
    pack_: Annotated[
        bool, typer.Option("--pack", help="Move the folder's JSON files into TABLE.jsonl.gz, one for each table.")
    ] = False,
    format_: Annotated[
        str | None, typer.Option("--format", metavar="FORM", help="Print means over seeds: csv, latex, markdown, json.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Add differences to this label, paired by seed.")
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A metric (default: the headline); repeatable.")
    ] = None,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="Of LaTeX, print a whole document, not a table to be included.")
    ] = False,
    plugin: Plugin = None,
    json_: Json = False,
) -> None:
    """List the cells of a table, show one, or export means over seeds (CSV, LaTeX, Markdown).

    With --format there is one row for each setting: mean and standard error over seeds, ε spent, and a mark where runs
    are not private. --baseline adds differences with their own standard error and a 95 % interval. Nothing that is
    local only is exported.

    PATH can be the folder of `fedblur table --out`, too. With --json a list has every cell's name, key and figures, and
    one cell has everything that was kept: accuracy by round and the whole configuration. `fedblur table` reads
    packed results as it reads the JSON files, and continues where they end.

    Example: `fedblur results runs/quickstart --format latex --baseline DP-FedAvg`
    """
    export = {"--baseline": baseline, "--metric": metric, "--standalone": standalone}
    if format_ is None and (unused := next((name for name, value in export.items() if value), None)):
        raise ConfigError(f"{unused} belongs to --format; add --format csv, latex, markdown or json")
    if format_ is not None:
        if cell is not None or pack_ or json_:
            raise ConfigError(
                "--format exports a whole table: leave CELL, --pack and --json out (there is --format json)"
            )
        return typer.echo(
            written(make_table(find_records([path]), metric or (), baseline), format_, standalone), nl=False
        )
    folder = path / "results" if (path / "results").is_dir() else path
    if not folder.exists():
        raise RunError(f"{path} does not exist; give a results file, or the folder of a table")
    if pack_:
        if cell is not None or not folder.is_dir():
            raise ConfigError("--pack takes a folder and no cell")
        packed = pack(folder)
        if json_:
            return print_json({"packed": {str(file): number for file, number in packed.items()}})
        for file, number in packed.items():
            typer.echo(f"{file}: {number} {'cell' if number == 1 else 'cells'}, {file.stat().st_size / 1000:.0f} kB")
        return None if packed else typer.echo(f"{folder}: nothing to pack")
    found = read_results(folder)
    if not found:
        raise RunError(f"{path} holds no results; give a results file, or the folder of a table")
    if cell is None:
        return _list(found, json_)
    result = _choose(found, cell)
    if json_:
        return print_json(result)
    for line in _lines(result):
        Console(soft_wrap=True).print(line, markup=False, highlight=False)
    return None


def _list(found: list[Result], json_: bool) -> None:
    lines = [
        {
            "cell": result["cell"],
            "key": result["settings"],
            headline(result)[0]: headline(result)[1],
            "epsilon": float(result["privacy"]["epsilon"]),
            "rounds": result["rounds"],
            "date": result["date"],
        }
        for result in found
    ]
    if json_:
        return print_json({"cells": lines})
    shown = [(measure_of(name), value) for name, value in map(headline, found)]
    alike = len({measure for measure, _ in shown}) == 1  # then its name stands above the column
    shown = [(measure_of(name), value) for name, value in map(headline, found)]
    alike = len({measure for measure, _ in shown}) == 1  # then its name stands above the column
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("cell", overflow="fold", min_width=20)
    sign = " %" if shown[0][0].percent else ""
    for column in (f"{shown[0][0].words}{sign}" if alike else "metric", "ε", "rounds", "date", "key"):
        table.add_column(column, justify="right", no_wrap=True)
    for line, (measure, value) in zip(lines, shown, strict=True):
        text = measure.shown(value).removesuffix(" %") if alike else f"{measure.words} {measure.shown(value)}"
        figures = (text, rounded_up(line["epsilon"]), str(line["rounds"]))
        table.add_row(escape(line["cell"]), *figures, escape(line["date"]), line["key"])
    return print_whole(table, Console())


def _choose(found: list[Result], word: str) -> Result:
    exact = [result for result in found if word in (result["cell"], result["settings"])]
    fits = exact or [result for result in found if word in result["cell"] or result["settings"].startswith(word)]
    if len(fits) == 1:
        return fits[0]
    if fits:
        some = ", ".join(repr(result["cell"]) for result in fits[:_SHOWN])
        raise ConfigError(f"{word!r} fits {len(fits)} cells, such as {some}; give a whole name or key")
    names = [result["cell"] for result in found]
    near = difflib.get_close_matches(word, names, n=_SHOWN, cutoff=0.3) or names[:_SHOWN]
    raise ConfigError(f"no cell {word!r} among {len(names)}; near it: {', '.join(map(repr, near))}")


def _lines(result: Result) -> Iterator[str]:
    """Yield what a reader asks first of a result, then its settings, one a line."""
    privacy = result["privacy"]
    epsilon, warning = rounded_up(float(privacy["epsilon"])), privacy.get("warning")
    yield f"{result['cell']} ({result['settings']})"
    figures = ordered(figures_of(result), result["config"])
    for name, value in figures.items():
        what = "" if [*figures] == ["accuracy"] else f"{measure_of(name).words} "
        where = f"on {result['evaluated_on']} data after {result['rounds']} rounds"
        yield f"{what}{words_of_figure(name, value)} {where}"
    yield f"ε = {epsilon} at δ = {privacy['delta']:.3g} ({privacy['accountant']})" + (f"; {warning}" if warning else "")
    yield f"{result['data']}, {result['clients']} clients{'; ' if result['data_note'] else ''}{result['data_note']}"
    took = f"{seconds:.0f} seconds on " if (seconds := result.get("seconds")) is not None else ""
    yield f"{took}{result['hardware']}, {result['date']}"
    yield ""
    yield from _flat(result["config"])
    yield "\n--json also prints accuracy by round."


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        elif value is not None:
            yield f"{above}{key} = {json.dumps(value)}"
