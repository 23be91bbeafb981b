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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedblur.audit.canaries import CanaryEngine, Directions
from fedblur.audit.estimate import Estimate, Values, gaussian_fit, lower_bound
from fedblur.clipping import Bounded
from fedblur.config import Config, config_hash
from fedblur.data.population import Federation
from fedblur.engines import suitable_threads
from fedblur.engines.distributed import demand_one_process
from fedblur.errors import ConfigError
from fedblur.events import Event, Gaussian
from fedblur.ledger import Budget, Ledger, open_ledger, read_budget
from fedblur.mechanisms import Mechanism
from fedblur.mechanisms.base import Noise, Release
from fedblur.rng import Rng
from fedblur.round import Protocol, client_job, run_round
from fedblur.server import ServerState, published
from fedblur.setup import Machine, Setup, prepare
from fedblur.summary import versions, warning

Tick = Callable[[int], None]

# Canaries, and held-out directions. The interval counts on many: with 20 of each, 24 of 400 audits of a private run lay
# above its claim, a bug where there was none; with 100 it was 2 of 550 (benchmarks/audit_alarms.py, 18 November 2026).
_FEWEST = 100


@dataclass(frozen=True)
class Attack:
    """What one adversary sees of the canaries, and what follows from it."""

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
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """ABOVE: an attack's whole interval lies above the claim. below: all intervals lie below it."""
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
            **self.about,
        }


class Overheard:
    """A mechanism that passes everything on; what it releases, and nothing else, is what an adversary sees."""

    def __init__(self, inner: Mechanism) -> None:
        self.inner = inner
        self.heard: Tensor | None = None

    @property
    def shows_cohort(self) -> bool:
        return self.inner.shows_cohort

    @property
    def excess(self) -> float:
        return self.inner.excess

    def event(self, noise_multiplier: float) -> Event:
        return self.inner.event(noise_multiplier)

    def notes(self, noise_multiplier: float) -> tuple[str, ...]:
        return self.inner.notes(noise_multiplier)

    def accumulate(self, blocks: Iterable[Bounded], release: Release, rng: Rng) -> Tensor:
        return self.inner.accumulate(blocks, release, rng)

    def draw(self, release: Release, rng: Rng) -> Noise:
        return self.inner.draw(release, rng)

    def release(self, total: Tensor, release: Release, noise: Tensor) -> Tensor:
        self.heard = self.inner.release(total, release, noise)
        return self.heard


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
    _check(config, canaries, held_out)
    began = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    setup = prepare(config, _new_ledger(folder), machine or Machine(), federation, module, canaries=canaries)
    directions = Directions(
        setup.rng.child("canaries").seed(), canaries + held_out, setup.protocol.layout.total, setup.initial.device
    )
    mechanism = Overheard(setup.protocol.mechanism)
    engine = CanaryEngine(setup.protocol.engine, setup.federation.train.clients, directions)
    protocol = replace(setup.protocol, engine=engine, mechanism=mechanism)
    claimed = protocol.plan.epsilon()
    if remove_noise:
        protocol = _without_noise(protocol)
    cosines = _train(setup, protocol, mechanism, directions, tick)
    about = _about(setup, protocol, canaries, held_out) | {"seconds": round(time.perf_counter() - began, 1)}
    return Audit(config, claimed, remove_noise, _attacks(cosines, canaries, directions.dimension, protocol), about)


def _without_noise(protocol: Protocol) -> Protocol:
    """The control: no noise, and a ledger that says so. The one for the claim has no release yet and goes."""
    claimed, plan = protocol.ledger, protocol.plan
    _, about = read_budget(open_ledger(claimed.path))
    claimed.path.unlink()
    budget = Budget(math.inf, plan.delta, plan.accountant, plan.rounds)
    bare = replace(plan, noise_multiplier=0.0, release=Gaussian(0.0), epsilon_target=math.inf)
    return replace(protocol, plan=bare, ledger=Ledger(claimed.path, budget, about))


def _train(
    setup: Setup, protocol: Protocol, mechanism: Overheard, directions: Directions, tick: Tick
) -> tuple[Values, Values]:
    """(final model, all iterates): every direction's cosine."""
    state: ServerState = protocol.server.init(setup.initial)
    if protocol.averaging is not None:
        state = protocol.averaging.init(state)
    most = torch.full((directions.count,), -math.inf, dtype=torch.float64, device=directions.device)
    with suitable_threads(directions.device, directions.dimension):
        for round_ in range(1, protocol.plan.rounds + 1):
            message = client_job(protocol, state).message
            state = run_round(protocol, state, setup.rng.child("round", round_)).state
            assert mechanism.heard is not None
            released, _ = message.decode(mechanism.heard, directions.dimension)
            most = torch.maximum(most, directions.cosines(released))
            tick(round_)
        moved = published(state, protocol.averaging) - setup.initial
        final = directions.cosines(moved)
    return np.asarray(final.cpu()), np.asarray(most.cpu())


def _attacks(cosines: tuple[Values, Values], canaries: int, dimension: int, protocol: Protocol) -> tuple[Attack, ...]:
    delta, null_std = protocol.plan.delta, dimension**-0.5
    final, most = cosines
    return (
        _attack("final model", final[:canaries], final[canaries:], null_std, delta),
        _attack("all iterates", most[:canaries], most[canaries:], None, delta),
    )


def _attack(name: str, seen: Values, unseen: Values, null_std: float | None, delta: float) -> Attack:
    estimate = gaussian_fit(seen, unseen if null_std is None else None, null_std or 1.0, delta)
    return Attack(name, seen, unseen, null_std, estimate, lower_bound(seen[:, None], unseen[:, None], delta))


def _about(setup: Setup, protocol: Protocol, canaries: int, held_out: int) -> dict[str, Any]:
    plan = protocol.plan
    return {
        "config_hash": config_hash(setup.config),
        "delta": plan.delta,
        "accountant": plan.accountant,
        "adjacency": plan.adjacency,
        "clients": setup.federation.train.clients,
        "canaries": canaries,
        "held_out": held_out,
        "dimension": protocol.layout.total,
        "rounds": plan.rounds,
        "sampling": plan.sampler.description,
        "trust_model": setup.config.mechanism.trust,
        "noise_multiplier": plan.noise_multiplier,
        "data": setup.federation.name,
        "warning": warning(replace(setup, protocol=protocol)),
        "ledger": protocol.ledger.anchor(),
        "machine": setup.machine,
        "versions": versions(),
    }


def _check(config: Config, canaries: int, held_out: int) -> None:
    demand_one_process("an audit")
    for name, value in (("canaries", canaries), ("held_out", held_out)):
        if value < _FEWEST:
            raise ConfigError(f"{name}={value} must be at least {_FEWEST}: fewer say nothing about epsilon")
    if config.voting is not None:
        raise ConfigError(
            f"method {config.voting.part_name!r} sends votes, not updates: canaries have no direction to send; "
            "audit a method of rounds"
        )
    if math.isinf(config.clip_norm):
        raise ConfigError("clip_norm=inf claims no privacy, so there is nothing to audit; set clip_norm=0.1")


def _new_ledger(folder: Path) -> Path:
    """Each attempt has its own: what an earlier one spent stays on record."""
    names = ("ledger.jsonl", *(f"ledger-{i}.jsonl" for i in range(2, 10_000)))
    return next(path for name in names if not (path := folder / name).exists())


def _moments(values: Values) -> dict[str, float]:
    return {"mean": float(values.mean()), "std": float(values.std(ddof=1))}
