"""Before anyone trains: what noise and epsilon a setting means, and whether it can learn. No data are needed.

R = √T·pN/(σ√d) is the largest signal that T rounds can add up to (all updates aligned, at the clip norm) over
the noise that they do add up to. The clip norm cancels out: p, T, N, epsilon and the model's size d decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from fedblur.accounting import Accountant, PrivacyPlan, epsilon, make_plan
from fedblur.errors import ConfigError, PrivacyError
from fedblur.mechanisms import Mechanism
from fedblur.mechanisms.base import Conditions
from fedblur.registry import build, describe
from fedblur.sampling import Sampler

PAPER_CNN = 1_018_174  # d of the paper's convolutional network for 28×28 images and 62 classes
ACCOUNTANTS: tuple[Accountant, ...] = get_args(Accountant)


@dataclass(frozen=True)
class Setting:
    """What is planned; epsilon or noise_multiplier is given, the other one follows."""

    clients: int  # N
    sample_rate: float  # p
    rounds: int  # T
    epsilon: float | None = None
    noise_multiplier: float | None = None  # σ
    delta: float | str = "1/N"
    sampling: str = "poisson"
    parameters: int = PAPER_CNN  # d
    clip_norm: float = 0.1  # S
    mechanism: Any = "gaussian"  # a name, a table with settings, or a part

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ConfigError("give exactly one of epsilon and noise_multiplier; the other one follows")
        if self.noise_multiplier is not None and not 0 <= self.noise_multiplier < math.inf:
            raise ConfigError(f"noise_multiplier={self.noise_multiplier} must be 0 or more and finite")
        for name, value in (("parameters", self.parameters), ("rounds", self.rounds)):
            if value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        if not 0 < self.clip_norm < math.inf:
            raise ConfigError(f"clip_norm={self.clip_norm} must be above 0")
        object.__setattr__(self, "mechanism", build("mechanism", self.mechanism))


@dataclass(frozen=True)
class Outlook:
    """A setting with what follows from it, under each accountant that can interpret it."""

    setting: Setting
    plans: Mapping[Accountant, PrivacyPlan]
    advice: tuple[str, ...]  # what to expect first, then what would help, then warnings

    @property
    def tightest(self) -> PrivacyPlan:
        """By the accountant that needs the least noise."""
        return next(self.plans[name] for name in ACCOUNTANTS if name in self.plans)

    @property
    def noise_norm(self) -> float:
        """Expected l2 norm of the noise in one round's mean; no signal can be longer than the clip norm."""
        plan, setting = self.tightest, self.setting
        return plan.added_noise * setting.clip_norm * math.sqrt(setting.parameters) / plan.expected_cohort

    def signal_to_noise(self, accountant: Accountant) -> float:
        return signal_to_noise(self.plans[accountant], self.setting.parameters)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as `fedblur plan --json` prints them; None where an accountant does not apply."""
        plan, setting = self.tightest, self.setting
        known = {name: self.plans.get(name) for name in ACCOUNTANTS}
        return {
            "clients": setting.clients,
            "sample_rate": setting.sample_rate,
            "rounds": setting.rounds,
            "delta": plan.delta,
            "sampling": setting.sampling,
            "adjacency": plan.adjacency,
            "mechanism": describe(setting.mechanism),
            "parameters": setting.parameters,
            "clip_norm": setting.clip_norm,
            "noise_multiplier": {name: p and p.noise_multiplier for name, p in known.items()},
            "epsilon": {name: p and p.epsilon_target for name, p in known.items()},
            "expected_cohort": plan.expected_cohort,
            "cohort_spread": plan.sampler.cohort_spread,
            "noise_std": plan.added_noise * setting.clip_norm,
            "noise_norm": self.noise_norm,
            "signal_to_noise": {name: p and signal_to_noise(p, setting.parameters) for name, p in known.items()},
            "advice": list(self.advice),
        }


def signal_to_noise(plan: PrivacyPlan, parameters: int) -> float:
    """R = √T·pN/(σ√d), with the σ that an expected cohort adds; inf without noise."""
    noise = plan.added_noise * math.sqrt(parameters)
    return math.sqrt(plan.rounds) * plan.expected_cohort / noise if noise else math.inf


def outlook(setting: Setting) -> Outlook:
    """What follows from a setting. Refused only if no accountant can make a plan of it."""
    plans: dict[Accountant, PrivacyPlan] = {}
    refused: list[PrivacyError] = []
    for accountant in ACCOUNTANTS:
        try:
            plans[accountant] = plan_of(setting, accountant)
        except PrivacyError as error:
            refused.append(error)
    if not plans:
        raise refused[-1]
    plan = next(iter(plans.values()))
    advice = (
        expectation(signal_to_noise(plan, setting.parameters)),
        *mechanism_of(setting, plan.sampler).notes(plan.noise_multiplier),
        *_help(setting, plan),
        *_warnings(setting, plan),
    )
    return Outlook(setting, plans, advice + tuple(str(error) for error in refused))


def plan_of(setting: Setting, accountant: Accountant) -> PrivacyPlan:
    """The plan of a setting under one accountant."""
    sampler = build("sampling", setting.sampling).sampler(setting.clients, setting.sample_rate)
    return make_plan(
        sampler,
        mechanism_of(setting, sampler),
        rounds=setting.rounds,
        delta=setting.delta,
        accountant=accountant,
        epsilon=setting.epsilon,
        noise_multiplier=setting.noise_multiplier,
    )


def mechanism_of(setting: Setting, sampler: Sampler) -> Mechanism:
    """The setting's mechanism, for all of the model's parameters."""
    conditions = Conditions(setting.parameters, setting.clip_norm, sampler.expected_cohort, sampler.clients)
    mechanism: Mechanism = setting.mechanism.bind(conditions)
    return mechanism


def expectation(ratio: float) -> str:
    """R in plain words. It is a bound and ranks no data: FEMNIST reached 57 % at R = 0.47 (papers/cheng2022)."""
    if math.isinf(ratio):
        return "No noise: nothing limits learning but clipping, and nobody is protected."
    if ratio < 1:
        meaning = "the noise exceeds the largest possible signal; it may learn all the same, at a cost in accuracy"
    elif ratio < 2:
        meaning = "weak; noise will cost accuracy"
    elif ratio < 5:
        meaning = "learnable; noise will cost some accuracy"
    else:
        meaning = "comfortable; noise may still cost a few points"
    return f"R = {ratio:.2f}: {meaning}."


def at_epsilon(setting: Setting, plan: PrivacyPlan) -> Setting:
    """The same setting, held to the epsilon that a plan of it spends."""
    return replace(setting, epsilon=plan.epsilon_target, noise_multiplier=None)


def comparable(plan: PrivacyPlan) -> bool:
    """Whether other settings can be held to the epsilon of this one."""
    return 0 < plan.epsilon_target < math.inf


def _help(setting: Setting, plan: PrivacyPlan) -> list[str]:
    """What would raise R at the same epsilon, each with the R that it gives."""
    now, held = signal_to_noise(plan, setting.parameters), at_epsilon(setting, plan)
    if now >= 5 or not comparable(plan):
        return []
    p, d, n = setting.sample_rate, setting.parameters, setting.clients
    tenth, quarter = max(1, d // 10), math.ceil(setting.rounds / 4)
    ideas = [(f"a model a tenth the size ({tenth:,} parameters)", replace(held, parameters=tenth))]
    if 2 * p <= 1:
        idea = replace(held, sample_rate=2 * p)
        ideas.append((f"twice the clients per round (sample_rate={2 * p:g})", idea))
    if 4 * p <= 1 and setting.rounds >= 4:
        idea = replace(held, sample_rate=4 * p, rounds=quarter)
        ideas.append((f"the same work in fewer rounds (sample_rate={4 * p:g}, rounds={quarter})", idea))
    ideas.append((f"twice the clients in all ({2 * n:,})", replace(held, clients=2 * n)))
    return [line for name, idea in ideas if (line := _effect(name, idea, now, plan.accountant))]


def _effect(name: str, idea: Setting, now: float, accountant: Accountant) -> str | None:
    try:
        plan = plan_of(idea, accountant)
    except PrivacyError:  # for instance a delta so large for the new setting that no noise is needed
        return None
    ratio = signal_to_noise(plan, idea.parameters)
    return f"With {name}: R = {ratio:.2f} ({100 * (ratio / now - 1):+.0f} %, sigma {plan.noise_multiplier:.3g})."


def _warnings(setting: Setting, plan: PrivacyPlan) -> list[str]:
    lines = []
    if plan.expected_cohort < 1:
        lines.append(f"p·N = {plan.expected_cohort:.2g} is below 1: most rounds have no client and add only noise.")
    if 0 < plan.noise_multiplier < 0.5:
        alone = epsilon(plan.release, 1, plan.delta, plan.accountant)
        lines.append(
            f"sigma = {plan.noise_multiplier:.3g} is below 0.5: a client known to take part in a round is "
            f"protected by epsilon = {alone:.3g} there; the rest of its protection is that nobody knows."
        )
    if comparable(plan) and plan.delta * setting.clients >= 1 - 1e-9:
        lines.append(_delta_warning(setting, plan))
    return lines


def _delta_warning(setting: Setting, plan: PrivacyPlan) -> str:
    text = f"delta = {plan.delta:.3g} is not below 1/N: it permits releasing one random client"
    try:
        safer = plan_of(replace(at_epsilon(setting, plan), delta="N^-1.1"), plan.accountant)
    except PrivacyError:
        return text + "; use N^-1.1 or less."
    growth = 100 * (safer.noise_multiplier / plan.noise_multiplier - 1)
    return f"{text}; N^-1.1 = {safer.delta:.3g} needs sigma {safer.noise_multiplier:.4g} ({growth:+.1f} %)."
