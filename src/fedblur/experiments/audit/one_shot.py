"""One training run that measures its own privacy (Andrew et al. 2023). In: a configuration. Out: empirical epsilons.

m canaries join the population (`canaries.py`), and more directions are held out: nobody ever sends those. All rounds
are real ones (`run_round`): the same sampling, bounding, mechanism, ledger and server. Two adversaries look on:

    final model    g_j = cos(w^T − w^0, u_j); for a held-out u_j it is N(0, 1/d), whatever the model
    all iterates   g_j = the largest cos(G_t, u_j) over all rounds, G_t being what round t released; the held-out
                   directions give its null

An epsilon above the accountant's is a bug. One below it proves nothing: a better attack may exist.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedblur.core.config import Config, config_hash
from fedblur.core.errors import ConfigError
from fedblur.core.files import drop_empty, make_folder, missing_folders, remove
from fedblur.data.population import Federation
from fedblur.engines import Simulated, suitable_threads
from fedblur.engines.distributed import demand_one_process
from fedblur.experiments.audit.canaries import CanaryEngine, Directions
from fedblur.experiments.audit.estimate import Estimate, Values, gaussian_fit, lower_bound
from fedblur.experiments.audit.listening import Attended, Overheard, demand_private_updates, first_state
from fedblur.privacy.claim import to_json
from fedblur.privacy.events import Gaussian as GaussianEvent
from fedblur.privacy.laws import Check, CohortLog, NoiseLog, messages_fit
from fedblur.privacy.ledger import Budget, Ledger, Spending, randomness_of, read_budget
from fedblur.privacy.ledger_file import open_ledger
from fedblur.privacy.mechanisms.gaussian import Gaussian
from fedblur.privacy.population_account import account_of
from fedblur.training.machine import Machine
from fedblur.training.round import Protocol, client_job, run_round
from fedblur.training.server import published
from fedblur.training.setup import Setup, prepare
from fedblur.training.summary import versions, warning

Tick = Callable[[int], None]

# Canaries, and held-out directions. The interval counts on many: with 20 of each, 24 of 400 audits of a private run lay
# above its claim, a bug where there was none; with 100 it was 2 of 550 (benchmarks/audit_alarms.py, 18 November 2026).
_FEWEST = 100
_MOST = 10**6
# The attacks read what each round released. The checks read clients' messages, cohorts and the sum before the noise.
_INSIDE = "this check reads what no ε covers, and the population has a budget"


@dataclass(frozen=True)
class Attack:
    """The view that one adversary has of the canaries, and what follows from it."""

    name: str
    seen: Values  # [m], of canaries in the population
    unseen: Values  # [held out]
    null_std: float | None  # of unseen ones where it is known; None: fitted to them
    estimate: Estimate
    lower_bound: float  # by thresholds alone, 95 %

    def facts(self) -> dict[str, Any]:
        return {
            "epsilon": self.estimate.epsilon,
            "interval_95": [self.estimate.low, self.estimate.high],
            "lower_bound_95": self.lower_bound,
            "seen": _moments(self.seen),
            "unseen": _moments(self.unseen),
            "null_std": self.null_std,
        }


@dataclass(frozen=True)
class Audit:
    """The result: what was claimed and what two adversaries found."""

    config: Config
    claimed: float  # the accountant's epsilon
    noise_removed: bool  # a control: the claim stays, the noise is left out
    attacks: tuple[Attack, ...]
    checks: tuple[Check, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """ABOVE: an attack's whole interval lies above the claim. BROKEN: a check fails. below: all lie below it."""
        if any(check.broken for check in self.checks):
            return "BROKEN"
        if any(attack.estimate.low > self.claimed or attack.lower_bound > self.claimed for attack in self.attacks):
            return "ABOVE"
        return "below" if all(attack.estimate.high < self.claimed for attack in self.attacks) else "undecided"

    def facts(self) -> dict[str, Any]:
        attacks = {attack.name: attack.facts() for attack in self.attacks}
        return {
            "verdict": self.verdict,
            "claimed_epsilon": self.claimed,
            "noise_removed": self.noise_removed,
            "attacks": attacks,
            "checks": {check.name: {"p_value": check.p_value, "words": check.words} for check in self.checks},
            **self.about,
        }


def audit(
    config: Config,
    folder: Path,
    *,
    canaries: int = 1000,
    held_out: int = 1000,
    remove_noise: bool = False,
    machine: Machine | None = None,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    tick: Tick = lambda round_: None,
) -> Audit:
    """Train once with canaries and attack the result. The run's ledger goes into `folder`: an audit spends epsilon."""
    demand_one_process("an audit")
    for name, value in (("canaries", canaries), ("held_out", held_out)):
        if value < _FEWEST:
            raise ConfigError(f"{name}={value} must be at least {_FEWEST}: fewer say nothing about epsilon")
        if value > _MOST:
            raise ConfigError(f"{name}={value} must be at most {_MOST:,}: each is a direction that is attacked")
    demand_private_updates(config)
    began = time.perf_counter()
    made = missing_folders(folder)
    make_folder(folder)
    # A new ledger for each attempt: what an earlier one spent stays on record.
    names = ("ledger.jsonl", *(f"ledger-{i}.jsonl" for i in range(2, 10_000)))
    ledger = next(path for name in names if not (path := folder / name).exists())
    try:
        setup = prepare(config, ledger, machine or Machine(), federation, module, canaries=canaries)
    except BaseException:
        drop_empty(made)  # nothing was released
        raise
    directions = Directions(
        setup.rng.child("canaries").seed(), canaries + held_out, setup.protocol.layout.total, setup.initial.device
    )
    mechanism = Overheard(setup.protocol.mechanism, inside=True)
    engine = Attended(CanaryEngine(setup.engine, setup.federation.train.clients, directions))
    protocol = replace(setup.protocol, sums=Simulated(engine), mechanism=mechanism)
    claimed = protocol.plan.epsilon()
    if remove_noise:
        protocol = _without_noise(setup, protocol, ledger)
    setup = replace(setup, protocol=protocol)
    final, iterates, checks = _listened_run(setup, mechanism, engine, directions, tick)
    protocol.ledger.settle()
    if _budgeted(protocol.ledger):
        checks = tuple(replace(check, p_value=None, words=_INSIDE) for check in checks)
    about = _about(setup, canaries, held_out) | {"seconds": round(time.perf_counter() - began, 1)}
    attacks = []
    for name, values, null_std in (
        ("final model", final, directions.dimension**-0.5),
        ("all iterates", iterates, None),
    ):
        seen, unseen = values[:canaries], values[canaries:]
        estimate = gaussian_fit(seen, unseen if null_std is None else None, null_std or 1.0, protocol.plan.delta)
        bound = lower_bound(seen[:, None], unseen[:, None], protocol.plan.delta)
        attacks.append(Attack(name, seen, unseen, null_std, estimate, bound))
    return Audit(config, claimed, remove_noise, tuple(attacks), checks, about)


def _budgeted(ledger: Spending) -> bool:
    """Return whether the audit's people have a budget."""
    return isinstance(ledger, Ledger) and ledger.account is not None and ledger.account.budgeted


def _without_noise(setup: Setup, protocol: Protocol, ledger: Path) -> Protocol:
    """Return the control: no noise, and a ledger that says so. The one for the claim has no release yet and goes."""
    plan, config = protocol.plan, setup.config
    _, about = read_budget(open_ledger(ledger))
    remove(ledger)
    budget = Budget(math.inf, plan.delta, plan.accountant, plan.rounds)
    bare = replace(plan, noise_multiplier=0.0, release=GaussianEvent(0.0), epsilon_target=math.inf)
    account = account_of(config.population, setup.federation, bare.event(), budget, "audit", randomness_of(config.seed))
    if account is not None:
        account.reconcile()  # drops what the claim's ledger had reserved
    return replace(
        protocol, plan=bare, ledger=Ledger(ledger, budget, about, randomness_of(config.seed), account=account)
    )


def _listened_run(
    setup: Setup, mechanism: Overheard, engine: Attended, directions: Directions, tick: Tick
) -> tuple[Values, Values, tuple[Check, ...]]:
    """Train. Return every direction's cosine, to the final model and to all iterates, and the run's checks."""
    protocol = setup.protocol
    noise, cohorts = NoiseLog(mechanism.inner), CohortLog(protocol.plan.sampler)
    state = first_state(protocol, setup.initial)
    most = torch.full((directions.count,), -math.inf, dtype=torch.float64, device=directions.device)
    with suitable_threads(directions.device, directions.dimension):
        for round_ in range(1, protocol.plan.rounds + 1):
            message = client_job(protocol, state).message
            state = run_round(protocol, state, setup.rng.child("round", round_)).state
            cohorts.add(engine.last)
            if mechanism.heard is not None:  # else the round was aborted and released nothing
                released, _ = message.decode(mechanism.heard, directions.dimension)
                most = torch.maximum(most, directions.cosines(released))
                if isinstance(mechanism.inner, Gaussian) and mechanism.seen is not None:
                    noise.add(mechanism.seen)
            tick(round_)
        final = directions.cosines(published(state, protocol.averaging) - setup.initial)
    if not bool(torch.isfinite(most).all()):
        raise ConfigError(
            "every round was aborted, so nothing was released that could be audited; lower mechanism.min_cohort"
        )
    found = noise.checks()
    if not isinstance(mechanism.inner, Gaussian):  # sums are not known: rounding at random is noise too
        found = [Check("noise", None, "updates are rounded at random; audit --worst-case tests this mechanism's noise")]
    checks = (messages_fit(mechanism.longest), *found, *cohorts.checks())
    return np.asarray(final.cpu()), np.asarray(most.cpu()), checks


def _about(setup: Setup, canaries: int, held_out: int) -> dict[str, Any]:
    plan = setup.protocol.plan
    total = setup.protocol.ledger.population()
    return {
        **({} if total is None else {"population": to_json(total)}),
        "config_hash": config_hash(setup.config),
        "delta": plan.delta,
        "accountant": plan.accountant,
        "adjacency": plan.adjacency,
        "clients": setup.federation.train.clients,
        "canaries": canaries,
        "held_out": held_out,
        "dimension": setup.protocol.layout.total,
        "rounds": plan.rounds,
        "sampling": plan.sampler.description,
        "trust_model": setup.config.mechanism.trust,
        "noise_multiplier": plan.noise_multiplier,
        "data": setup.federation.name,
        "warning": warning(setup),
        "ledger": setup.protocol.ledger.anchor(),
        "machine": setup.source.machine,
        "versions": versions(),
    }


def _moments(values: Values) -> dict[str, float]:
    return {"mean": float(values.mean()), "std": float(values.std(ddof=1))}
