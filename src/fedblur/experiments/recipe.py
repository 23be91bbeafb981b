"""`recipe = "best"`: settings for the most accurate model that an epsilon buys, before anyone trains.

In: what is public, the shape of a sample, the number of classes, N, epsilon and delta. Out: settings, each with its
reason. No data are looked at. The rule is documented in docs/recipe.md; all of its numbers are in `recipe_presets.py`.
A setting that the user gives wins, and the rest of the rule follows it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedblur.core.config import Config, from_dict, spelled_out
from fedblur.core.errors import ConfigError, PrivacyError, nearest
from fedblur.core.registry import build
from fedblur.data.dataset import Dataset, Form
from fedblur.data.partition import Natural
from fedblur.experiments.recipe_presets import (
    CLIP_NORM,
    DEFAULT_EPSILON,
    ENOUGH_OF_LIMIT,
    FEWEST_ROUNDS,
    LARGEST_COHORT,
    MOST_WORK,
    SAMPLE_RATES,
    family,
)
from fedblur.learning.models import make_model
from fedblur.learning.module_function import Layout
from fedblur.privacy.planning import Setting, plan_of, signal_to_noise


@dataclass(frozen=True)
class Choice:
    """One setting and why."""

    key: str
    value: Any
    reason: str
    given: bool = False  # by the user

    def __str__(self) -> str:
        return f"{self.key} = {_written(self.value)}: {self.reason}"


@dataclass(frozen=True)
class Recipe:
    """All settings of a recipe, in the order in which they were chosen."""

    choices: tuple[Choice, ...]
    clients: int  # N
    parameters: int  # d
    signal_to_noise: float  # R

    @property
    def settings(self) -> dict[str, Any]:
        return {choice.key: choice.value for choice in self.choices}

    @property
    def lines(self) -> list[str]:
        """Every choice in words, one line each."""
        return [str(choice) for choice in self.choices]


def configure(table: Mapping[str, Any]) -> Config:
    """Return the configuration of a table as a user writes it: its `recipe`, if it names one, fills in the rest."""
    spelled = spelled_out(table)
    rest = {key: value for key, value in spelled.items() if key != "recipe"}
    return from_dict(rest if spelled.get("recipe") is None else rest | choose(spelled).settings)


def choose(table: Mapping[str, Any], form: Form | None = None) -> Recipe:
    """Return what the table's recipe chooses; `form`: shape and classes, if they are not the data set's."""
    name = table.get("recipe")
    if name != "best":
        raise ConfigError(f"recipe {name!r} is unknown: {nearest(str(name), ['best'])}")
    return _Rule(table, form).recipe()


class _Rule:
    """The rule at work on one table. Steps are in order: each may use what was chosen before it."""

    def __init__(self, table: Mapping[str, Any], form: Form | None) -> None:
        self.given = table
        data = build("dataset", table.get("dataset", "digits"))
        known: Form | None = form or data.form()
        if known is None:
            raise ConfigError(
                f"recipe='best' must know the shape of {data.part_name} before it is loaded; add form() to it"
            )
        self.shape, self.classes = known
        clients = table.get("clients")
        if clients is None:  # N is public: as given, or as the data set cuts its clients
            clients = data.default_clients
            partition = build("partition", table.get("partition") or data.default_partition)
            if clients is None or (isinstance(data, Dataset) and isinstance(partition, Natural)):
                raise ConfigError(
                    f"recipe='best' must know N before {data.part_name} is loaded; "
                    "set clients (fedblur data show prints it)"
                )
        self.clients = int(clients)
        self.family = family(self.shape, table.get("model"), form is None and data.text)
        self.choices: dict[str, Choice] = {}

    def recipe(self) -> Recipe:
        kind = self.family
        local = {"steps": kind.local_steps, "batch_size": kind.batch_size, "learning_rate": kind.local_rate}
        words = f"{kind.training}; a batch is all that a client has, up to its size"
        steps = int(self._choose("local", local, words).get("steps", kind.local_steps))

        # p and T: as much of the largest possible R as the work allows.
        cohort = self._sample_rate() * self.clients
        rounds = min(kind.rounds, max(FEWEST_ROUNDS, int(MOST_WORK / (cohort * steps))))
        why = (
            "more rounds never lower R" if rounds == kind.rounds else f"{MOST_WORK:,.0f} local steps in all are enough"
        )
        rounds = int(self._choose("rounds", rounds, f"T; {why}, and a round has {cohort:,.0f} clients"))
        self._choose("clip_norm", CLIP_NORM, "S; only S times the server's step matters where all updates are clipped")
        size, ratio = self._model(rounds)
        self._choose("method", [dict(part) for part in kind.method], kind.views)

        # η_g: the step S·η_g is the table's; shorter for more rounds, and where noise would lead it.
        clip = float(self.choices["clip_norm"].value)
        held = min(1.0, ratio / kind.full_signal)
        scale = 1.0 if math.isinf(clip) else CLIP_NORM / clip
        rate = float(f"{kind.server_rate * math.sqrt(kind.rounds / rounds) * scale * held:.3g}")
        words = "momentum averages the noise of rounds, and " if kind.momentum else ""
        less = f"; {100 * held:.0f} % of the full step, since R is {ratio:.1f}" if held < 1 else ""
        server = {"name": "momentum", "momentum": kind.momentum} if kind.momentum else {"name": "sgd"}
        server |= {"schedule": kind.schedule, "learning_rate": rate}
        self._choose("server", server, f"{words}the schedule ends at rest{less}")
        self._choose("averaging", None, "under a falling step the last iterate is an average already")
        self._choose("accountant", "pld", "needs the least noise (RDP: 6 to 13 % more)")
        return Recipe(tuple(self.choices.values()), self.clients, size, ratio)

    def _choose(self, key: str, value: Any, reason: str) -> Any:
        """Take the user's value if there is one. A table without a name changes only some settings of a part."""
        if key not in self.given:
            self.choices[key] = Choice(key, value, reason)
        else:
            mine = self.given[key]
            part = isinstance(mine, Mapping) and "name" not in mine and isinstance(value, Mapping)
            kept = f" (the recipe alone: {_written(value)})" if mine != value else ", as the recipe has it"
            self.choices[key] = Choice(key, {**value, **mine} if part else mine, f"given by you{kept}", given=True)
        return self.choices[key].value

    def _sample_rate(self) -> float:
        """Choose p: the smallest rate whose R is most of what all clients in every round would give."""
        rates = [p for p in SAMPLE_RATES if p * self.clients <= LARGEST_COHORT]
        rate = LARGEST_COHORT / self.clients
        reason = f"p; cohorts of {LARGEST_COHORT:,.0f}, the largest of this recipe"
        if rates:
            rounds = int(self.given.get("rounds", self.family.rounds))
            limit = self._ratio(1.0, rounds)
            rate = next((p for p in rates if self._ratio(p, rounds) >= ENOUGH_OF_LIMIT * limit), rates[-1])
            share = 1.0 if math.isinf(limit) else self._ratio(rate, rounds) / limit
            reason = f"p; R is {100 * share:.0f} % of what all clients in every round would give"
        return float(self._choose("sample_rate", rate, reason))

    def _ratio(self, rate: float, rounds: int) -> float:
        """Return R for one parameter: R of d parameters is this over √d, as Gaussian noise does not depend on d."""
        table = self.given
        epsilon, sigma = table.get("epsilon"), table.get("noise_multiplier")
        if epsilon is None and sigma is None:
            epsilon = DEFAULT_EPSILON
        sampling = build("sampling", table.get("sampling", "poisson")).part_name
        setting = Setting(self.clients, rate, rounds, epsilon, sigma, table.get("delta", "1/N"), sampling, 1)
        try:
            return signal_to_noise(plan_of(setting, table.get("accountant", "pld")), 1)
        except PrivacyError:  # an epsilon that is met without noise; a run says so, or why not
            return math.inf

    def _model(self, rounds: int) -> tuple[int, float]:
        """Choose the largest model that leaves enough signal: its size and R."""
        unit = self._ratio(float(self.choices["sample_rate"].value), rounds)  # R of one parameter
        sizes = [self._size(model) for model in self.family.models]
        fits = [index for index, size in enumerate(sizes) if unit / math.sqrt(size) >= self.family.enough_signal]
        index = fits[0] if fits else len(sizes) - 1
        ratio = unit / math.sqrt(sizes[index])
        bar = f"R = {ratio:.1f}, {'at least' if fits else 'below'} {self.family.enough_signal:g}"
        reason = f"for {self.family.what}, {sizes[index]:,} parameters; {bar}"
        if index:
            larger = unit / math.sqrt(sizes[index - 1])
            reason += f" (the next larger: {sizes[index - 1]:,}, R = {larger:.1f})"
        size = self._size(self._choose("model", self.family.models[index], reason))
        return size, unit / math.sqrt(size)

    def _size(self, model: Any) -> int:
        return parameters_of(build("model", model), self.shape, self.classes)


@functools.cache  # a table asks again and again
def parameters_of(model: Any, shape: tuple[int, ...], classes: int) -> int:
    """Return d, by building the model once."""
    return Layout.of(make_model(model, shape, classes, seed=0)).total


def _written(value: Any) -> str:
    """Write a value as a configuration file has it."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_written(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"
