"""`fedblur table SPEC.toml ...`: run rows × axes, keep results, go on where it stopped, print mean ± std."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedblur.cli.options import Json, LoggerOption, LogLocalOnly, Plugin, Quiet, on_machine
from fedblur.cli.options import Population as PopulationOption
from fedblur.cli.output import print_json
from fedblur.core.callbacks import Watcher
from fedblur.core.errors import ConfigError
from fedblur.experiments.forecast import forecast
from fedblur.experiments.result_store import Results, Stale
from fedblur.experiments.table import Cell, TimeLimit, aggregate, pending, run_cells, write_plan
from fedblur.experiments.table_spec import Spec, read_spec
from fedblur.privacy.claim import SEEDED
from fedblur.privacy.populations import Population
from fedblur.report.loggers import Occasion, where_loggers_write, with_loggers
from fedblur.report.progress import one_by_one
from fedblur.report.statement import words_of_total, write_statement
from fedblur.report.table import print_whole, render, render_forecast
from fedblur.report.text import words_of_population
from fedblur.training.machine import Machine
from fedblur.training.run_folder import RunFolder
from fedblur.training.verify_ledger import read_books

_SHOWN = 3  # different values of one thing below a table
SEEDS = " (seeds make a table reproducible; leave the seed out to protect people)."


@on_machine
def table(
    paths: Annotated[
        list[Path], typer.Argument(metavar="SPEC...", help="TOML files with [base], [axes] and [[rows]].")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for unfinished cells (default: runs/SPEC-NAME).")] = None,
    results: Annotated[
        Path | None, typer.Option(help="Folder for results (default: as the file says, or OUT).")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Run only cells whose name contains this; repeatable.")
    ] = None,
    max_minutes: Annotated[
        float | None, typer.Option(min=0, help="Time budget in minutes: no cell starts that would end later.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List cells with their noise, R and time; run nothing.")
    ] = False,
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="The metric that is shown (default: the first one of the task).")
    ] = None,
    population: PopulationOption = None,
    plugin: Plugin = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting in every cell.")
    ] = None,
    *,
    machine: Machine,
    logger: LoggerOption = None,
    log_local_only: LogLocalOnly = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run tables of experiments and print mean ± standard deviation over seeds.

    Results are small JSON files, found by their settings: rerun a stopped table to continue it, and change a setting to
    compute only the cells that it affects. Results of earlier settings are listed as stale. Cells of all files run in
    one process, by priority. Start the same command again in another terminal or on another GPU to share the cells.
    --dry-run estimates for a GPU unless --device says otherwise.

    Example: `fedblur table examples/quickstart.toml --out runs/quickstart`
    """
    named = [f"population={json.dumps(population)}"] if population else []
    specs = [read_spec(path, [*(set_ or ()), *named]) for path in paths]
    cells = [cell for spec in specs for cell in spec.cells]
    for pattern in only or ():  # one that fits nothing is a mistake, not a finished table
        if not any(cell.fits([pattern]) for cell in cells):
            raise ConfigError(f"--only {pattern!r} matches no cell; their names are like {cells[0].name!r}")
    shared = paths[0].resolve().parent.name  # tables that share results also share unfinished cells
    folder = out or Path("runs") / (shared if specs[0].results else paths[0].stem)
    store = _store(specs, results, folder)
    if dry_run:
        place = "cuda" if machine.device == "auto" else machine.device
        forecasts = [forecast(spec.only(only or ()), store, place) for spec in specs]
        if json_:
            return print_json({"tables": [asdict(each) for each in forecasts]})
        for each in forecasts:
            print_whole(render_forecast(each), Console())
            Console().print(each.total + "\n", highlight=False, markup=False)
        return None
    waiting = pending(specs, store.found, only or ())
    for spec in specs:
        write_plan(spec, folder, store.folder)
    console = Console(stderr=True)

    def tell(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    _warn(store, specs, tell)
    with one_by_one(quiet or json_, console) as start, ExitStack() as open_loggers:

        def watch(cell: Cell, index: int) -> Watcher:
            name = cell.name if len(specs) > 1 else cell.name.split(": ", 1)[1]
            display = start(cell.config.rounds, f"[{index + 1}/{len(cells)}] {name}")
            open_loggers.close()  # of the cell before
            occasion = Occasion(folder / "cells" / cell.key, folder, name, log_local_only)
            return open_loggers.enter_context(with_loggers(logger or (), occasion, display))[0]

        for line in where_loggers_write(logger or (), Occasion(folder, folder, "", log_local_only)):
            tell(line)  # a logger that is missing is found before anything is spent
        note = (lambda text: None) if quiet or json_ else tell
        left = run_cells(waiting, store, folder / "cells", machine, watch, cells, TimeLimit(max_minutes), note)
    if left:
        why = "out of time, or another command computes them; rerun the command to continue"
        console.print(f"{len(left)} of {len(waiting)} cells are left: {why}")
    return _show(specs, store, folder / "cells", metric, json_)


def _store(specs: list[Spec], given: Path | None, out: Path) -> Results:
    folders = {given or spec.results or out / "results" for spec in specs}
    if len(folders) > 1:
        raise ConfigError(
            f"these tables keep results in {len(folders)} folders; run them one at a time, or give --results"
        )
    folder = folders.pop()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"results={str(folder)!r} is not a folder; give one for small JSON files")
    return Results(folder)


def _warn(store: Results, specs: list[Spec], tell: Callable[[str], None]) -> None:
    """Tell which kept results are not used: one line for all that share a reason."""
    cells = [cell for spec in specs for cell in spec.cells]
    wanted, names = {cell.key: cell.config for cell in cells}, {cell.key: cell.name for cell in cells}
    alike: dict[str, list[Stale]] = {}
    for stale in store.stale(wanted, names, [spec.name for spec in specs]):
        alike.setdefault(stale.reason, []).append(stale)
    for first, *others in alike.values():
        tell(f"{first}{f'; and {len(others)} more like it' if others else ''}; it is not used")


def _show(specs: list[Spec], store: Results, cells: Path, metric: str | None, as_json: bool) -> None:
    tables = []
    output = Console()
    for spec in specs:
        lines = aggregate(spec, store.found, metric)
        found = [store.found[cell.key] for cell in spec.cells if cell.key in store.found]
        tables.append({"title": spec.title, "lines": [line.facts() for line in lines]})
        if as_json or not found:
            continue
        print_whole(render(spec.title, lines), output)
        for sentence in _footer(found, spec.note):
            output.print(sentence, markup=False)
        output.print(f"Results: {store.folder}", markup=False, end="\n\n" if len(specs) > 1 else "\n")
        for line in _privacy([cells / cell.key for cell in spec.cells], spec.tuning):
            output.print(line, markup=False, soft_wrap=True, highlight=False)
    if as_json:
        print_json(tables[0] if len(tables) == 1 else {"tables": tables})
        return
    results = (store.found[cell.key] for spec in specs for cell in spec.cells if cell.key in store.found)
    for name in sorted({each["name"] for result in results if (each := result["privacy"].get("population"))}):
        output.print(words_of_population(Population(name).total()), highlight=False, markup=False, soft_wrap=True)


def _privacy(runs: list[Path], tuning: str) -> list[str]:
    """Return a line for each finished run, and what all runs cost together, finished or not."""
    ended = [run for run in runs if RunFolder(run).summary.exists()]
    paid = [run for run in runs if RunFolder(run).ledger.exists()]
    lines = [write_statement(run, tuning=tuning)[0].shown() for run in ended]
    if len(paid) < 2:
        return lines
    figures = words_of_total([read_books(run) for run in paid])
    unended = f", {len(paid) - len(ended)} of them not ended," if len(paid) > len(ended) else ""
    together = f"All {len(paid)} runs{unended} on these clients together: {figures}." if figures else ""
    where = f"One statement in each folder of {paid[0].parent}." if ended else ""
    return [*lines[-1:], f"{together} {where}".strip()]


def _footer(members: list[dict[str, Any]], note: str) -> list[str]:
    """Return what a reader of the table must know; taken from the results, so that it cannot be forgotten."""
    notes = sorted({member["data_note"] for member in members if member["data_note"]})
    privacy = [member["privacy"] for member in members]
    warnings = sorted({part["warning"] for part in privacy if part["warning"]})
    data = _either(f"{member['data']}, {member['clients']} clients" for member in members)
    delta = _either(f"{part['delta']:.3g}" for part in privacy)
    accountants = " and ".join(sorted({part["accountant"].upper() for part in privacy}))
    adjacency, sampling, trust, tuning = (
        _either(part[key] for part in privacy) for key in ("adjacency", "sampling", "trust_model", "tuning")
    )
    return [
        f"Final round, {_either(member['evaluated_on'] for member in members)} data; {data}. "
        f"δ = {delta}, {accountants}, {adjacency}, {sampling}. Trust: {trust}. {tuning}.",
        *(f"Data: {note}." for note in notes),
        *([note] if note else []),
        *(f"{warning}{SEEDS if warning == SEEDED else '.'}" for warning in warnings),
    ]


def _either(values: Iterable[str]) -> str:
    """List what rows of a table have; of very many the first, and how many more."""
    found = list(dict.fromkeys(values))
    shown = found if len(found) <= _SHOWN else [found[0], f"{len(found) - 1} others (each run's statement has its own)"]
    return "; or ".join(shown)
