"""Before anyone trains: what noise and epsilon a setting means, and whether it can learn. No data are needed.

R = √T·pN/(σ√d) is the largest signal that T rounds can add up to (all updates aligned, at the clip norm) over
the noise that they do add up to. The clip norm cancels out: p, T, N, epsilon and the model's size d decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedblur.core.config import SMALLEST_RATE
from fedblur.core.errors import ConfigError, PrivacyError
from fedblur.core.registry import build, describe
from fedblur.privacy.accounting import ACCOUNTANTS, Accountant, PrivacyPlan, epsilon, make_plan
from fedblur.privacy.mechanisms import Mechanism
from fedblur.privacy.mechanisms.base import Conditions
from fedblur.privacy.sampling import Sampler

PAPER_CNN = 1_018_174  # d of the paper's convolutional network for 28×28 images and 62 classes


@dataclass(frozen=True)
class Setting:
    """The setting to plan. Either epsilon or noise_multiplier is given; the other follows."""

    clients: int  # N: the clients that train
    sample_rate: float  # p: the chance of each client to be in a cohort
    rounds: int  # T: how many cohorts are trained
    epsilon: float | None = None  # the target
    noise_multiplier: float | None = None  # σ: noise in units of the clip norm
    delta: float | str = "1/N"  # a number, "1/N" or "N^-1.1"
    sampling: str = "poisson"  # how cohorts are drawn
    parameters: int = PAPER_CNN  # d: of the model; R depends on it
    clip_norm: float = 0.1  # S: it does not change ε
    mechanism: Any = "gaussian"  # a name, a table with settings, or a part

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ConfigError("give exactly one of epsilon and noise_multiplier; the other one follows")
        if self.noise_multiplier is not None and not 0 <= self.noise_multiplier < math.inf:
            raise ConfigError(f"noise_multiplier={self.noise_multiplier} must be 0 or more and finite")
        if 0 < self.sample_rate < SMALLEST_RATE:
            raise ConfigError(
                f"sample_rate={self.sample_rate:g} is below {SMALLEST_RATE:g}: nearly no round has a client; raise it"
            )
        for name, value in (("parameters", self.parameters), ("rounds", self.rounds)):
            if value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        if not 0 < self.clip_norm < math.inf:
            raise ConfigError(f"clip_norm={self.clip_norm} must be above 0")
        object.__setattr__(self, "mechanism", build("mechanism", self.mechanism))


@dataclass(frozen=True)
class Outlook:
    """The cost and the noise of a setting, under each accountant that can interpret it."""

    setting: Setting  # what was asked
    plans: Mapping[Accountant, PrivacyPlan]  # by accountant: noise, ε and δ
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
        """Return R under one accountant's plan."""
        return signal_to_noise(self.plans[accountant], self.setting.parameters)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as `fedblur plan --json` prints them; None where an accountant does not apply."""
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
    """Return R = √T·pN/(σ√d), with the σ that an expected cohort adds; inf without noise."""
    noise = plan.added_noise * math.sqrt(parameters)
    return math.sqrt(plan.rounds) * plan.expected_cohort / noise if noise else math.inf


def outlook(setting: Setting) -> Outlook:
    """Return what a setting costs and how noisy it is. It is refused only if no accountant can plan it."""
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
    """Return the plan of a setting under one accountant."""
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
    """Return the setting's mechanism, for all of the model's parameters."""
    conditions = Conditions(
        setting.parameters, setting.clip_norm, sampler.expected_cohort, sampler.clients, setting.rounds,
        getattr(sampler, "separation", 1),
    )  # fmt: skip
    mechanism: Mechanism = setting.mechanism.bind(conditions)
    return mechanism


def expectation(ratio: float) -> str:
    """Describe R in words. It is a bound and ranks no data: FEMNIST reached 57 % at R = 0.47 (papers/cheng2022)."""
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
    """Return the same setting, held to the epsilon that a plan of it spends."""
    return replace(setting, epsilon=plan.epsilon_target, noise_multiplier=None)


def comparable(plan: PrivacyPlan) -> bool:
    """Return whether other settings can be held to the epsilon of this one."""
    return 0 < plan.epsilon_target < math.inf


def _help(setting: Setting, plan: PrivacyPlan) -> list[str]:
    """Return changes that raise R at the same epsilon, each with the R that it gives."""
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
    lines = []
    for name, idea in ideas:
        try:
            other = plan_of(idea, plan.accountant)
        except PrivacyError:  # for instance a delta so large for the new setting that no noise is needed
            continue
        ratio = signal_to_noise(other, idea.parameters)
        change = f"{100 * (ratio / now - 1):+.0f} %, sigma {other.noise_multiplier:.3g}"
        lines.append(f"With {name}: R = {ratio:.2f} ({change}).")
    return lines


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
        try:
            safer = plan_of(replace(at_epsilon(setting, plan), delta="N^-1.1"), plan.accountant)
        except PrivacyError:
            advice = "use N^-1.1 or less"
        else:
            growth = 100 * (safer.noise_multiplier / plan.noise_multiplier - 1)
            advice = f"N^-1.1 = {safer.delta:.3g} needs sigma {safer.noise_multiplier:.4g} ({growth:+.1f} %)"
        lines.append(f"delta = {plan.delta:.3g} is not below 1/N: it permits releasing one random client; {advice}.")
    return lines
