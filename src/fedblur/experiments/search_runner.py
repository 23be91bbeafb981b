"""A search that is run (`private_search.py`). In: candidates. Out: a run folder with the winner, and nothing else.

The search is in the ledger before its first trial begins, and the ledger is closed when the winner is out: a closed one
never releases again. How many trials there are, their configurations, scores and
models are local only: they lie in a folder of their own, OUT-local-only, which is removed when the winner has been
released. A search that was stopped continues with the trials that were drawn; a trial that was cut short starts again.

A trial that diverges is a trial like any other, with the worst score: to skip it, or to stop there, would change the
law of the number of trials, and tell about data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedblur.core.config import Config, canonical, config_hash, to_dict
from fedblur.core.errors import ConfigError, DivergedError, PrivacyError, RunError
from fedblur.core.files import (
    demand_digest,
    make_folder,
    read_json_if_there,
    remove_folder,
    with_digest,
    write_atomically,
)
from fedblur.core.rng import Rng, make_rng
from fedblur.data.dataset import Generated
from fedblur.data.population import Federation
from fedblur.engines.distributed import demand_one_process
from fedblur.experiments.private_search import HALF, Search, candidates, winners_claim
from fedblur.experiments.recipe import configure
from fedblur.learning.evaluation import figure_by_client
from fedblur.learning.metrics import metrics_of
from fedblur.learning.module_function import Layout, as_function, initial_vector
from fedblur.privacy.claim import Claim, to_json
from fedblur.privacy.ledger import Budget, Chain, Ledger, cut_release, randomness_of, read_spends
from fedblur.privacy.ledger_file import close_ledger, open_ledger, read_closing
from fedblur.privacy.mechanisms import rounded_gaussian
from fedblur.privacy.population_account import account_of
from fedblur.privacy.private_selection import WORDS
from fedblur.training.loop import Run, Watcher, train
from fedblur.training.machine import Machine
from fedblur.training.run_folder import NOTHING, RunFolder, RunSummary
from fedblur.training.setup import load

TrialWatcher = Callable[[Config, int], Watcher | None]
_STEP = 2.0**-20  # scores are summed, and their noise is drawn, in multiples of this


@dataclass(frozen=True)
class Tuned:
    """The release of a search."""

    path: Path
    epsilon: float  # what it cost
    delta: float
    record: RunSummary | None  # of the winner; None: no trial was drawn
    chosen: int | None = None  # the winner's place among the candidates, which its configuration shows too
    scores: tuple[float, ...] = ()  # of each candidate on proxy data; a private search tells none but the winner's

    @property
    def summary(self) -> dict[str, Any]:
        """Return what summary.json holds; `record` is the same with types."""
        nothing = {"status": NOTHING, "privacy": {"epsilon": self.epsilon, "delta": self.delta}}
        return nothing if self.record is None else to_json(self.record)


def run_search(
    search: Search, out: Path, machine: Machine, data: Federation, watch: TrialWatcher = lambda config, index: None
) -> Tuned:
    """Draw the trials, run them, release the best."""
    demand_one_process("a search")
    folder, local = RunFolder(out), out.with_name(out.name + "-local-only")
    with folder.held():
        _demand_unreleased(folder, local)
        rng = make_rng(search.candidates[0].seed)
        picks = _draw(search, local, rng)
        ledger = _pay(search, out, data)
        trials = _Trials(search, local, replace(machine, paid_by=ledger.path), data, rng, watch)
        scores = [trials.run(index, pick) for index, pick in enumerate(picks)]
        record = chosen = None
        if scores:
            best = max(range(len(scores)), key=scores.__getitem__)  # the first of equals: trials are exchangeable
            winner = RunFolder(local / f"trial-{best}")
            trial = _whole(winner)
            claimed = replace(trial.privacy, population=ledger.population())
            stated = winners_claim(search, data, claimed, ledger.anchor(), scores[best])
            record, chosen = _release(trial, winner, folder, stated), picks[best]
        tuned = Tuned(out, search.epsilon, search.delta, record, chosen)
        if record is None:
            write_atomically(folder.summary, (canonical(tuned.summary) + "\n").encode())
            close_ledger(folder.ledger, folder.released())
        remove_folder(local)
        return tuned


def _demand_unreleased(folder: RunFolder, local: Path) -> None:
    """Refuse a search that has released its winner, or whose trials are gone: new ones would not be paid for."""
    if not folder.ledger.exists():
        if any(path.exists() for path in (folder.config, folder.model, folder.summary)):
            raise RunError(
                f"{folder.path} holds a run or a winner and no ledger; restore ledger.jsonl from a copy, or choose "
                "another --out (on these clients it adds to the cost)"
            )
        return
    chain = Chain(folder.ledger)
    paid = bool(read_spends(chain.read()) or cut_release(chain))
    begun = (local / "drawn.json").exists()
    # One that was killed between summary and closing line releases the same winner again: its scores are kept.
    if read_closing(chain) is not None or (folder.summary.exists() and not begun):
        remove_folder(local)  # a kill came between the release and this
        raise RunError(
            f"{folder.path} holds the winner of a search; choose another --out (on these clients it adds to the cost)"
        )
    if paid and not begun:
        raise RunError(
            f"{folder.path} holds a search that was paid for, and {local}, which held its trials, is gone: it cannot "
            "continue; choose another --out (on these clients it adds to the cost)"
        )


def _draw(search: Search, local: Path, rng: Rng) -> list[int]:
    """Draw each trial's configuration, once: a search that is stopped cannot draw again."""
    path = local / "drawn.json"
    drawn = read_json_if_there(path, "choose another --out (on these clients it adds to the cost)")
    if drawn is not None:
        demand_digest(drawn, path, "choose another --out (on these clients it adds to the cost)")
        if drawn.get("search") != search.key:
            raise RunError(f"{local} holds another search that was not finished; finish it, or choose another --out")
        picks = drawn.get("picks")
        if not isinstance(picks, list) or not all(pick in range(len(search.candidates)) for pick in picks):
            raise RunError(
                f"{path} does not list the trials; choose another --out (on these clients it adds to the cost)"
            )
        return picks
    count = search.count.draw(rng.child("count").keystream().lane(0).words(WORDS))
    uniforms = rng.child("picks").uniform(count)
    picks = [int(u * len(search.candidates)) for u in uniforms]
    make_folder(local, private=True)
    write_atomically(
        path,
        json.dumps(with_digest({"local_only": True, "search": search.key, "picks": picks})).encode(),
        private=True,
    )
    return picks


def _pay(search: Search, out: Path, data: Federation) -> Ledger:
    """Write the ledger's row for all trials together, on disk before the first."""
    make_folder(out)
    budget, randomness = Budget(search.epsilon, search.delta, "rdp", rounds=1), randomness_of(search.candidates[0].seed)
    account = account_of(search.candidates[0].population, data, search.event, budget, "search", randomness)
    if account is not None and account.budgeted and not search.score_noise:
        raise PrivacyError(
            f"score='public' does not protect validation clients, and population {account.population.name} has a "
            "budget; use score='private'"
        )
    ledger = Ledger(RunFolder(out).ledger, budget, search.key, randomness, account=account)
    ledger.count_torn(search.event)  # it was this search's own row: its trials had not begun
    if not ledger.spends():
        ledger.demand_room(1, search.event, replay=False)
        ledger.spend(1, search.event, replay=False)
    ledger.settle()  # one release, and no other will follow
    return ledger


@dataclass(frozen=True)
class _Trials:
    """The trials of a search: independent real runs, each with its score."""

    search: Search
    local: Path
    machine: Machine
    data: Federation
    rng: Rng
    watch: TrialWatcher

    def run(self, index: int, pick: int) -> float:
        """Run one trial; its findings stay in its folder."""
        folder, rng = self.local / f"trial-{index}", self.rng.child("trial", index)
        path = folder / "score.json"
        kept = read_json_if_there(path, "delete it to run the trial again")
        if kept is not None:
            demand_digest(kept, path, "delete it to run the trial again")
            if not isinstance(kept.get("score"), int | float):
                raise RunError(f"{path} holds no score; delete it to run the trial again")
            return float(kept["score"])
        remove_folder(folder)
        config = self.search.candidates[pick]
        if config.seed is not None:
            config = replace(config, seed=rng.child("training").seed())
        run = _train(config, folder, self.machine, self.watch(config, index))
        score = self.score(run, config, rng.child("score"))
        write_atomically(path, json.dumps(with_digest({"local_only": True, "score": score})).encode(), private=True)
        return score

    def score(self, run: Run | None, config: Config, rng: Rng) -> float:
        """Mean score over validation clients, each counting the same; with noise, a Gaussian release about them.

        A client's score a_c is its headline figure in [0, 1] (`Search.score`): of a classifier its accuracy.
        Σ (a_c - ½) moves by at most ½ when a client is added or removed; it is divided by a constant.

            a model that gives NaN       its predictions are wrong, whatever the labels are
            a run that diverged (None)   every score is 0
            a score beyond [0, 1]        0 or 1; NaN, of a client without samples: 0
        """
        samples, sizes, noise = self.data.validation, self.data.validation_sizes, self.search.score_noise
        assert samples is not None
        assert sizes is not None
        each = torch.zeros(len(sizes), dtype=torch.float64)
        if run is not None:
            theta = Layout.of(run.module).unflatten(initial_vector(run.module))
            metric = metrics_of(config.task, config.metrics)[0]
            figures = figure_by_client(
                as_function(run.module), theta, samples, sizes, config.task, metric, config.method, config.test_views
            )
            each = torch.tensor([self.search.score(metric, figure) for figure in figures.tolist()], dtype=torch.float64)
        each = each.nan_to_num(nan=0.0).clamp(0.0, 1.0)  # whatever was computed: what the noise is sized for
        whole = ((each - HALF) / _STEP).trunc().long().sum()  # each at most ½, and exact from here on
        blur = rounded_gaussian.draw(HALF * noise / _STEP * (1 + 2.0**-50), 1, rng.keystream())[0]
        return (int(whole) + int(blur)) * _STEP / self.data.validation_clients + HALF


def _train(config: Config, folder: Path, machine: Machine, watch: Watcher | None) -> Run | None:
    """Run a trial; None if it diverged. (A run that protects people never stops for that: it continues.)"""
    try:
        return train(config, out=folder, machine=machine, watch=watch)
    except DivergedError:
        return None


def _whole(trial: RunFolder) -> RunSummary:
    """Return the summary of a trial that is as its ledger was closed; it may have waited for long to be released."""
    summary, closing = trial.read_summary(), None
    if trial.ledger.exists():
        closing = read_closing(open_ledger(trial.ledger))
    if summary is None or closing != trial.released():
        raise RunError(f"{trial.path} was damaged after it was scored; delete that folder to run the trial again")
    return summary


def _release(trial: RunSummary, winner: RunFolder, out: RunFolder, stated: Claim) -> RunSummary:
    """Write the winner's configuration, model, summary and rounds, without what is local only."""
    # How long it took depends on how many came: no seconds.
    summary = replace(trial, privacy=stated, local_only={"clipped_share": None}, seconds=None)
    barred = ("local_only", "seconds", "epsilon")  # a trial's own epsilon is not what was spent
    rows = [{key: value for key, value in row.items() if key not in barred} for row in winner.read_rounds()]
    rows = [{**row, "stage": "the winner's training"} for row in rows]  # not releases of their own: the search is one
    write_atomically(out.config, winner.config.read_bytes())
    write_atomically(out.model, winner.model.read_bytes())
    write_atomically(out.rounds, "".join(json.dumps(row) + "\n" for row in rows).encode())
    out.write_summary(summary)  # closes the ledger
    return summary


def tune_on_proxy(
    configs: Sequence[Config],
    proxy: dict[str, Any],
    out: Path,
    machine: Machine,
    watch: TrialWatcher = lambda config, index: None,
) -> Tuned:
    """Run every candidate on data that are not private, then the best of them on the private data, once.

    `proxy` is what differs there: a data set at least. Its results are public, and kept in OUT-proxy.
    """
    demand_one_process("a search")
    chosen, trials, scores = candidates(configs), [], []
    for config in chosen:
        trial = configure(to_dict(config) | {"partition": None, "evaluate": "validation", "population": None} | proxy)
        drawn = isinstance(config.dataset, Generated) and trial.dataset != config.dataset  # nobody's data, and others
        if trial.dataset.part_name == config.dataset.part_name and not drawn:  # other settings are of the same people
            raise ConfigError(
                f"proxy={config.dataset.part_name!r} is the private data set itself; trials on it are not free"
            )
        trials.append(trial)
    for index, trial in enumerate(trials):
        folder = RunFolder(out.with_name(out.name + "-proxy") / config_hash(trial))
        if not _ended(folder):
            remove_folder(folder.path)
            _train(trial, folder.path, machine, watch(trial, index))
        summary = folder.read_summary()
        metric = metrics_of(trial.task, trial.metrics)[0]
        scores.append(metric.score(summary.headline[1]) if summary and summary.complete else 0.0)
    best = max(range(len(scores)), key=scores.__getitem__)
    run = train(chosen[best], out=out, machine=machine, watch=watch(chosen[best], len(scores)))
    name = trials[0].dataset.part_name
    key = metric.key if metric.key == "accuracy" else f"score of {metric.key}"
    results = [{key: score, "config": to_dict(trial)} for score, trial in zip(scores, trials, strict=True)]
    write_atomically(out / "proxy.json", (canonical(results) + "\n").encode())
    words = f"chosen among {len(chosen)} configurations on {name}, which is declared to be public; this cost no privacy"
    record = replace(run.record, privacy=replace(run.record.privacy, tuned="proxy data", tuning=words))
    RunFolder(out).write_summary(record)
    return Tuned(out, run.epsilon, record.privacy.delta, record, best, tuple(scores))


def _ended(folder: RunFolder) -> bool:
    """Return whether a run on proxy data ended, with all that belongs to it: a kill may come before the last line."""
    if not folder.complete or not folder.ledger.exists():
        return False
    chain = Chain(folder.ledger)
    chain.read()
    return read_closing(chain) is not None


def load_data(configs: Sequence[Config], machine: Machine) -> Federation:
    """Load the clients that all candidates are about."""
    return load(candidates(configs)[0], machine)
