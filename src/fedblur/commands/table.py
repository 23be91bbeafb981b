"""`fedblur table SPEC.toml`: run rows × axes, keep results, go on where it stopped, print mean ± std."""

from __future__ import annotations

import json
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
    PrecisionOption,
    Quiet,
    make_machine,
    privacy_line,
)
from fedblur.config import canonical
from fedblur.experiments import Cell, aggregate, read_spec, run_table
from fedblur.report.progress import RunProgress
from fedblur.report.table import render
from fedblur.summary import SEEDED
from fedblur.verification import compose, read_books

SEEDS = " (seeds make a table reproducible; leave the seed out to protect people)."


def table(
    path: Annotated[Path, typer.Argument(metavar="SPEC", help="A TOML file with [base], [axes] and [[rows]].")],
    out: Annotated[Path | None, typer.Option(help="Where cells and results go (default: runs/SPEC-NAME).")] = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    engine: EngineOption = "auto",
    precision: PrecisionOption = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a table of experiments and print mean ± standard deviation over seeds.

    Results are small JSON files named by the hash of their cell: a table that was stopped goes on where it was, and a
    changed setting computes only the cells that it changes.
    """
    spec = read_spec(path)
    folder = out or Path("runs") / path.stem
    console = Console(stderr=True)
    with TableProgress(len(spec.cells), quiet or json_, console) as progress:
        results = run_table(spec, folder, make_machine(device, engine, data_dir, precision), progress.cell)
    lines = aggregate(spec, results)
    if json_:
        typer.echo(json.dumps(json.loads(canonical({"title": spec.title, "lines": [asdict(line) for line in lines]}))))
        return
    output = Console()
    output.print(render(spec.title, lines))
    for sentence in _footer(results, spec.note):
        output.print(sentence)
    output.print(f"Results: {folder / 'results'}")
    for line in _privacy([folder / "cells" / cell.key for cell in spec.cells], spec.tuning):
        output.print(line, soft_wrap=True, highlight=False)


def _privacy(runs: list[Path], tuning: str) -> list[str]:
    """A statement for each run that is here; the last one's claim, and what all of them cost together."""
    here = [run for run in runs if (run / "summary.json").exists()]
    if not here:
        return []
    lines = [privacy_line(run, tuning) for run in here]
    if len(here) == 1:
        return lines
    delta, total = compose([read_books(run) for run in here])
    known = [f"{name.upper()} {value:.3g}" for name, value in total.items() if value is not None]
    together = f"All {len(here)} runs on these clients together: ε = {', '.join(known)} at δ = {delta:.3g}."
    return [lines[-1], f"{together if known else ''} One statement in each folder of {here[0].parent}.".strip()]


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

    def cell(self, cell: Cell, index: int) -> RunProgress:
        """The watcher of the next cell."""
        self._close()
        name = f"[{index + 1}/{self.cells}] {cell.group}, seed {cell.config.seed}"
        self.current = RunProgress(cell.config.rounds, self.quiet, name, self.console).__enter__()
        return self.current


def _footer(results: dict[str, dict[str, Any]], note: str) -> list[str]:
    """What a reader of the table must know; taken from the results, so that it cannot be forgotten."""
    members = list(results.values())
    privacy = members[0]["privacy"]
    notes = sorted({member["data_note"] for member in members if member["data_note"]})
    warnings = sorted({member["privacy"]["warning"] for member in members if member["privacy"]["warning"]})
    return [
        f"Final round, {members[0]['evaluated_on']} data; {members[0]['data']}, {members[0]['clients']} clients. "
        f"δ = {privacy['delta']:.3g}, {privacy['accountant'].upper()}, {privacy['adjacency']}, {privacy['sampling']}. "
        f"Trust: {privacy['trust_model']}. {privacy['tuning']}.",
        *notes,
        *([note] if note else []),
        *(f"{warning}{SEEDS if warning == SEEDED else '.'}" for warning in warnings),
    ]
