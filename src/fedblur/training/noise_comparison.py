"""Kinds of noise at one epsilon: what each leaves in the models, and what it assumes of whom. No data are needed.

    independent, Poisson       fresh noise a round; cohorts are drawn by secret coins, which amplify
    independent, separated     fresh noise a round; a client's rounds are at least b apart, and nothing else is assumed
    tree, banded, blt          a round's noise takes off some of earlier rounds' noise; the same assumption
    banded, cyclic Poisson     groups that take turns, and secret coins inside the group

All have the same clients, rounds and expected cohort, so their models differ in the noise alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedblur.core.errors import ConfigError, PrivacyError
from fedblur.core.registry import build
from fedblur.privacy.accounting import Accountant, adjacency, calibrate, parse_delta
from fedblur.privacy.events import BltNoise, CyclicSampled, Event, Gaussian, PoissonSampled, ToeplitzNoise, TreeNoise
from fedblur.privacy.mechanisms.correlated import Kind
from fedblur.privacy.noise_matrices import Blt, NoiseMatrix, Toeplitz, Tree
from fedblur.training.noise_planning import optimised, server_workload

Values = NDArray[np.float64]

KINDS: tuple[Kind, ...] = ("tree", "banded", "blt")
POISSON, SEPARATED, CYCLIC = "independent, Poisson", "independent, separated", "banded, cyclic Poisson"
_INDEPENDENT = Toeplitz(())
_NOISE_SECRET = "the noise of all rounds stays secret"


@dataclass(frozen=True)
class Question:
    """The setting in which kinds of noise are compared."""

    clients: int  # N
    sample_rate: float  # p
    rounds: int  # T
    epsilon: float
    separation: int  # b: rounds from one participation of a client to its next, at least
    at_most: int = 0  # k: participations of a client; 0: as many as the separation allows
    delta: float | str = "1/N"
    server: Any = "sgd"  # whose steps say how rounds add up to models
    averaging: Any = None
    clip_norm: float = 0.1  # S
    accountant: Accountant = "pld"

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise ConfigError(f"epsilon={self.epsilon:g} leaves no noise to compare; give a finite one above 0")
        if self.rounds < 1:
            raise ConfigError(f"rounds={self.rounds} must be 1 or more")
        if not 0 < self.clip_norm < math.inf:
            raise ConfigError(f"clip_norm={self.clip_norm} must be above 0")


@dataclass(frozen=True)
class Choice:
    """One kind of noise that meets the target."""

    name: str
    noise_multiplier: float  # σ of the fresh noise of each round
    sensitivity: float | None  # of all rounds together, in clip norms; None where coins amplify
    final_noise: float  # standard deviation of each coordinate of the final model
    models_noise: float  # the same of the models of all rounds, as a root mean square
    memory: int  # models of earlier noise that the server needs at once
    mechanism: dict[str, Any]
    adjacency: str
    assumes: str
    coins: bool  # whether it rests on secret coins
    matrix: NoiseMatrix = dataclasses.field(repr=False)


@dataclass(frozen=True)
class Comparison:
    """All kinds of noise at one epsilon."""

    question: Question
    delta: float
    cohort: float  # p·N, as all of them have it
    choices: tuple[Choice, ...]
    weights: Values = dataclasses.field(repr=False)  # A [rounds, rounds]: how rounds add up to models
    notes: tuple[str, ...] = ()

    def named(self, name: str) -> Choice:
        return next(choice for choice in self.choices if choice.name == name)

    @property
    def best_without_coins(self) -> Choice:
        """Return the kind with the least noise in the final model that needs no secret coins."""
        return min((choice for choice in self.choices if not choice.coins), key=lambda choice: choice.final_noise)

    def ratios(self, name: str) -> dict[str, float]:
        """Return the noise in the final model over that of independent noise, with and without secret coins."""
        noise = self.named(name).final_noise
        return {other: noise / self.named(other).final_noise for other in (POISSON, SEPARATED)}

    def over_rounds(self, name: str, rounds: list[int]) -> Values:
        """Return the noise of the models that are published after these rounds, counted from 1."""
        choice, rows = self.named(name), self.weights[np.array(rounds) - 1]
        scale = choice.noise_multiplier * self.question.clip_norm / self.cohort
        return scale * choice.matrix.gain(rows)

    def as_dict(self, name: str) -> dict[str, Any]:
        """Return plain values, as `fedblur plan --json` prints them, about one kind of noise against the others."""
        question, choice = self.question, self.named(name)
        return {
            "clients": question.clients,
            "sample_rate": question.sample_rate,
            "rounds": question.rounds,
            "epsilon": question.epsilon,
            "delta": self.delta,
            "accountant": question.accountant,
            "expected_cohort": self.cohort,
            "clip_norm": question.clip_norm,
            "min_separation": question.separation,
            "at_most": question.at_most,
            **_plain(choice),
            "noise_in_final_model_over": self.ratios(name),
            "compared": [_plain(each) for each in self.choices],
            "recommendation": list(self.recommendation),
        }

    @property
    def recommendation(self) -> tuple[str, ...]:
        """Return what to take, and for whom, in words."""
        best, alone = self.best_without_coins, self.named(SEPARATED)
        drawn = min((choice for choice in self.choices if choice.coins), key=lambda choice: choice.final_noise)
        if best.final_noise > 0.99 * alone.final_noise:
            lines = [f"Without secret coins, take {alone.name}: correlated noise brings nothing here."]
            best = alone
        else:
            lines = [
                f"Where clients come when they can (phones, hospitals), take {best.name}: the final model has "
                f"{best.final_noise / alone.final_noise:.2f} of the noise that independent noise leaves, and nobody's "
                "coins need to be secret."
            ]
            lean = [each for each in self.choices if not each.coins and each.memory < best.memory / 2]
            near = [each for each in lean if each.final_noise < 1.25 * best.final_noise]
            if near:
                small = min(near, key=lambda each: each.final_noise)
                lines.append(
                    f"{small.name} has {small.final_noise / best.final_noise:.2f} times that noise; of vectors of the "
                    f"model's size, the server keeps {small.memory} instead of {best.memory}."
                )
        ratio = drawn.final_noise / best.final_noise
        if ratio < 0.99:
            lines.append(
                f"Where secret coins decide who takes part, and whoever is drawn comes, take {drawn.name}: "
                f"{ratio:.2f} of the noise of {best.name}."
            )
        else:
            lines.append(f"Secret coins bring nothing here: {drawn.name} has {ratio:.2f} of the noise of {best.name}.")
        return (*lines, *self.notes)


def compare(question: Question) -> Comparison:
    """Return every kind of noise that meets the target in this setting; a cohort that runs dry is refused."""
    part = build("sampling", {"name": "min_separation", "rounds": question.separation, "at_most": question.at_most})
    sampler = part.sampler(question.clients, question.sample_rate)
    sampler.demand_enough(question.rounds)
    averaging = None if question.averaging is None else build("averaging", question.averaging)
    workload = server_workload(build("server", question.server), averaging, question.rounds)
    weights, delta = workload.weights, parse_delta(question.delta, question.clients)
    separation, at_most = question.separation, question.at_most or None
    fitted = functools.partial(optimised, weights=weights, separation=separation)
    record = f"the server keeps a record, and lets no client take part twice within {separation} rounds"
    record += f" or more than {question.at_most} times" if question.at_most else ""
    record += "; who takes part need be neither random nor secret"
    coins = "each client joins by a coin of its own that nobody else learns, and comes whenever it falls so"

    def choice(
        name: str, matrix: NoiseMatrix, event: Callable[[Event], Event], assumes: str, coins: bool = False
    ) -> Choice:
        def make(sigma: float) -> Event:
            return event(_noise(matrix, sigma))

        sigma = calibrate(make, question.rounds, question.epsilon, delta, question.accountant)
        gains = matrix.gain(weights)
        scale = sigma * question.clip_norm / sampler.expected_cohort
        return Choice(
            name, sigma, None if coins else matrix.sensitivity(question.rounds, separation, at_most),
            float(scale * gains[-1]), float(scale * np.sqrt(np.mean(gains**2))), _memory(matrix),
            _described(matrix), adjacency(make(sigma)), assumes, coins, matrix,
        )  # fmt: skip

    found = [
        choice(POISSON, _INDEPENDENT, lambda noise: PoissonSampled(question.sample_rate, noise), coins, coins=True),
        choice(SEPARATED, _INDEPENDENT, sampler.event, record),
        *(choice(kind, fitted(kind, at_most=at_most), sampler.event, f"{record}; {_NOISE_SECRET}") for kind in KINDS),
    ]
    inside = question.sample_rate * separation
    if separation > 1 and inside <= 1:
        found.append(
            choice(
                CYCLIC, fitted("banded", at_most=1), lambda noise: CyclicSampled(separation, inside, "", noise),
                f"clients are in {separation} groups that take turns; inside a group, {coins}; {_NOISE_SECRET}",
                coins=True,
            )
        )  # fmt: skip
    notes = (workload.note,) if workload.note else ()
    return Comparison(question, delta, sampler.expected_cohort, tuple(found), weights, notes)


def _noise(matrix: NoiseMatrix, sigma: float) -> Event:
    """Return the event of one round with this noise, before participation."""
    if isinstance(matrix, Tree):
        return TreeNoise(sigma, matrix.restart)
    if isinstance(matrix, Blt):
        return BltNoise(sigma, matrix.decays, matrix.weights)
    if isinstance(matrix, Toeplitz):
        return ToeplitzNoise(sigma, matrix.coefficients) if matrix.coefficients else Gaussian(sigma)
    raise PrivacyError(f"{type(matrix).__name__} is no matrix that a ledger can hold")


def _memory(matrix: NoiseMatrix) -> int:
    if isinstance(matrix, Tree):
        return matrix.restart.bit_length() - 1
    return len(matrix.decays if isinstance(matrix, Blt) else matrix.coefficients)  # type: ignore[attr-defined]


def _described(matrix: NoiseMatrix) -> dict[str, Any]:
    name = "gaussian" if matrix == _INDEPENDENT else {Tree: "tree", Toeplitz: "banded", Blt: "blt"}[type(matrix)]
    fields = {} if matrix == _INDEPENDENT else dataclasses.asdict(matrix)  # type: ignore[call-overload]
    return {"name": name} | {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}


def _plain(choice: Choice) -> dict[str, Any]:
    return {
        "name": choice.name,
        "noise_multiplier": choice.noise_multiplier,
        "sensitivity": choice.sensitivity,
        "noise_in_final_model": choice.final_noise,
        "noise_in_all_models": choice.models_noise,
        "memory": choice.memory,
        "mechanism": choice.mechanism,
        "adjacency": choice.adjacency,
        "assumes": choice.assumes,
    }
