"""`fedblur table SPEC.toml ...`: run rows × axes, keep results, go on where it stopped, print mean ± std."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedblur.commands.run import (
    DataDir,
    Device,
    EngineOption,
    Json,
    Plugin,
    PrecisionOption,
    Quiet,
    make_machine,
    privacy_line,
)
from fedblur.commands.terminal import print_json
from fedblur.errors import ConfigError
from fedblur.experiments import Cell, TimeLimit, aggregate, pending, run_cells
from fedblur.forecast import Forecast, forecast
from fedblur.report.progress import RunProgress
from fedblur.report.statement import words_of_total
from fedblur.report.table import print_whole, render, render_forecast
from fedblur.results import Results, Stale, demand_folder
from fedblur.runfolder import RunFolder
from fedblur.spec import Spec, read_spec
from fedblur.summary import SEEDED
from fedblur.verification import read_books

_SHOWN = 3  # different values of one thing below a table
SEEDS = " (seeds make a table reproducible; leave the seed out to protect people)."


def table(
    paths: Annotated[
        list[Path], typer.Argument(metavar="SPEC...", help="TOML files with [base], [axes] and [[rows]].")
    ],
    out: Annotated[Path | None, typer.Option(help="Where unfinished cells go (default: runs/SPEC-NAME).")] = None,
    results: Annotated[Path | None, typer.Option(help="Where results go (default: as the file says, or OUT).")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Only cells with this in their name.")
    ] = None,
    max_minutes: Annotated[
        float | None, typer.Option(min=0, help="Start no cell that would end later; stop at this.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List cells, noise, R and time; run nothing.")] = False,
    plugin: Plugin = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of all cells, over the file's.")
    ] = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    engine: EngineOption = "auto",
    precision: PrecisionOption = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run tables of experiments and print mean ± standard deviation over seeds.

    Results are small JSON files that are found again by their settings: a table that was stopped goes on where it was,
    a changed setting computes only the cells that it changes, and results of older settings are named as stale. Cells
    of all files run in one process, by priority; the same command started once more beside it (in another terminal, on
    another GPU) takes cells that are still free. --dry-run estimates for a GPU unless --device says otherwise.
    """
    specs = [read_spec(path, set_ or ()) for path in paths]
    _demand_cells(specs, only or ())
    folder = out or _default_out(paths, specs)
    store = _store(specs, results, folder)
    if dry_run:
        place = "cuda" if device == "auto" else device
        _show_forecasts([forecast(spec.only(only or ()), store, place) for spec in specs], json_)
        return
    waiting = pending(specs, store.found, only or ())
    cells = [cell for spec in specs for cell in spec.cells]
    console = Console(stderr=True)
    _warn(store, specs, console)
    with TableProgress(len(cells), quiet or json_, console) as progress:
        machine = make_machine(device, engine, data_dir, precision)
        limit = TimeLimit(max_minutes)
        left = run_cells(waiting, store, folder / "cells", machine, progress.cell, cells, limit, progress.tell)
    if left:
        why = "for want of time, or to another command that computes them now; run the same command again"
        console.print(f"{len(left)} of {len(waiting)} cells are left {why}")
    _show(specs, store, folder / "cells", json_)


def _demand_cells(specs: list[Spec], only: Iterable[str]) -> None:
    """A pattern that fits nothing is a slip, not a table that is done."""
    cells = [cell for spec in specs for cell in spec.cells]
    for pattern in only:
        if not any(cell.fits([pattern]) for cell in cells):
            raise ConfigError(f"--only {pattern!r} fits no cell; their names are like {cells[0].name!r}")


def _default_out(paths: list[Path], specs: list[Spec]) -> Path:
    """Tables that share results also share unfinished cells."""
    return Path("runs") / (paths[0].resolve().parent.name if specs[0].results else paths[0].stem)


def _store(specs: list[Spec], given: Path | None, out: Path) -> Results:
    folders = {given or spec.results or out / "results" for spec in specs}
    if len(folders) > 1:
        raise ConfigError(
            f"these tables keep results in {len(folders)} folders; run them one by one, or give --results"
        )
    folder = folders.pop()
    demand_folder(folder)
    return Results(folder)


def _warn(store: Results, specs: list[Spec], console: Console) -> None:
    cells = [cell for spec in specs for cell in spec.cells]
    wanted, names = {cell.key: cell.config for cell in cells}, {cell.key: cell.name for cell in cells}
    alike: dict[str, list[Stale]] = {}
    for stale in store.stale(wanted, names, [spec.name for spec in specs]):
        alike.setdefault(stale.reason, []).append(stale)
    for first, *others in alike.values():
        more = f"; and {len(others)} more like it" if others else ""
        console.print(f"{first}{more}; it is not used", markup=False, highlight=False, soft_wrap=True)


def _show(specs: list[Spec], store: Results, cells: Path, as_json: bool) -> None:
    tables = []
    output = Console()
    for spec in specs:
        lines, found = aggregate(spec, store.found), _found(spec.cells, store)
        tables.append({"title": spec.title, "lines": [asdict(line) for line in lines]})
        if as_json or not found:
            continue
        print_whole(render(spec.title, lines), output)
        for sentence in _footer(found, spec.note):
            output.print(sentence)
        output.print(f"Results: {store.folder}\n" if len(specs) > 1 else f"Results: {store.folder}")
        for line in _privacy([cells / cell.key for cell in spec.cells], spec.tuning):
            output.print(line, soft_wrap=True, highlight=False)
    if as_json:
        print_json(tables[0] if len(tables) == 1 else {"tables": tables})


def _show_forecasts(forecasts: list[Forecast], as_json: bool) -> None:
    if as_json:
        print_json({"tables": [asdict(f) for f in forecasts]})
        return
    for each in forecasts:
        print_whole(render_forecast(each), Console())
        Console().print(each.total + "\n", highlight=False)


def _found(cells: Sequence[Cell], store: Results) -> list[dict[str, Any]]:
    return [store.found[cell.key] for cell in cells if cell.key in store.found]


def _privacy(runs: list[Path], tuning: str) -> list[str]:
    """A statement for each run that has ended; the last one's claim, and what all of them cost, ended or not."""
    ended = [run for run in runs if RunFolder(run).summary.exists()]
    paid = [run for run in runs if RunFolder(run).ledger.exists()]
    lines = [privacy_line(run, tuning) for run in ended]
    if len(paid) < 2:
        return lines
    figures = words_of_total([read_books(run) for run in paid])
    which = f"All {len(paid)} runs" + (
        f", {len(paid) - len(ended)} of them not ended," if len(paid) > len(ended) else ""
    )
    together = f"{which} on these clients together: {figures}." if figures else ""
    where = f"One statement in each folder of {paid[0].parent}." if ended else ""
    return [*lines[-1:], f"{together} {where}".strip()]


class TableProgress:
    """One line of progress per cell that has to run."""

    def __init__(self, cells: int, quiet: bool, console: Console) -> None:
        self.cells = cells
        self.quiet = quiet
        self.console = console
        self.current: RunProgress | None = None

    def __enter__(self) -> TableProgress:
        return self

    def __exit__(self, *unused: object) -> None:
        self._close()

    def _close(self) -> None:
        if self.current is not None:
            self.current.__exit__(None, None, None)

    def tell(self, text: str) -> None:
        """A line beside the display."""
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def cell(self, cell: Cell, index: int) -> RunProgress:
        """The watcher of the next cell."""
        self._close()
        name = f"[{index + 1}/{self.cells}] {cell.name}"
        self.current = RunProgress(cell.config.rounds, self.quiet, name, self.console).__enter__()
        return self.current


def _footer(members: list[dict[str, Any]], note: str) -> list[str]:
    """What a reader of the table must know; taken from the results, so that it cannot be forgotten."""
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
        *notes,
        *([note] if note else []),
        *(f"{warning}{SEEDS if warning == SEEDED else '.'}" for warning in warnings),
    ]


def _either(values: Iterable[str]) -> str:
    """All that rows of a table have; of very many the first, and how many more."""
    found = list(dict.fromkeys(values))
    shown = found if len(found) <= _SHOWN else [found[0], f"{len(found) - 1} others (each run's statement has its own)"]
    return "; or ".join(shown)
