"""`fedblur audit`: attack a run's privacy with canaries, or a mechanism with the worst pair of neighbours."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedblur.audit import Audit, Check, Finding, WorstCase, audit, check_isolation, check_worst_case
from fedblur.audit.worst_case import worst_case_ticks
from fedblur.checkpoint import write_atomically
from fedblur.commands.guard import FOUND
from fedblur.commands.run import DataDir, Device, EngineOption, Json, Plugin, PrecisionOption, Quiet, make_machine
from fedblur.commands.terminal import print_json
from fedblur.config import Config, canonical, config_hash, from_dict
from fedblur.errors import ConfigError
from fedblur.experiments import read_spec
from fedblur.plugins import read_config
from fedblur.report.progress import bar
from fedblur.runfolder import RunFolder
from fedblur.setup import Machine

Named = tuple[str, Config]


def audit_(
    what: Annotated[
        Path | None, typer.Argument(metavar="CONFIG|RUN", help="A TOML file (one run or a table), or a run folder.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where results go (default: audits/NAME, or RUN/audit).")] = None,
    canaries: Annotated[
        int, typer.Option(help="m: clients that are added to the population and counted in N; 100 or more.")
    ] = 1000,
    held_out: Annotated[int, typer.Option(help="Directions that nobody sends: the null; 100 or more.")] = 1000,
    control: Annotated[
        bool, typer.Option(help="Also one run of each row without its noise: it must be found.")
    ] = False,
    plugin: Plugin = None,
    worst_case: Annotated[
        bool, typer.Option(help="A few rounds many times on a tiny model instead, and tests of noise and cohorts.")
    ] = False,
    repetitions: Annotated[int, typer.Option(help="With --worst-case: trials with and without the client.")] = 10_000,
    data_dir: DataDir = None,
    device: Device = "auto",
    engine: EngineOption = "auto",
    precision: PrecisionOption = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure privacy from outside: an empirical epsilon to hold against the accountant's.

    Trains with canary clients in the real round and attacks the released models. It spends epsilon on the clients, as
    any run does. Each result is a small JSON file and a figure; what is already there is not computed again. Exit
    status 1: an attack is above the claim, or a check fails, which is a bug.
    """
    configs, machine = _configs(what), make_machine(device, engine, data_dir, precision)
    if worst_case:
        _worst_cases(configs, what is None, repetitions, machine, json_, quiet)
        return
    folder = out or _default_folder(what)
    jobs = [(name, config, False) for name, config in configs] + (_controls(configs) if control else [])
    results = [
        _one(name, config, folder, (canaries, held_out, removed), machine, quiet or json_)
        for name, config, removed in jobs
    ]
    if json_:
        print_json(results)
    else:
        Console().print(render(results))
        Console().print(f"Results: {folder}")
    if any(result["verdict"] in ("ABOVE", "BROKEN") and not result["noise_removed"] for result in results):
        raise typer.Exit(FOUND)


def _configs(what: Path | None) -> list[Named]:
    """The configurations that a file, a table or a run folder names."""
    if what is None:
        return [("defaults", Config())]
    if what.is_dir():
        resolved = RunFolder(what).resolved()
        if "own" in resolved:
            raise ConfigError(
                f"{what} was started from Python with its own data or model; call fedblur.audit.audit there"
            )
        return [(what.name, from_dict(resolved))]
    table = read_config(what)
    if {"base", "rows"} & table.keys():
        return [(f"{cell.group}, seed {cell.config.seed}", cell.config) for cell in read_spec(what).cells]
    return [(what.stem, from_dict(table))]


def _controls(configs: list[Named]) -> list[tuple[str, Config, bool]]:
    """The first run of each row of a table, without its noise."""
    first = {name.split(" | ")[0]: (name, config, True) for name, config in reversed(configs)}
    return list(first.values())[::-1]


def _default_folder(what: Path | None) -> Path:
    if what is not None and what.is_dir():
        return what / "audit"
    return Path("audits") / (what.stem if what is not None else "defaults")


def _one(
    name: str, config: Config, folder: Path, size: tuple[int, int, bool], machine: Machine, quiet: bool
) -> dict[str, Any]:
    canaries, held_out, removed = size
    key = f"{config_hash(config)}-{canaries}-{held_out}{'-no-noise' if removed else ''}"
    path = folder / f"{key}.json"
    if path.exists():
        done: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return done
    with bar(name, config.rounds, quiet) as tick:
        found: Audit = audit(
            config, folder / "ledgers" / key, canaries=canaries, held_out=held_out, remove_noise=removed,
            machine=machine, tick=tick,
        )  # fmt: skip
    from fedblur.report.audit_plot import plot_audit  # matplotlib is slow to import

    plot_audit(found, path.with_suffix(".png"))
    result: dict[str, Any] = json.loads(canonical({"name": name, **found.facts()}))
    write_atomically(path, (json.dumps(result, indent=2) + "\n").encode())
    return result


def render(results: list[dict[str, Any]]) -> Table:
    """One line for each audit: the claim, both attacks, the verdict."""
    table = Table(box=None, pad_edge=False)
    for column in ("audit", "claimed ε", "final model ε [95 %]", "all iterates ε [95 %]", "attacks are"):
        table.add_column(column, overflow="fold")
    for result in results:
        cells = [_cell(result["attacks"][name]) for name in ("final model", "all iterates")]
        label = result["name"] + (" (noise removed)" if result["noise_removed"] else "")
        table.add_row(label, f"{float(result['claimed_epsilon']):.3f}", *cells, result["verdict"])
    return table


def _cell(attack: dict[str, Any]) -> str:
    low, high = attack["interval_95"]
    return f"{attack['epsilon']:.2f} [{low:.2f}, {high:.2f}]"


def _worst_cases(
    configs: list[Named], plain: bool, repetitions: int, machine: Machine, as_json: bool, quiet: bool
) -> None:
    """`plain`: no configuration was given, so the mechanism is checked where nothing hides a client."""
    results: list[dict[str, Any]] = []
    for name, config in configs:
        case = WorstCase() if plain else WorstCase(config)
        with bar(name, worst_case_ticks(repetitions), quiet or as_json) as tick:
            found = check_worst_case(case, repetitions, machine, tick)
        found = replace(found, checks=(*found.checks, *check_isolation(config, machine)))
        results.append(_facts(name, found))
        if not as_json:
            typer.echo("\n".join(_worst_lines(config, found, results[-1])))
    if as_json:
        print_json(results)
    if any(result["broken"] for result in results):
        raise typer.Exit(FOUND)


def _facts(name: str, found: Finding) -> dict[str, Any]:
    checks = [{**asdict(check), "broken": check.broken} for check in found.checks]
    return {"name": name, **asdict(found), "checks": checks, "broken": found.broken}


def _worst_lines(config: Config, found: Finding, facts: dict[str, Any]) -> list[str]:
    """The bound, and a line for each check."""
    share = found.lower_bound / found.claimed
    verdict = "BROKEN: weaker than it claims" if found.broken else "no violation found"
    rounds = "one release" if found.rounds == 1 else f"{found.rounds} of {config.rounds} rounds"
    bound = (
        f"{facts['name']}: {rounds} at ε = {found.claimed:.4g}, δ = {found.delta:g}: ε is at least "
        f"{found.lower_bound:.3f} ({100 * share:.0f} % of the claim; {found.repetitions:,} times with and without the "
        f"client, by {found.best}): {verdict}"
    )
    return [bound, *(f"  {_state(check)} {check.name}: {check.words}" for check in found.checks)]


def _state(check: Check) -> str:
    if check.p_value is None:
        return "not tested:"
    return f"BROKEN (p = {check.p_value:.1g}):" if check.broken else f"holds (p = {check.p_value:.2g}):"
