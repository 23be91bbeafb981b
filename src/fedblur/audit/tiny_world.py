"""The tiny world of the worst-case check: loud and quiet clients on a model of many blocks, set up like any run.

A loud client's data give an update far outside the clipping ball, in a known direction, inside a block of its own. A
quiet client's sample is zero, and so is its update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedblur.accounting import PrivacyPlan
from fedblur.config import Config
from fedblur.data.population import Federation, Packed, Samples
from fedblur.errors import ConfigError
from fedblur.events import Event
from fedblur.ledger import Budget, Ledger
from fedblur.rng import Rng
from fedblur.round import client_job
from fedblur.sampling import Sampler
from fedblur.setup import Machine, Setup, prepare

BLOCKS, FEATURES, TENSORS, CLASSES = 200, 4, 4, 2
COHORT, FEWEST = 100, 300  # expected cohort, and clients of a trial, at least
_LOUD_SAMPLES = 4
_LOUDNESS = 28.0  # norm of a loud client's update in units of S
_MOST = 1_000_000  # clients


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
    """N: enough for a cohort in which nothing is rare, and for the fewest clients that a mechanism accepts."""
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
    """Loud clients (one per block), quiet ones up to N with one sample of zeros, and a substitute for each loud one."""
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
    """What the adversary knows: where each loud client's update points, [blocks, coordinates]."""
    protocol = replace(setup.protocol, mask=None, clipping=None)
    job = client_job(protocol, protocol.server.init(setup.initial))
    own = torch.zeros(BLOCKS, TENSORS * CLASSES * FEATURES, dtype=torch.float64)
    for block in protocol.engine.map_clients(job, torch.arange(BLOCKS), setup.rng.child("directions")):
        for update in block.bounded.value.double().cpu():
            spread = by_block(update)
            owner = int(spread.square().sum(1).argmax())
            own[owner] = spread[owner]
    return torch.nn.functional.normalize(own)


def prepared(config: Config, folder: Path, machine: Machine, module: nn.Module, population: Packed) -> Setup:
    test = Samples(population.x[:1], population.y[:1])
    federation = Federation("a worst case", population, None, 0, test)
    plain = replace(config, clients=None, evaluate="test", test_views=1)
    return prepare(plain, folder / f"setup-{population.clients}.jsonl", machine, federation, module)


def endless(path: Path, plan: PrivacyPlan) -> Ledger:
    """Each trial stands for the only one of its own run; one file counts them all."""
    return Ledger(path, Budget(math.inf, plan.delta, plan.accountant, 10**9))
