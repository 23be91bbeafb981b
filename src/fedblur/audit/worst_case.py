"""The sharpest test of a configuration: its round, many times, with and without one client of the worst kind.

The configuration is the one that is given: its sampling, mask, clipping with its bit, bounding, methods, mechanism,
denoising, server and accountant, set up by `setup.prepare` as for training. What is replaced, since the claim may not
rest on it: data and model (below), N, local steps (one), δ, and the number of rounds, of which a few are run. ε is
claimed for exactly those: the noise is calibrated for them, or the accountant says what a given noise multiplier means.

A tiny model of many blocks of coordinates, and one client per block whose data give an update far outside the clipping
ball, in a direction that the adversary knows, inside its block. A trial is a few real `run_round`s in which half of
these clients exist, the other half not. So one trial holds many pairs of neighbours: for each block, populations that
differ in its client. From what was released about a block's coordinates the adversary computes a few statistics;
`lower_bound` turns their counts, with and without the client, into an epsilon that the mechanism provably exceeds, with
95 % confidence.

Besides, a run of the configuration among clients who send zeros, so that all is noise: `laws.py` tests its noise, its
cohorts and the length of messages.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedblur.accounting import PrivacyPlan
from fedblur.audit.estimate import Values, lower_bound
from fedblur.audit.laws import Check
from fedblur.audit.listening import Overheard, first_state
from fedblur.audit.quiet_run import quiet_checks
from fedblur.audit.tiny_world import (
    BLOCKS,
    CLASSES,
    FEATURES,
    TENSORS,
    Existing,
    Tiny,
    by_block,
    clients_for,
    directions_of,
    endless,
    population_of,
    prepared,
)  # fmt: skip
from fedblur.binding import mechanism_for
from fedblur.config import Config
from fedblur.engines import suitable_threads
from fedblur.errors import ConfigError
from fedblur.rng import Rng
from fedblur.round import Protocol, client_job, run_round
from fedblur.server import ServerState, published
from fedblur.setup import Machine, Setup, plan_for

STATISTICS = (
    "projection", "likelihood", "length", "untouched coordinates", "largest coordinate",
    "change since a round without it", "unreachable values", "model", "model's untouched coordinates",
)  # fmt: skip


def _sharpest() -> Config:
    """One release on everyone: nothing hides a client, so the bound comes closest to the claim."""
    return Config(epsilon=2.0, rounds=1, sample_rate=1.0, sampling="full", clip_norm=1.0)


@dataclass(frozen=True)
class WorstCase:
    """What is checked."""

    config: Config = field(default_factory=_sharpest)
    rounds: int = 4  # of a trial, at most; never more than the configuration has
    delta: float | None = None  # None: 0.01, or a tenth of the sampling rate where that is less

    @property
    def trial_rounds(self) -> int:
        return min(self.rounds, self.config.rounds)

    @property
    def trial_delta(self) -> float:
        """Large, since it is what so many trials can show; below p, or a client's presence would hide in it."""
        return min(0.01, self.config.sample_rate / 10) if self.delta is None else self.delta


@dataclass(frozen=True)
class Finding:
    """The bound and the checks, and what the bound is to be compared with."""

    claimed: float
    delta: float
    rounds: int  # of a trial: what is claimed is claimed for these
    lower_bound: float
    repetitions: int  # of each side
    best: str  # the statistic that tells most on its own
    checks: tuple[Check, ...] = ()

    @property
    def broken(self) -> bool:
        """Whether the mechanism is weaker than it claims, with 95 % confidence, or a check fails."""
        return self.lower_bound > self.claimed or any(check.broken for check in self.checks)


def check_worst_case(
    case: WorstCase,
    repetitions: int = 10_000,
    machine: Machine | None = None,
    tick: Callable[[int], None] = lambda done: None,
) -> Finding:
    """Repeat until each side has so many outcomes, and bound epsilon from below; then test noise and cohorts."""
    _check(case)
    trials = -(-repetitions * 2 // BLOCKS)
    if trials < 4:
        raise ConfigError(f"repetitions={repetitions} must be at least {2 * BLOCKS}: fewer bound nothing")
    machine = machine or Machine(device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage.of(case, Path(folder), machine)
        present, absent = stage.outcomes(trials, tick)
        same = replace(case.config, delta=case.trial_delta)
        checks = quiet_checks(same, stage.plan.noise_multiplier, stage.mechanism.longest, Path(folder), machine)
    return _finding(case, stage, present, absent, checks)


def worst_case_ticks(repetitions: int) -> int:
    """How often `check_worst_case` calls `tick`."""
    return -(-repetitions * 2 // BLOCKS)


def _check(case: WorstCase) -> None:
    config = case.config
    if config.voting is not None:
        raise ConfigError(f"method {config.voting.part_name!r} sends votes, not updates; check a method of rounds")
    if math.isinf(config.clip_norm):
        raise ConfigError("clip_norm=inf claims no privacy, so there is nothing to audit; set clip_norm=0.1")
    claimed = config.epsilon
    if (claimed is not None and not 0 < claimed < math.inf) or config.noise_multiplier == 0:
        raise ConfigError("epsilon=inf claims nothing that a release could break; give a finite one")


def _finding(case: WorstCase, stage: Stage, present: Values, absent: Values, checks: tuple[Check, ...]) -> Finding:
    delta, claimed = case.trial_delta, stage.plan.epsilon_target
    alone = [lower_bound(present[:, [i]], absent[:, [i]], delta) for i in range(len(STATISTICS))]
    best = STATISTICS[int(np.argmax(alone))] if max(alone) > 0 else "none"
    bound = lower_bound(present, absent, delta)
    return Finding(claimed, delta, case.trial_rounds, bound, len(present), best, checks)


@dataclass(frozen=True)
class Stage:
    """The configuration, set up among loud and quiet clients.

    The neighbours are those of the plan: where a client is absent, there is nobody (add or remove), a client who sends
    zeros (zero-out), or one who sends the opposite (replace).
    """

    setup: Setup
    protocol: Protocol
    plan: PrivacyPlan
    mechanism: Overheard
    directions: Tensor  # [blocks, coordinates], unit vectors: where each loud client's update points
    clients: int  # N
    step: float  # how far a client moves the sum, in units of S: 2 if replaced by its opposite

    @classmethod
    def of(cls, case: WorstCase, folder: Path, machine: Machine) -> Stage:
        clients = clients_for(case.config)
        config = replace(
            case.config, rounds=case.trial_rounds, delta=case.trial_delta, local=replace(case.config.local, steps=1)
        )
        plan = plan_for(config, clients, BLOCKS * FEATURES * TENSORS * CLASSES)
        if not 0 < plan.epsilon_target < math.inf:
            raise ConfigError(
                f"{case.trial_rounds} rounds at noise_multiplier={plan.noise_multiplier:g} claim epsilon="
                f"{plan.epsilon_target:g} at delta={plan.delta:g}: nothing that a release could break"
            )
        replaced = plan.adjacency == "replace one client"
        setup = prepared(config, folder, machine, Tiny(), population_of(config, clients, opposite=replaced))
        mechanism = Overheard(mechanism_for(config, plan.sampler, setup.protocol.layout.total), inside=True)
        protocol = replace(
            setup.protocol, plan=plan, mechanism=mechanism, ledger=endless(folder / "trials.jsonl", plan)
        )
        return cls(setup, protocol, plan, mechanism, directions_of(setup), clients, 2.0 if replaced else 1.0)

    def outcomes(self, trials: int, tick: Callable[[int], None]) -> tuple[Values, Values]:
        """[outcomes, statistics] with and without the client."""
        present, absent = [], []
        with suitable_threads(self.setup.initial.device, self.protocol.layout.total):
            nobody = self._trial(torch.empty(0, dtype=torch.int64), self.setup.rng.child("trial", 0))
            for trial in range(1, trials + 1):
                there = torch.arange(trial % 2, BLOCKS, 2)
                rows = self._statistics(self._trial(there, self.setup.rng.child("trial", trial)), nobody)
                present.append(rows[there])
                absent.append(np.delete(rows, there.numpy(), axis=0))
                tick(trial)
        return np.concatenate(present), np.concatenate(absent)

    def _trial(self, there: Tensor, rng: Rng) -> Trial:
        """All rounds of one run on those who exist."""
        plan, ids = self.plan, self._existing(there)
        actual = self.setup.config.sampling.sampler(len(ids), self.setup.config.sample_rate)
        protocol = replace(self.protocol, plan=replace(plan, sampler=Existing(plan.sampler, actual, ids)))
        state, rounds = first_state(protocol, self.setup.initial), []
        for round_ in range(1, plan.rounds + 1):
            rounds.append(self._round(protocol, state, rng.child("round", round_)))
            state = rounds[-1].after
        model = by_block((published(state, protocol.averaging) - self.setup.initial).double().cpu())
        return Trial(rounds, model)

    def _round(self, protocol: Protocol, state: ServerState, rng: Rng) -> Heard:
        job, width = client_job(protocol, state), protocol.layout.total
        after = run_round(protocol, state, rng).state
        bound = job.message.l2_bound(job.clip_norm)
        noise, heard = self.plan.noise_multiplier * bound, self.mechanism.heard
        if heard is None:  # aborted: nothing was released
            heard = torch.zeros(job.message.width(width), device=state.theta.device)
        released = job.message.decode(heard, width)[0]
        sent, _ = job.message.decode(torch.ones_like(heard), width)  # 1 where this round's support is
        directions = torch.nn.functional.normalize(self.directions * by_block(sent.double().cpu()))
        unreachable = by_block(unreachable_from_zero(released.cpu(), noise).double())
        shift = self.step * job.clip_norm / noise
        return Heard(after, by_block(released.double().cpu()) / noise, directions, unreachable.sum(1), shift)

    def _existing(self, there: Tensor) -> Tensor:
        quiet, substitutes = torch.arange(BLOCKS, self.clients), torch.arange(self.clients, self.clients + BLOCKS)
        if self.plan.adjacency == "add or remove one client":
            return torch.cat([there, quiet])
        gone = torch.ones(BLOCKS, dtype=torch.bool)
        gone[there] = False
        return torch.cat([there, quiet, substitutes[gone]])

    def _statistics(self, trial: Trial, nobody: Trial) -> Values:
        """[blocks, statistics]. `nobody`: an earlier trial without any of the clients, which the adversary may know."""
        rate = self.plan.expected_cohort / self.plan.sampler.clients
        along = torch.stack([heard.along for heard in trial.rounds])  # [rounds, blocks]
        shifts = torch.tensor([heard.shift for heard in trial.rounds], dtype=torch.float64)[:, None]
        grown = math.log(rate) + shifts * along - shifts**2 / 2
        likelihood = torch.logaddexp(grown, torch.full_like(grown, math.log1p(-rate) if rate < 1 else -math.inf))
        vectors = torch.stack([heard.released for heard in trial.rounds])  # [rounds, blocks, coordinates]
        figures = (
            along.sum(0),
            likelihood.sum(0),
            vectors.square().sum((0, 2)).sqrt(),
            (vectors == 0).sum((0, 2)).double(),
            vectors.abs().amax((0, 2)),
            along[0] - nobody.rounds[0].along,
            torch.stack([heard.unreachable for heard in trial.rounds]).sum(0),
            (trial.model * self.directions).sum(1),
            (trial.model == 0).sum(1).double(),
        )
        return np.asarray(torch.stack(figures, dim=1))


@dataclass(frozen=True)
class Heard:
    """What one round releases, by block, in units of the noise that is claimed."""

    after: ServerState
    released: Tensor  # [blocks, coordinates]
    directions: Tensor  # [blocks, coordinates], of this round's support
    unreachable: Tensor  # [blocks]
    shift: float  # how far a client moves the sum

    @property
    def along(self) -> Tensor:
        return (self.released * self.directions).sum(1)


@dataclass(frozen=True)
class Trial:
    """What one run releases."""

    rounds: list[Heard]
    model: Tensor  # [blocks, coordinates]: how far the published model moved


def unreachable_from_zero(values: Tensor, noise_std: float) -> Tensor:
    """Which float32 values no float32 sample, times the noise's deviation, rounds to: the sum was not 0 there.

    What gives float noise away (Mironov 2012). Noise in whole numbers reaches the same values from every sum.
    """
    exact, scale = values.numpy(), max(noise_std, 1e-30)
    low = high = (exact.astype(np.float64) / scale).astype(np.float32)
    reached = np.zeros(len(exact), dtype=bool)
    for _ in range(4):  # the two grids' spacings differ by less than a factor of 4
        for sample in (low, high):
            reached |= (sample.astype(np.float64) * scale).astype(np.float32) == exact
        low, high = np.nextafter(low, np.float32(-np.inf)), np.nextafter(high, np.float32(np.inf))
    return torch.from_numpy(~reached)
