"""`fedblur audit`: attack a run's privacy with canaries, or a mechanism with the worst pair of neighbours."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedblur.cli.errors import FOUND
from fedblur.cli.options import Json, Plugin, Population, Quiet, on_machine
from fedblur.cli.output import print_json
from fedblur.core.config import Config, canonical, config_hash, from_dict
from fedblur.core.errors import ConfigError, RunError
from fedblur.core.files import demand_digest, read_json_if_there, with_digest, write_atomically
from fedblur.core.plugins import read_config
from fedblur.experiments.audit import Audit, Check, Finding, WorstCase, audit, check_isolation, check_worst_case
from fedblur.experiments.audit.worst_case import worst_case_ticks
from fedblur.experiments.recipe import configure
from fedblur.experiments.table import read_spec
from fedblur.privacy.claim import PopulationTotal, from_json
from fedblur.report.progress import bar
from fedblur.report.text import words_of_population
from fedblur.training.machine import Machine
from fedblur.training.run_folder import RunFolder

Named = tuple[str, Config]


@on_machine
def audit_(
    what: Annotated[
        Path | None, typer.Argument(metavar="CONFIG|RUN", help="A TOML file (one run or a table), or a run folder.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results (default: audits/NAME, or RUN/audit).")] = None,
    canaries: Annotated[
        int, typer.Option(help="m, clients that are added to the population and counted in N; at least 100.")
    ] = 1000,
    held_out: Annotated[
        int, typer.Option(help="Directions that no client sends, for the null hypothesis; at least 100.")
    ] = 1000,
    control: Annotated[
        bool, typer.Option(help="Also run each row once without noise; the attack must find it.")
    ] = False,
    population: Population = None,
    plugin: Plugin = None,
    worst_case: Annotated[
        bool, typer.Option(help="Instead, repeat a few rounds on a tiny model many times, and test noise and cohorts.")
    ] = False,
    repetitions: Annotated[int, typer.Option(help="With --worst-case: trials with and without the client.")] = 10_000,
    *,
    machine: Machine,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Attack the privacy of a run: an empirical epsilon to compare with the accountant's.

    An audit trains with canary clients in the real round and attacks the released models. It spends epsilon on the
    clients, as any run does. Each result is a small JSON file and a figure; existing results are not computed again.
    Exit status 1 means that an attack exceeds the claim or that a check fails, which is a bug.

    Example: `fedblur audit --worst-case`
    """
    configs = _configs(what)
    if population is not None:
        configs = [(name, replace(config, population=population)) for name, config in configs]
    if worst_case:
        _worst_cases(configs, what is None, repetitions, machine, json_, quiet)
        return
    stem = "defaults" if what is None else what.stem
    folder = out or (what / "audit" if what is not None and what.is_dir() else Path("audits") / stem)
    jobs = [(name, config, False) for name, config in configs]
    if control:  # the first run of each row of a table, without its noise
        first = {name.split(" | ")[0]: (name, config, True) for name, config in reversed(configs)}
        jobs += list(first.values())[::-1]
    results = [_one(*job, folder, canaries, held_out, machine, quiet or json_) for job in jobs]
    if json_:
        print_json(results)
    else:
        Console().print(render(results))
        Console().print(f"Results: {folder}", markup=False)
        totals = [
            from_json(PopulationTotal, result["population"], folder) for result in results if "population" in result
        ]
        for total in {total.name: total for total in totals}.values():
            Console().print(words_of_population(total), highlight=False, markup=False, soft_wrap=True)
    if any(result["verdict"] in ("ABOVE", "BROKEN") and not result["noise_removed"] for result in results):
        raise typer.Exit(FOUND)


def _configs(what: Path | None) -> list[Named]:
    """Return the configurations that a file, a table or a run folder names."""
    if what is None:
        return [("defaults", Config())]
    if what.is_dir():
        resolved = RunFolder(what).resolved()
        if "own" in resolved:
            raise ConfigError(
                f"{what} was started from Python with its own data or model; call fedblur.experiments.audit.audit there"
            )
        return [(what.name, from_dict(resolved))]
    table = read_config(what)
    if {"base", "rows"} & table.keys():
        return [(f"{cell.group}, seed {cell.config.seed}", cell.config) for cell in read_spec(what).cells]
    return [(what.stem, configure(table))]


def _one(
    name: str, config: Config, removed: bool, folder: Path, canaries: int, held_out: int, machine: Machine, quiet: bool
) -> dict[str, Any]:
    """Return the facts of one audit, `removed`: without noise. What was computed before is read."""
    key = f"{config_hash(config)}-{canaries}-{held_out}{'-no-noise' if removed else ''}"
    path = folder / f"{key}.json"
    done = read_json_if_there(path, "delete it to run the audit again")
    if done is not None:
        if not {"name", "attacks", "verdict", "noise_removed"} <= done.keys():
            raise RunError(f"{path} holds no audit; delete it to run the audit again")
        demand_digest(done, path, "delete it to run the audit again")
        return done
    with bar(name, config.rounds, quiet) as tick:
        found: Audit = audit(
            config, folder / "ledgers" / key, canaries=canaries, held_out=held_out, remove_noise=removed,
            machine=machine, tick=tick,
        )  # fmt: skip
    from fedblur.report.plots import plot_audit  # matplotlib is slow to import

    plot_audit(found, path.with_suffix(".png"))
    result: dict[str, Any] = with_digest(json.loads(canonical({"name": name, **found.facts()})))
    write_atomically(path, (json.dumps(result, indent=2) + "\n").encode(), private=True)  # checks read cohorts, norms
    return result


def render(results: list[dict[str, Any]]) -> Table:
    """Print one line for each audit: the claim, both attacks, the verdict."""
    table = Table(box=None, pad_edge=False)
    for column in ("audit", "claimed ε", "final model ε [95 %]", "all iterates ε [95 %]", "attacks are"):
        table.add_column(column, overflow="fold")
    for result in results:
        attacks = [result["attacks"][name] for name in ("final model", "all iterates")]
        cells = ["{epsilon:.2f} [{interval_95[0]:.2f}, {interval_95[1]:.2f}]".format(**attack) for attack in attacks]
        label = escape(result["name"]) + (" (noise removed)" if result["noise_removed"] else "")
        table.add_row(label, f"{float(result['claimed_epsilon']):.3f}", *cells, result["verdict"])
    return table


def _worst_cases(
    configs: list[Named], plain: bool, repetitions: int, machine: Machine, as_json: bool, quiet: bool
) -> None:
    """Run the worst cases. `plain`: without a configuration, the mechanism is checked where nothing hides a client."""
    results: list[dict[str, Any]] = []
    for name, config in configs:
        case = WorstCase() if plain else WorstCase(config)
        with bar(name, worst_case_ticks(repetitions), quiet or as_json) as tick:
            found = check_worst_case(case, repetitions, machine, tick)
        found = replace(found, checks=(*found.checks, *check_isolation(config, machine)))
        checks = [{**asdict(check), "broken": check.broken} for check in found.checks]
        results.append({"name": name, **asdict(found), "checks": checks, "broken": found.broken})
        if not as_json:
            typer.echo("\n".join(_worst_lines(name, config, found)))
    if as_json:
        print_json(results)
    if any(result["broken"] for result in results):
        raise typer.Exit(FOUND)


def _worst_lines(name: str, config: Config, found: Finding) -> list[str]:
    """Return the bound, and a line for each check."""
    share = found.lower_bound / found.claimed
    verdict = "BROKEN: weaker than it claims" if found.broken else "no violation found"
    rounds = "one release" if found.rounds == 1 else f"{found.rounds} of {config.rounds} rounds"
    bound = (
        f"{name}: {rounds} at ε = {found.claimed:.4g}, δ = {found.delta:g}: ε is at least "
        f"{found.lower_bound:.3f} ({100 * share:.0f} % of the claim; {found.repetitions:,} times with and without the "
        f"client, by {found.best}): {verdict}"
    )
    return [bound, *(f"  {_state(check)} {check.name}: {check.words}" for check in found.checks)]


def _state(check: Check) -> str:
    if check.p_value is None:
        return "not tested:"
    return f"BROKEN (p = {check.p_value:.1g}):" if check.broken else f"holds (p = {check.p_value:.2g}):"
