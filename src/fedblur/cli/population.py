"""`fedblur population`: one budget for people across run folders. Lists, budgets, and runs that are given up."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedblur.cli.options import Json
from fedblur.cli.output import print_json
from fedblur.core.errors import ConfigError, RunError
from fedblur.privacy import totals
from fedblur.privacy.accounting import ACCOUNTANTS
from fedblur.privacy.claim import PopulationTotal, to_json
from fedblur.privacy.populations import (
    Entry,
    Limit,
    Population,
    composed,
    every,
    existing,
    of_run,
    unprotected,
)
from fedblur.report.text import counted, in_short, words_of_population

app = typer.Typer(no_args_is_help=True, help="Show and limit what all runs on the same people spend together.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="A population.")]


@app.command("list")
def list_(json_: Json = False) -> None:
    """List all populations with their budgets and totals.

    Example: `fedblur population list`
    """
    found = [population.total() for population in every()]
    if json_:
        return print_json([to_json(total) for total in found])
    table = Table(box=None, pad_edge=False)
    for column in ("population", "runs", "δ", "ε spent", "ε reserved", "budget"):
        table.add_column(column, overflow="fold")
    for total in found:
        limit = "none" if total.budget is None else f"{total.budget:g}"
        figures = in_short(total.epsilon, 4), in_short(total.reserved, 4), limit
        table.add_row(total.name, str(total.runs), f"{total.delta:.3g}", *figures)
    return Console().print(table)


@app.command("show")
def show(name: Name, json_: Json = False) -> None:
    """Show who spent what, the total by both accountants, and what is reserved.

    Example: `fedblur population show ward-3`
    """
    population = existing(name)
    with population.locked():
        entries, limit, total = population.entries(), population.limit(), population.total()
    figures = _totals(entries, limit, total)
    if json_:
        return print_json(
            {**to_json(total), "adaptive": limit is not None and limit.adaptive, "total": figures,
             "infinite_because": unprotected(entries), "ledgers": [_facts(entry, total.delta) for entry in entries]}
        )  # fmt: skip
    table = Table(box=None, pad_edge=False)
    for column in ("run", "kind", "user", "last release", "releases", "reserved", "ε alone", "state"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        alone = in_short(_alone(entry, total.delta), 4)
        counts = str(entry.spent), str(entry.reserved)
        texts = [escape(text) for text in (entry.run, entry.kind, entry.user, entry.last[:16])]
        table.add_row(*texts, *counts, alone, escape(entry.state))
    console = Console()
    console.print(table)
    lines = [words_of_population(total)]
    for words, values in (("spent", figures["spent"]), ("with what is reserved", figures["reserved"])):
        each = ", ".join(f"{key.upper()} {in_short(value, 4)}" for key, value in values.items() if key != "adaptive")
        adaptive = in_short(values["adaptive"], 4)
        lines.append(f"{words}: ε by {each}; {adaptive} if later runs were chosen by looking at earlier ones")
    reason = unprotected(entries)
    lines += [f"ε is ∞, since {reason}"] if reason else []
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return None


@app.command("budget")
def budget(
    name: Name,
    epsilon: Annotated[float, typer.Option(help="What all runs on these people may spend together.")],
    delta: Annotated[float, typer.Option(help="δ of the total.")],
    adaptive: Annotated[
        bool,
        typer.Option(help="Also cover runs whose noise you choose after seeing earlier results (RDP, fixed orders)."),
    ] = False,
    json_: Json = False,
) -> None:
    """Set or change the budget of a population. A budget below what is already spent blocks all further runs.

    Example: `fedblur population budget ward-3 --epsilon 4 --delta 1e-5`
    """
    population = Population(name)
    population.set_limit(Limit(epsilon, delta, adaptive))
    total = population.total()
    _say(total, [words_of_population(total)], json_)


@app.command("reconcile")
def reconcile(
    name: Name,
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Run folders to add to the count.")
    ] = None,
    json_: Json = False,
) -> None:
    """Read the ledgers again: free what complete or vanished runs reserved, and count runs that are not known yet.

    Example: `fedblur population reconcile ward-3`
    """
    population = existing(name) if not runs else Population(name)
    with population.locked():
        changes = [population.adopt(run / "ledger.jsonl" if run.is_dir() else run) for run in runs or ()]
        changes += population.reconcile()
        total = population.total()
    _say(total, [*(changes or ["nothing to change"]), words_of_population(total)], json_, changes)


@app.command("close")
def close(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or where it was.")], json_: Json = False
) -> None:
    """Give a run up for good: what it reserved and did not use is free again, and it can never be resumed.

    Example: `fedblur population close runs/mine`
    """
    found = of_run(run)
    if not found:
        raise RunError(f"no population knows the ledger of {run}; fedblur population show NAME lists those it knows")
    if len(found) > 1 and len({entry.ledger for _, entry in found}) > 1:
        raise ConfigError(f"{run} held {len(found)} ledgers; move the one that you mean back there")
    for population, entry in found:
        closed = population.close(entry)
        total, freed = population.total(), entry.reserved - closed.reserved
        line = f"{run}: closed after {counted(closed.spent, 'release')}; {counted(freed, 'release')} are free again"
        _say(total, [line, words_of_population(total)], json_, [line])


def _say(total: PopulationTotal, lines: list[str], as_json: bool, changes: list[str] | None = None) -> None:
    if as_json:
        return print_json(to_json(total) | ({} if changes is None else {"changes": changes}))
    for line in lines:
        Console().print(line, highlight=False, markup=False, soft_wrap=True)
    return None


def _facts(entry: Entry, delta: float) -> dict[str, Any]:
    return {**asdict(entry), "run": entry.run, "reserved": entry.reserved, "epsilon_alone": _alone(entry, delta)}


def _alone(entry: Entry, delta: float) -> float | None:
    """Return what one run has spent, at the population's δ."""
    if entry.spent and unprotected([entry]):
        return float("inf")
    return totals.smallest(composed([entry], made=True), delta)


def _totals(entries: list[Entry], limit: Limit | None, total: PopulationTotal) -> dict[str, dict[str, float | None]]:
    """Return what is spent, and what is reserved, by each accountant and by a few orders that were fixed beforehand."""
    figures: dict[str, dict[str, float | None]] = {}
    orders = totals.orders_for(total.budget or 2.0, total.delta)
    for key, made in (("spent", True), ("reserved", False)):
        event = composed(entries, made)
        known: dict[str, float | None] = {name: totals.spent(event, total.delta, name) for name in ACCOUNTANTS}
        values: dict[str, float | None] = {**known, "adaptive": totals.spent_adaptively(event, orders, total.delta)}
        figures[key] = dict.fromkeys(values, float("inf")) if unprotected(entries) else values
    return figures
