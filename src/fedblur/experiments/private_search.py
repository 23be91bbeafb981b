"""Choosing settings without looking at people for free: the law of a search, and its cost. `search_runner.py` runs it.

A search draws K from a law of `private_selection.py`, runs K trials of configurations picked at random, and releases
the one with the best score. Who is protected, and by what:

    clients who train           one trial costs them its training; its score is computed from the trained model and
                                from other people's data, so it tells nothing more about them
    clients who only validate   score = "private": one trial costs them its noisy score, and its training nothing
                                score = "public": they are NOT protected, the choice may depend on each of them

A client has one role, so a trial costs it the one or the other, and the search is an event of the worse of the two.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedblur.core.config import Config, canonical, config_hash, to_dict
from fedblur.core.errors import ConfigError
from fedblur.data.population import Federation
from fedblur.learning.metrics import Metric, metrics_of
from fedblur.learning.models import make_model
from fedblur.learning.personal import shared_layout
from fedblur.privacy.accounting import calibrate, epsilon, parse_delta
from fedblur.privacy.claim import Claim, Selection
from fedblur.privacy.events import Gaussian, PrivateSelection, SelfComposed
from fedblur.privacy.private_selection import TrialCount
from fedblur.privacy.root_finding import find_root
from fedblur.training.setup import plan_for, width_of

Scoring = Literal["private", "public"]
HALF = 0.5  # a validation client adds its accuracy less a half to the score: at most this, either way
_SAME = ("dataset", "partition", "clients", "validation_share", "data_seed", "delta", "seed", "population")
_LEAST_SHARE = 0.02  # of the total, for one trial
_TOLERANCE = 1e-3  # of the trials' epsilon, where the total is given


@dataclass(frozen=True)
class Search:
    """A search that is ready to start, and what it will cost."""

    candidates: tuple[Config, ...]
    count: TrialCount
    event: PrivateSelection
    delta: float
    score_noise: float  # noise multiplier of a score, in units of HALF; 0: scores are not noisy
    score_scale: float = 1.0  # of a metric without a worst value: the distance from the best that scores a half

    @property
    def epsilon(self) -> float:
        """Return the epsilon of the whole search, the released model included."""
        return epsilon(self.event, 1, self.delta, "rdp")

    @property
    def trial_epsilon(self) -> float:
        """Return what one trial alone would cost: the most over the candidates, by the same accountant."""
        return max(epsilon(trial, 1, self.delta, "rdp") for trial in self.event.trials)

    @property
    def key(self) -> str:
        """Twelve digits that change with the candidates and with what the search costs."""
        keys = [config_hash(config) for config in self.candidates]
        scale = [] if self.score_scale == 1 else [self.score_scale]
        text = canonical([keys, self.count.shape, self.count.mean, self.score_noise, *scale])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def score(self, metric: Metric, figure: float) -> float:
        """Return one client's figure as a score in [0, 1]: what it can move the sum by does not depend on its data.

        A metric between two bounds is stretched to [0, 1]: accuracy is its own score. Without a worst value, a figure
        that is `score_scale` away from the best scores a half. The scale is public, never read off private data.
        """
        if not math.isfinite(metric.worst):
            figure = metric.best + (figure - metric.best) / self.score_scale
        score = metric.score(figure)
        return min(1.0, max(0.0, score)) if score == score else 0.0


def candidates(configs: Iterable[Config]) -> tuple[Config, ...]:
    """Return the configurations to choose from, each once. All must be about the same people."""
    tested = [replace(config, evaluate="test") for config in configs]
    chosen = tuple({config_hash(config): config for config in tested}.values())
    if len(chosen) < 2:
        raise ConfigError("a search needs at least two configurations; add [[rows]] or [axes] to the file")
    tables = [json.loads(canonical(to_dict(config))) for config in chosen]
    for key in _SAME:
        if any(table[key] != tables[0][key] for table in tables):
            hint = "drop seed: trials draw their own randomness" if key == "seed" else f"give all the same {key}"
            raise ConfigError(
                f"{key} differs between configurations; a search compares runs on the same clients; {hint}"
            )
    if any(config.voting is not None for config in chosen):
        raise ConfigError("a search compares runs of rounds; leave ae-dpfl and knn-dpfl out")
    if chosen[0].validation_share == 0:
        raise ConfigError("validation_share=0 leaves no clients to score trials on; set validation_share=0.1")
    return chosen


def make_search(
    configs: Iterable[Config], data: Federation, count: TrialCount, scoring: Scoring, total: float | None = None,
    scale: float = 1.0,
) -> Search:  # fmt: skip
    """Make the search over these configurations; with `total`, trials get the epsilon that keeps all within it."""
    chosen = candidates(configs)
    _demand_scores(chosen, scale)
    if total is None:
        return replace(_search(chosen, data, count, scoring), score_scale=scale)
    if not 0 < total < math.inf:
        raise ConfigError(f"epsilon={total} must be above 0 and finite: it is what the whole search may cost")

    def search(log_share: float) -> Search:
        each = total * math.exp(log_share)
        made = [replace(c, epsilon=each, noise_multiplier=None) for c in chosen]
        return replace(_search(made, data, count, scoring), score_scale=scale)

    if search(math.log(_LEAST_SHARE)).epsilon > total:
        raise ConfigError(
            f"epsilon={total:g} is too little for the whole search: a trial would get under {_LEAST_SHARE:g} of it; "
            "raise it, or expect fewer trials"
        )
    share = find_root(lambda x: math.log(search(x).epsilon / total), math.log(_LEAST_SHARE), 0.0, xtol=_TOLERANCE)
    while (found := search(share)).epsilon > total:
        share -= _TOLERANCE
    return found


def _demand_scores(chosen: Iterable[Config], scale: float) -> None:
    """Refuse metrics that have no bounded form, and a scale that changes nothing."""
    metrics = [metrics_of(config.task, config.metrics)[0] for config in chosen]
    unbounded = next((metric.key for metric in metrics if not math.isfinite(metric.best)), None)
    if unbounded is not None:
        raise ConfigError(
            f"metric {unbounded!r} has no best value, so a client's score has no bound; name another first"
        )
    if len({metric.key for metric in metrics}) > 1:
        keys = " and ".join(sorted({metric.key for metric in metrics}))
        raise ConfigError(f"configurations are about different metrics ({keys}); their scores cannot be compared")
    if not 0 < scale < math.inf:
        raise ConfigError(f"score_scale={scale} must be above 0 and finite")
    if scale != 1 and math.isfinite(metrics[0].worst):
        raise ConfigError(f"score_scale={scale:g} does not apply to {metrics[0].key}, which is bounded; leave it out")


def _search(chosen: Iterable[Config], data: Federation, count: TrialCount, scoring: Scoring) -> Search:
    configs = tuple(chosen)
    if not data.validation_clients:
        share = configs[0].validation_share
        raise ConfigError(f"validation_share={share:g} gives no clients to score trials on here; raise it")
    delta = parse_delta(configs[0].delta, data.train.clients)
    plans = [plan_for(config, data.train.clients, _sent(config, data)) for config in configs]
    training = [SelfComposed(plan.event(), plan.rounds) for plan in plans]  # all that the rounds of one trial release
    costs = [epsilon(trial, 1, delta, "rdp") for trial in training]
    if math.isinf(max(costs)):
        raise ConfigError("a configuration without noise (epsilon=inf) makes the whole search public; leave it out")
    noise = calibrate(Gaussian, 1, min(costs), delta, "rdp") if scoring == "private" else 0.0
    trials = tuple(dict.fromkeys([*training, *([Gaussian(noise)] if noise else [])]))
    return Search(configs, count, PrivateSelection(trials, count.shape, count.mean), delta, noise)


def _sent(config: Config, data: Federation) -> int:
    """Return d, the parameters that a trial's clients send: a discrete mechanism's event depends on it."""
    module = make_model(config.model, data.train.shape, width_of(config.task, data), seed=0)
    return shared_layout(module, config.personal).total


def winners_claim(search: Search, data: Federation, trial: Claim, ledger: dict[str, Any], score: float) -> Claim:
    """Return what a released winner claims: for the whole search, not for the trial that it was."""
    law = "Poisson" if search.count.poisson else f"truncated negative binomial, eta = {search.count.shape:g}"
    held = f"{data.validation_clients} validation clients"
    how = "noisy and accounted" if search.score_noise else f"not noisy: the {held} are NOT protected"
    cost = search.epsilon - search.trial_epsilon
    return replace(
        trial,
        epsilon=search.epsilon,
        accountant="rdp",
        releases=1,
        ledger=ledger,
        tuned="private selection",
        tuning=f"chosen privately among {len(search.candidates)} configurations by a random number of trials "
        f"({law}, {search.count.mean:g} expected, Rényi accounting); scores on {held}, {how}. One trial alone: "
        f"epsilon = {search.trial_epsilon:.3g}; the choice costs {cost:.3g} more. What was measured on "
        "test data is for the reader; the guarantee does not cover it",
        selection=Selection(
            search=search.key,
            law=law,
            expected_trials=search.count.mean,
            candidates=len(search.candidates),
            epsilon_of_one_trial=search.trial_epsilon,
            epsilon_of_the_choice=cost,
            score_noise_std=HALF * search.score_noise / data.validation_clients,
            score_clients=data.validation_clients,
            score_clients_protected=bool(search.score_noise),
            score=score,
        ),
    )
