"""The sharpest test of a mechanism: one release, many times, with and without one client of the worst kind.

A tiny model of many blocks of coordinates, and one client per block whose data give an update far outside the clipping
ball, in a direction that the adversary knows, inside its block. Each release is one real `run_round` (cohort, local
training, methods, clip, mechanism, ledger, server step) in which half of these clients exist, the other half not. So
one round holds many pairs of neighbours: for each block, populations that differ in its client. From a block's released
coordinates the adversary computes a few statistics; `lower_bound` turns their counts, with and without the client, into
an epsilon that the mechanism provably exceeds, with 95 % confidence.

Everyone who exists takes part, so nothing hides a client: the bound comes close to the accountant's epsilon, and a
mechanism that is weaker than it claims is pushed above it.
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

from fedblur.accounting import Accountant, make_plan
from fedblur.audit.estimate import Values, lower_bound
from fedblur.bounding import Bounding
from fedblur.config import LocalTraining
from fedblur.data.population import Packed
from fedblur.engines import LocalEngine
from fedblur.errors import ConfigError
from fedblur.events import Event
from fedblur.functional import Layout, as_function, check_model, initial_vector
from fedblur.ledger import Budget, Ledger
from fedblur.mechanisms.base import Conditions, MechanismPart
from fedblur.mechanisms.gaussian import Gaussian
from fedblur.methods import Method
from fedblur.rng import Rng, make_rng
from fedblur.round import Protocol, client_job, run_round
from fedblur.sampling import FullSampler
from fedblur.server import ServerState, Sgd

CPU = torch.device("cpu")
BLOCKS, _FEATURES, _TENSORS, _CLASSES = 200, 4, 4, 2
STATISTICS = ("projection", "length", "untouched coordinates", "largest coordinate", "change since a round without it")


class Tiny(nn.Module):
    """Four tensors of one shape whose sum is a linear classifier: an update is spread evenly over all of them."""

    def __init__(self) -> None:
        super().__init__()
        shape = (_CLASSES, BLOCKS * _FEATURES)
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for _ in range(_TENSORS)])

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ torch.stack(list(self.parts)).sum(0).T


@dataclass(frozen=True)
class WorstCase:
    """What is checked: a mechanism with its methods, and the epsilon that it claims for one release."""

    mechanism: MechanismPart = field(default_factory=Gaussian)
    methods: tuple[Method, ...] = ()
    bounding: Bounding = "clip"
    accountant: Accountant = "pld"
    epsilon: float = 2.0
    delta: float = 0.01
    clip_norm: float = 1.0
    seed: int | None = None  # None: noise from the operating system, as in a private run


@dataclass(frozen=True)
class Finding:
    """The bound, and what it is to be compared with."""

    claimed: float
    lower_bound: float
    repetitions: int  # of each side
    best: str  # the statistic that tells most on its own

    @property
    def broken(self) -> bool:
        """Whether the mechanism is weaker than it claims, with 95 % confidence."""
        return self.lower_bound > self.claimed


@dataclass(frozen=True)
class Existing:
    """Everyone who exists takes part; who exists is part of the pair of populations. The plan's N is public."""

    everyone: FullSampler
    ids: Tensor

    @property
    def clients(self) -> int:
        return self.everyone.clients

    @property
    def expected_cohort(self) -> float:
        return self.everyone.expected_cohort

    @property
    def cohort_spread(self) -> float:
        return 0.0

    @property
    def description(self) -> str:
        return f"all {len(self.ids)} clients that exist"

    def cohort(self, rng: Rng) -> Tensor:
        return self.ids

    def event(self, inner: Event) -> Event:
        return self.everyone.event(inner)

    def seen(self) -> Existing:
        return self


def check_worst_case(
    case: WorstCase, repetitions: int = 10_000, tick: Callable[[int], None] = lambda done: None
) -> Finding:
    """Release until each side has so many outcomes, and bound epsilon from below."""
    if not 0 < case.epsilon < math.inf:
        raise ConfigError(f"epsilon={case.epsilon:g} claims nothing that a release could break; give a finite one")
    rounds = -(-repetitions * 2 // BLOCKS)
    if rounds < 4:
        raise ConfigError(f"repetitions={repetitions} must be at least {2 * BLOCKS}: fewer bound nothing")
    present, absent = [], []
    with tempfile.TemporaryDirectory() as folder:
        protocol, state = _protocol(case, Path(folder), rounds + 1)
        directions, rng = _directions(protocol, state), make_rng(case.seed)
        nobody = _release(protocol, state, torch.empty(0, dtype=torch.int64), rng.child("round", 0))
        for round_ in range(1, rounds + 1):
            there = torch.arange(round_ % 2, BLOCKS, 2)
            released = _release(protocol, state, there, rng.child("round", round_))
            rows = _statistics(released, nobody, directions)
            present.append(rows[there])
            absent.append(np.delete(rows, there.numpy(), axis=0))
            tick(round_)
    return _finding(case, np.concatenate(present), np.concatenate(absent))


def _release(protocol: Protocol, state: ServerState, there: Tensor, rng: Rng) -> Tensor:
    """[blocks, coordinates] of one round's noisy sum, in units of the noise that is claimed."""
    plan = protocol.plan
    assert isinstance(plan.sampler, FullSampler)
    ids = torch.cat([there, torch.arange(BLOCKS, plan.sampler.clients)])
    side = replace(protocol, plan=replace(plan, sampler=Existing(plan.sampler, ids)))
    moved = run_round(side, state, rng).state.theta - state.theta
    scale = plan.expected_cohort / (protocol.clip_norm * max(plan.noise_multiplier, 1e-9))
    return _by_block(moved.double()) * scale


def _by_block(vector: Tensor) -> Tensor:
    parts = vector.view(_TENSORS, _CLASSES, BLOCKS, _FEATURES)
    return parts.permute(2, 0, 1, 3).reshape(BLOCKS, -1)


def _statistics(released: Tensor, nobody: Tensor, directions: Tensor) -> Values:
    """[blocks, statistics]. `nobody` is an earlier release without any of the clients: the adversary may know it."""
    along = (released * directions).sum(1)
    figures = (
        along,
        released.norm(dim=1),
        (released == 0).sum(1).double(),
        released.abs().amax(1),
        along - (nobody * directions).sum(1),
    )
    return np.asarray(torch.stack(figures, dim=1))


def _finding(case: WorstCase, present: Values, absent: Values) -> Finding:
    alone = [lower_bound(present[:, [i]], absent[:, [i]], case.delta) for i in range(len(STATISTICS))]
    best = STATISTICS[int(np.argmax(alone))] if max(alone) > 0 else "none"
    return Finding(case.epsilon, lower_bound(present, absent, case.delta), len(present), best)


def _protocol(case: WorstCase, folder: Path, rounds: int) -> tuple[Protocol, ServerState]:
    module, population = Tiny(), _population()
    check_model(module, population.shape, _CLASSES)
    layout, sampler = Layout.of(module), FullSampler(population.clients)
    mechanism = case.mechanism.bind(Conditions(layout.total, case.clip_norm, sampler.expected_cohort, sampler.clients))
    plan = make_plan(sampler, mechanism, rounds=1, delta=case.delta, accountant=case.accountant, epsilon=case.epsilon)
    protocol = Protocol(
        plan=plan,
        engine=LocalEngine(population, CPU, vectorise=True, block_size=128),
        mechanism=mechanism,
        server=Sgd(),
        averaging=None,
        # each release stands for the only one of its own run; one file counts them all
        ledger=Ledger(folder / "ledger.jsonl", Budget(math.inf, case.delta, case.accountant, rounds)),
        forward=as_function(module),
        layout=layout,
        local=LocalTraining(steps=1, batch_size=4, learning_rate=100.0 * case.clip_norm),
        methods=case.methods,
        clip_norm=case.clip_norm,
        bounding=case.bounding,
    )
    return protocol, protocol.server.init(initial_vector(module))


def _population() -> Packed:
    """One loud client per block with four samples in its features, then as many quiet ones with a sample of zeros."""
    loud = torch.eye(BLOCKS).repeat_interleave(_FEATURES, dim=1).repeat_interleave(4, dim=0)  # [4·blocks, features]
    x = torch.cat([loud, torch.zeros(BLOCKS // 2, BLOCKS * _FEATURES)])
    sizes = torch.tensor([4] * BLOCKS + [1] * (BLOCKS // 2))
    return Packed(x, torch.zeros(len(x), dtype=torch.int64), torch.cumsum(sizes, 0) - sizes, sizes, _CLASSES)


def _directions(protocol: Protocol, state: ServerState) -> Tensor:
    """What the adversary knows: where each loud client's update points, [blocks, coordinates]."""
    ids = torch.arange(BLOCKS)
    blocks = protocol.engine.map_clients(client_job(protocol, state), ids, make_rng(0))
    updates = torch.cat([block.bounded.value for block in blocks]).double()  # all of a size: in the order of ids
    own = torch.stack([_by_block(update)[block] for block, update in enumerate(updates)])
    return torch.nn.functional.normalize(own)
