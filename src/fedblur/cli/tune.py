"""`fedblur tune FILE`: choose between configurations, privately or on proxy data, and release the winner."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedblur.cli.options import Json, Plugin, Population, Quiet, complete, on_machine
from fedblur.cli.output import print_json
from fedblur.core.config import Config, apply_overrides, config_hash
from fedblur.core.errors import ConfigError
from fedblur.experiments.private_search import Search, make_search
from fedblur.experiments.search_runner import Tuned, load_data, run_search, tune_on_proxy
from fedblur.experiments.table import read_spec
from fedblur.learning.metrics import metrics_of
from fedblur.learning.metrics.measures import measure_of
from fedblur.privacy.private_selection import TrialCount
from fedblur.report.progress import RunProgress, one_by_one
from fedblur.report.text import in_short, print_summary
from fedblur.training.machine import Machine
from fedblur.training.run_folder import NOTHING

_TRIALS, _ETA, _SCORE = 10.0, 0.0, "private"


@on_machine
def tune(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The grid: [base], [axes], [[rows]], as for a table.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the winner (default: runs/FILE-NAME-tuned).")] = None,
    trials: Annotated[
        float, typer.Option(help="Expected number of trials; the number itself is random and secret.")
    ] = _TRIALS,
    eta: Annotated[
        float, typer.Option(help="Distribution of that number: 0 logarithmic, 1 geometric, inf Poisson.")
    ] = _ETA,
    epsilon: Annotated[
        float | None, typer.Option(help="Total for the whole search, of which each trial gets a part.")
    ] = None,
    score: Annotated[str, typer.Option(help='"private" (protects validation clients too) or "public".')] = _SCORE,
    score_scale: Annotated[
        float,
        typer.Option(help="Of errors without a worst value: the one that scores a half. Never from private data."),
    ] = 1.0,
    proxy: Annotated[
        str | None,
        typer.Option(
            help="Choose on this public data set instead, at no privacy cost.", autocompletion=complete("dataset")
        ),
    ] = None,
    proxy_set: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting of the runs on proxy data; repeatable.")
    ] = None,
    population: Population = None,
    plugin: Plugin = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what it would cost; run nothing.")] = False,
    *,
    machine: Machine,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose between configurations at a known privacy cost, and release only the winner.

    Trials are real runs. By default, a random number of randomly picked configurations is scored on validation clients,
    with noise, and the total epsilon covers the choice. With --proxy the choice costs nothing.

    Example: `fedblur tune examples/quickstart-tune.toml --dry-run`
    """
    named = [f"population={json.dumps(population)}"] if population else []
    cells = read_spec(path, named).cells
    configs = [cell.config for cell in cells]
    found: dict[str, str] = {}
    for cell in cells:  # as the search counts its candidates
        found.setdefault(config_hash(replace(cell.config, evaluate="test")), cell.group)
    names = list(found.values())
    folder = out or Path("runs") / f"{path.stem}-tuned"
    if proxy is not None:
        given = {"--epsilon": epsilon is not None, "--trials": trials != _TRIALS, "--eta": eta != _ETA}
        given |= {"--score": score != _SCORE, "--score-scale": score_scale != 1}
        unused = next((name for name, is_given in given.items() if is_given), None)
        if unused is not None:
            raise ConfigError(
                f"{unused} is for a private search; with --proxy every configuration runs once on proxy data, and the "
                "best one on the private data with the epsilon that the file gives it"
            )
        overrides = apply_overrides({"dataset": proxy}, proxy_set or [])
        if dry_run:
            return _explain_proxy(configs, proxy, json_)
        with _trials(quiet or json_) as trial:
            return _show(tune_on_proxy(configs, overrides, folder, machine, trial), names, json_)
    if proxy_set:
        raise ConfigError("--proxy-set needs proxy data; name those with --proxy")
    if score not in ("private", "public"):
        raise ConfigError(f'score={score!r} must be "private" or "public"')
    data = load_data(configs, machine)
    search = make_search(
        configs, data, TrialCount(eta, trials), "private" if score == "private" else "public", epsilon, score_scale
    )
    if dry_run and json_:
        return print_json(
            {
                "configurations": len(search.candidates),
                "expected_trials": search.count.mean,
                "eta": search.count.shape,
                "epsilon": search.epsilon,
                "delta": search.delta,
                "trial_epsilon": search.trial_epsilon,
                "validation_clients": data.validation_clients,
                "score_noise": search.score_noise,
            }
        )
    if dry_run or not (quiet or json_):
        _explain(search, data.validation_clients)
    if dry_run:
        return None
    with _trials(quiet or json_) as trial:
        tuned = run_search(search, folder, machine, data, trial)
    return _show(tuned, names, json_)


@contextmanager
def _trials(quiet: bool) -> Iterator[Callable[[Config, int], RunProgress]]:
    """Show each trial's progress. The display is local only: how many trials there are must stay secret."""
    with one_by_one(quiet) as start:
        yield lambda config, index: start(config.rounds, f"trial {index + 1} (local only)")


def _explain_proxy(configs: list[Config], proxy: str, as_json: bool) -> None:
    """Explain what choosing on proxy data costs: one ordinary run."""
    costs = sorted({float(config.epsilon) for config in configs if config.epsilon is not None})
    if as_json:
        return print_json({"configurations": len(configs), "proxy": proxy, "epsilon": costs})
    cost = " or ".join(f"{value:g}" for value in costs) or "what its noise_multiplier gives"
    line = (
        f"{len(configs)} configurations, each once on {proxy}, which is declared to be public: no cost; then the best "
        f"of them once on the private data: ε = {cost}"
    )
    return Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def _explain(search: Search, clients: int) -> None:
    """Explain what the search will cost, before it starts."""
    lines = [
        f"{len(search.candidates)} configurations, {search.count.mean:g} trials expected, eta = {search.count.shape:g}",
        f"ε = {in_short(search.epsilon)} at δ = {search.delta:.3g} for the whole search (RDP); "
        f"one trial alone {in_short(search.trial_epsilon)}",
    ]
    config = search.candidates[0]
    metric = metrics_of(config.task, config.metrics)[0].key
    what = "accuracy" if metric == "accuracy" else f"score by {measure_of(metric).words}, 0 to 100,"
    if search.score_noise:
        noise = 50 * search.score_noise / clients
        lines.append(f"scores: mean {what} of {clients} validation clients, ± {noise:.2g} points of noise")
    else:
        lines.append(f"scores: mean {what} of {clients} validation clients, who are NOT protected")
    for line in lines:
        Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def _show(tuned: Tuned, names: list[str], as_json: bool) -> None:
    """Print the winner: its name in the file, what it is, and on proxy data, which are public, all scores."""
    winner = None if tuned.chosen is None else names[tuned.chosen]
    if as_json:
        print_json({"run": str(tuned.path), "winner": winner, **tuned.summary})
    elif tuned.record is None:
        typer.echo(f"{NOTHING}; the search still cost epsilon = {in_short(tuned.epsilon)}")
    else:
        console = Console(soft_wrap=True)
        for score, name in sorted(zip(tuned.scores, names, strict=True), reverse=True) if tuned.scores else ():
            console.print(f"{score:.4f} on proxy data: {name}", highlight=False, markup=False)
        console.print(f"Winner: {winner}, one of {len(names)} configurations", highlight=False, markup=False)
        print_summary(tuned.path, tuned.record, Console())
