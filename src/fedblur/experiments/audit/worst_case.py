"""The sharpest test of a configuration: its round, many times, with and without one client of the worst kind.

The configuration is the one that is given: its sampling, mask, clipping with its bit, bounding, methods, mechanism,
denoising, server and accountant, set up by `setup.prepare` as for training. What is replaced, since the claim may not
rest on it: data and model (below), N, local steps (one), δ, and the number of rounds, of which a few are run. ε is
claimed for exactly those: the noise is calibrated for them, or the accountant says what a given noise multiplier means.

A tiny model of many blocks of coordinates, and one loud client per block: its data give an update far outside the
clipping ball, in a direction that the adversary knows, inside its block. The sample of a quiet client is zero, and so
is its update. A trial is a few real `run_round`s in which half of the loud clients exist, the other half not. So one
trial holds many pairs of neighbours: for each block, populations that differ in its client. From what was released
about a block's coordinates the adversary computes a few statistics; `lower_bound` turns their counts, with and without
the client, into an epsilon that the mechanism provably exceeds, with 95 % confidence.

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
from torch import Tensor, nn

from fedblur.core.config import Config
from fedblur.core.errors import ConfigError
from fedblur.core.rng import Rng
from fedblur.data.population import Federation, Packed, Samples, each_input
from fedblur.engines import Simulated, suitable_threads
from fedblur.experiments.audit.estimate import Values, lower_bound
from fedblur.experiments.audit.listening import Attended, Overheard, demand_private_updates, first_state
from fedblur.privacy.accounting import PrivacyPlan
from fedblur.privacy.events import Event
from fedblur.privacy.laws import Check, CohortLog, NoiseLog, messages_fit
from fedblur.privacy.ledger import Budget, Ledger
from fedblur.privacy.mechanisms.base import mechanism_for
from fedblur.privacy.sampling import Sampler
from fedblur.training.client_rows import RowsInMemory
from fedblur.training.machine import Machine
from fedblur.training.round import Protocol, client_job, run_round
from fedblur.training.server import ServerState, published
from fedblur.training.setup import Setup, plan_for, prepare

BLOCKS, FEATURES, TENSORS, CLASSES = 200, 4, 4, 2
COHORT, FEWEST = 100, 300  # expected cohort, and clients of a trial, at least
_LOUD_SAMPLES = 4
_LOUDNESS = 28.0  # norm of a loud client's update in units of S
_MOST = 1_000_000  # clients
_QUIET_BLOCKS, _QUIET_ROUNDS = 16, 400
_SMALL_COHORT = 10  # where everyone comes, or each client draws noise for every coordinate, which takes long
STATISTICS = (
    "projection", "likelihood", "length", "untouched coordinates", "largest coordinate",
    "change since a round without it", "unreachable values", "model", "model's untouched coordinates",
)  # fmt: skip


@dataclass(frozen=True)
class WorstCase:
    """The case that is checked: by default one release on everyone. Nothing hides a client there, so the bound comes
    closest to the claim.
    """

    config: Config = field(
        default_factory=lambda: Config(epsilon=2.0, rounds=1, sample_rate=1.0, sampling="full", clip_norm=1.0)
    )
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
    config, claimed = case.config, case.config.epsilon
    demand_private_updates(config)
    if (claimed is not None and not 0 < claimed < math.inf) or config.noise_multiplier == 0:
        raise ConfigError("epsilon=inf claims nothing that a release could break; give a finite one")
    trials = worst_case_ticks(repetitions)
    if trials < 4:
        raise ConfigError(f"repetitions={repetitions} must be at least {2 * BLOCKS}: fewer bound nothing")
    machine, delta = machine or Machine(device="cpu"), case.trial_delta
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage.of(case, Path(folder), machine)
        present, absent = stage.outcomes(trials, tick)
        longest, sigma = stage.mechanism.longest, stage.plan.noise_multiplier
        checks = _quiet_checks(replace(config, delta=delta), sigma, longest, Path(folder), machine)
    alone = [lower_bound(present[:, [i]], absent[:, [i]], delta) for i in range(len(STATISTICS))]
    best = STATISTICS[int(np.argmax(alone))] if max(alone) > 0 else "none"
    bound = lower_bound(present, absent, delta)
    return Finding(stage.plan.epsilon_target, delta, case.trial_rounds, bound, len(present), best, checks)


def worst_case_ticks(repetitions: int) -> int:
    """Return how often `check_worst_case` calls `tick`: once a trial."""
    return -(-repetitions * 2 // BLOCKS)


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
        """Return [outcomes, statistics] with and without the client."""
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
        """Run all rounds of one run on those who exist."""
        plan, ids = self.plan, self._existing(there)
        actual = self.setup.config.sampling.sampler(len(ids), self.setup.config.sample_rate)
        own = self.protocol.personal  # which a method may have: nobody remembers another trial
        protocol = replace(
            self.protocol, plan=replace(plan, sampler=Existing(plan.sampler, actual, ids)),
            rows=None if own is None else RowsInMemory(own.initial),
        )  # fmt: skip
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
        """Return [blocks, statistics]. `nobody`: an earlier trial without clients, which the adversary may know."""
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
    """The release of one round, by block, in units of the noise that is claimed."""

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
    """The release of one run."""

    rounds: list[Heard]
    model: Tensor  # [blocks, coordinates]: how far the published model moved


def _quiet_checks(config: Config, sigma: float, longest: float, folder: Path, machine: Machine) -> tuple[Check, ...]:
    """Check a run among clients who send zeros: all that is released is noise, and its sum is known.

    `longest`: message of the trials, in units of what noise is made for.
    """
    shares = getattr(config.mechanism, "mode", "fast") == "exact"
    small = (shares or config.sample_rate == 1) and config.clipping is None  # whose bit needs a large cohort
    cohort = _SMALL_COHORT if small else COHORT
    clients = clients_for(config, cohort, cohort)
    config = replace(
        config, rounds=_QUIET_ROUNDS, epsilon=None, noise_multiplier=sigma, local=replace(config.local, steps=1)
    )
    zeros = torch.zeros(clients, dtype=torch.int64)
    population = Packed(torch.zeros(1, _QUIET_BLOCKS * FEATURES), zeros[:1], zeros, zeros + 1, CLASSES)
    setup = prepared(config, folder, machine, Tiny(_QUIET_BLOCKS), population)
    mechanism = Overheard(setup.protocol.mechanism, inside=True)
    engine, plan = Attended(setup.engine), setup.protocol.plan
    protocol = replace(
        setup.protocol, mechanism=mechanism, sums=Simulated(engine), ledger=endless(folder / "quiet.jsonl", plan)
    )
    state = first_state(protocol, setup.initial)
    noise, cohorts = NoiseLog(mechanism.inner), CohortLog(plan.sampler)
    with suitable_threads(setup.initial.device, protocol.layout.total):
        for round_ in range(1, _QUIET_ROUNDS + 1):
            state = run_round(protocol, state, setup.rng.child("round", round_)).state
            cohorts.add(engine.last)
            if mechanism.seen is not None:
                noise.add(mechanism.seen)
    return (messages_fit(max(longest, mechanism.longest)), *noise.checks(), *cohorts.checks())


def unreachable_from_zero(values: Tensor, noise_std: float) -> Tensor:
    """Return which float32 values no float32 sample, times the noise's deviation, rounds to: there the sum was not 0.

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


class Tiny(nn.Module):
    """Four tensors of one shape whose sum is a linear classifier: an update is spread evenly over all of them."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        shape = (CLASSES, blocks * FEATURES)
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for _ in range(TENSORS)])

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ torch.stack(list(self.parts)).sum(0).T


@dataclass(frozen=True)
class Existing:
    """The real sampler among those who exist; who exists is part of the pair of populations. The plan's N is public."""

    nominal: Sampler
    actual: Sampler  # over as many clients as exist
    ids: Tensor  # sorted

    @property
    def clients(self) -> int:
        return self.nominal.clients

    @property
    def expected_cohort(self) -> float:
        return self.nominal.expected_cohort

    @property
    def cohort_spread(self) -> float:
        return self.nominal.cohort_spread

    @property
    def independent(self) -> bool:
        return self.nominal.independent

    @property
    def description(self) -> str:
        return f"{self.nominal.description}; {len(self.ids)} clients exist"

    def cohort(self, rng: Rng) -> Tensor:
        return self.ids[self.actual.cohort(rng)]

    def event(self, inner: Event) -> Event:
        return self.nominal.event(inner)

    def seen(self) -> Existing:
        return replace(self, nominal=self.nominal.seen(), actual=self.actual.seen())


def by_block(vector: Tensor) -> Tensor:
    parts = vector.view(TENSORS, CLASSES, BLOCKS, FEATURES)
    return parts.permute(2, 0, 1, 3).reshape(BLOCKS, -1)


def clients_for(config: Config, cohort: int = COHORT, fewest: int = FEWEST) -> int:
    """Return N: enough for a cohort in which nothing is rare, and for the fewest clients that a mechanism accepts."""
    least = getattr(config.mechanism, "min_cohort", None) or 0
    cohort = max(cohort, math.ceil(least + 6 * math.sqrt(least) + (BLOCKS / 2 if least else 0)))
    clients = max(fewest, math.ceil(cohort / config.sample_rate))
    if clients > _MOST or cohort > 20 * COHORT:
        raise ConfigError(
            f"sample_rate={config.sample_rate:g} and cohorts of {cohort} need {clients:,} clients in a worst-case "
            f"check, which has room for {_MOST:,} clients and cohorts of {20 * COHORT}"
        )
    return clients


def population_of(config: Config, clients: int, opposite: bool) -> Packed:
    """Make loud clients (one per block), quiet ones up to N with one sample of zeros, and substitutes for loud ones."""
    amplitude = _LOUDNESS * config.clip_norm / (config.local.learning_rate * 0.5 * math.sqrt(2 * FEATURES * TENSORS))
    loud = amplitude * torch.eye(BLOCKS).repeat_interleave(FEATURES, dim=1).repeat_interleave(_LOUD_SAMPLES, dim=0)
    x = torch.cat([loud, loud, torch.zeros(1, BLOCKS * FEATURES)])
    y = torch.zeros(len(x), dtype=torch.int64)
    y[len(loud) : 2 * len(loud)] = 1
    first = _LOUD_SAMPLES * torch.arange(BLOCKS)
    still = torch.full((clients - BLOCKS,), len(x) - 1)
    sizes = torch.ones(clients + BLOCKS, dtype=torch.int64)
    sizes[:BLOCKS] = _LOUD_SAMPLES
    substitutes = first + len(loud) if opposite else torch.full((BLOCKS,), len(x) - 1)
    if opposite:
        sizes[clients:] = _LOUD_SAMPLES
    return Packed(x, y, torch.cat([first, still, substitutes]), sizes, CLASSES)


def directions_of(setup: Setup) -> Tensor:
    """Return what the adversary knows: where each loud client's update points, [blocks, coordinates]."""
    protocol = replace(setup.protocol, mask=None, clipping=None)
    job = client_job(protocol, protocol.server.init(setup.initial))
    own = torch.zeros(BLOCKS, TENSORS * CLASSES * FEATURES, dtype=torch.float64)
    for block in setup.engine.map_clients(job, torch.arange(BLOCKS), setup.rng.child("directions")):
        for update in block.bounded.value.double().cpu():
            spread = by_block(update)
            owner = int(spread.square().sum(1).argmax())
            own[owner] = spread[owner]
    return torch.nn.functional.normalize(own)


def prepared(config: Config, folder: Path, machine: Machine, module: nn.Module, population: Packed) -> Setup:
    test = Samples(each_input(population.x, lambda x: x[:1]), population.y[:1])
    federation = Federation("a worst case", population, None, 0, test, public=True)
    methods = tuple(method for method in config.method if not method.needs_personal)  # the tiny model has no such part
    plain = replace(
        config, population=None, clients=None, evaluate="test", test_views=1, personal=(), personal_steps=0,
        method=methods,
    )  # fmt: skip
    return prepare(plain, folder / f"setup-{population.clients}.jsonl", machine, federation, module)


def endless(path: Path, plan: PrivacyPlan) -> Ledger:
    """Open a ledger for all trials: each stands for the only one of its own run; one file counts them all."""
    return Ledger(path, Budget(math.inf, plan.delta, plan.accountant, 10**9))
