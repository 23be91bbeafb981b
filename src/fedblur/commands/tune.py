"""`fedblur tune FILE`: choose between configurations, privately or on proxy data, and release the winner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from fedblur.commands.names import complete
from fedblur.commands.run import DataDir, Device, EngineOption, Json, Plugin, PrecisionOption, Quiet, make_machine
from fedblur.commands.terminal import print_json
from fedblur.config import Config, apply_overrides
from fedblur.errors import ConfigError
from fedblur.experiments import read_spec
from fedblur.report.progress import RunProgress
from fedblur.report.rounding import in_short
from fedblur.report.text import print_summary
from fedblur.selection import TrialCount
from fedblur.trials import NOTHING, Tuned, load_data, run_search, tune_on_proxy
from fedblur.tuning import Search, make_search

_TRIALS, _ETA, _SCORE = 10.0, 0.0, "private"


def tune(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The grid: [base], [axes], [[rows]], as for a table.")],
    out: Annotated[Path | None, typer.Option(help="Where the winner goes (default: runs/FILE-NAME-tuned).")] = None,
    trials: Annotated[
        float, typer.Option(help="How many trials to expect; their number is random, and secret.")
    ] = _TRIALS,
    eta: Annotated[float, typer.Option(help="Law of that number: 0 logarithmic, 1 geometric, inf Poisson.")] = _ETA,
    epsilon: Annotated[float | None, typer.Option(help="Of the whole search; trials then get less each.")] = None,
    score: Annotated[str, typer.Option(help='"private": validation clients are protected too; or "public".')] = _SCORE,
    proxy: Annotated[
        str | None,
        typer.Option(
            help="Choose on this data set instead, which is not private: free.", autocompletion=complete("dataset")
        ),
    ] = None,
    proxy_set: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="What else differs there.")] = None,
    plugin: Plugin = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would cost.")] = False,
    data_dir: DataDir = None,
    device: Device = "auto",
    engine: EngineOption = "auto",
    precision: PrecisionOption = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose between configurations at a known cost in privacy, and release only the winner.

    Trials are real runs. By default a random number of them, of configurations picked at random, is scored on
    validation clients with noise, and the total epsilon covers the choice. With --proxy, choosing costs nothing.
    """
    configs = [cell.config for cell in read_spec(path).cells]
    folder = out or Path("runs") / f"{path.stem}-tuned"
    machine = make_machine(device, engine, data_dir, precision)
    if proxy is not None:
        _demand_private_only(epsilon, trials, eta, score)
        overrides = apply_overrides({"dataset": proxy}, proxy_set or [])
        if dry_run:
            return _explain_proxy(configs, proxy, json_)
        with _Watch(quiet or json_) as watch:
            tuned = tune_on_proxy(configs, overrides, folder, machine, watch.trial)
        return _show(tuned, json_)
    if proxy_set:
        raise ConfigError("--proxy-set says what differs on proxy data; name those with --proxy")
    data = load_data(configs, machine)
    search = make_search(configs, data, TrialCount(eta, trials), _scoring(score), epsilon)
    if dry_run and json_:
        return print_json(_cost(search, data.validation_clients))
    if dry_run or not (quiet or json_):
        _explain(search, data.validation_clients)
    if dry_run:
        return None
    with _Watch(quiet or json_) as watch:
        tuned = run_search(search, folder, machine, data, watch.trial)
    return _show(tuned, json_)


def _demand_private_only(epsilon: float | None, trials: float, eta: float, score: str) -> None:
    """Options of a private search do nothing on proxy data, and must not look as if they did."""
    given = {"--epsilon": epsilon is not None, "--trials": trials != _TRIALS, "--eta": eta != _ETA}
    given |= {"--score": score != _SCORE}
    unused = next((name for name, is_given in given.items() if is_given), None)
    if unused is not None:
        raise ConfigError(
            f"{unused} is for a private search; with --proxy every configuration runs once on proxy data, and the best "
            "one on the private data with the epsilon that the file gives it"
        )


def _explain_proxy(configs: list[Config], proxy: str, as_json: bool) -> None:
    """What choosing on proxy data costs: one ordinary run."""
    costs = sorted({float(config.epsilon) for config in configs if config.epsilon is not None})
    if as_json:
        return print_json({"configurations": len(configs), "proxy": proxy, "epsilon": costs})
    cost = " or ".join(f"{value:g}" for value in costs) or "what its noise_multiplier gives"
    line = (
        f"{len(configs)} configurations, each once on {proxy}, which is declared to be public: no cost; then the best "
        f"of them once on the private data: ε = {cost}"
    )
    return Console(stderr=True).print(line, highlight=False, soft_wrap=True)


def _scoring(score: str) -> Literal["private", "public"]:
    if score == "private":
        return "private"
    if score == "public":
        return "public"
    raise ConfigError(f'score={score!r} must be "private" or "public"')


def _cost(search: Search, clients: int) -> dict[str, Any]:
    return {
        "configurations": len(search.candidates),
        "expected_trials": search.count.mean,
        "eta": search.count.shape,
        "epsilon": search.epsilon,
        "delta": search.delta,
        "trial_epsilon": search.trial_epsilon,
        "validation_clients": clients,
        "score_noise": search.score_noise,
    }


def _explain(search: Search, clients: int) -> None:
    """What the search will cost, before it starts."""
    lines = [
        f"{len(search.candidates)} configurations, {search.count.mean:g} trials expected, eta = {search.count.shape:g}",
        f"ε = {in_short(search.epsilon)} at δ = {search.delta:.3g} for the whole search (RDP); "
        f"one trial alone {in_short(search.trial_epsilon)}",
    ]
    if search.score_noise:
        noise = 50 * search.score_noise / clients
        lines.append(f"scores: mean accuracy of {clients} validation clients, ± {noise:.2g} points of noise")
    else:
        lines.append(f"scores: mean accuracy of {clients} validation clients, who are NOT protected")
    for line in lines:
        Console(stderr=True).print(line, highlight=False, soft_wrap=True)


def _show(tuned: Tuned, as_json: bool) -> None:
    if as_json:
        print_json({"run": str(tuned.path), **tuned.summary})
    elif tuned.summary["status"] == NOTHING:
        typer.echo(f"{NOTHING}; the search still cost epsilon = {in_short(tuned.summary['privacy']['epsilon'])}")
    else:
        print_summary(tuned, Console())


class _Watch:
    """A progress display for each trial. It is local only: how many there are must stay secret."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.current: RunProgress | None = None

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *unused: object) -> None:
        if self.current is not None:
            self.current.__exit__(None, None, None)

    def trial(self, config: Config, index: int) -> RunProgress:
        """The watcher of the next trial."""
        self.__exit__()
        name = f"trial {index + 1} (local only)"
        self.current = RunProgress(config.rounds, self.quiet, name, Console(stderr=True)).__enter__()
        return self.current
