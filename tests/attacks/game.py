"""The membership game: an adversary who knows everyone but the target sees one run's released model.

The target is the last client. Whether it exists alternates, so an adversary who learns nothing and always says
"absent" is right half of the time, by construction and not by chance. All rounds are real ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedblur
from fedblur.core.config import from_dict
from fedblur.core.rng import Rng, Seeded
from fedblur.engines import Engine, Simulated, Task
from fedblur.experiments.audit.worst_case import Existing
from fedblur.learning.client import Block, ClientJob
from fedblur.privacy.ledger import Budget, Ledger
from fedblur.privacy.mechanisms.base import Release
from fedblur.privacy.mechanisms.gaussian import FixedPoint
from fedblur.training.machine import Machine
from fedblur.training.round import Protocol, client_job, run_round
from fedblur.training.setup import Setup, prepare

FEATURES, CLASSES = 16, 10
TRAINING = Seeded.root(0)
Adversary = Callable[[list[Tensor]], bool]  # the models after each round → whether the target took part


class Known:
    """An engine whose training the adversary knows: shuffles too come from a public stream, only noise is secret.

    From the same start, a population's messages are always the same: they are computed once.
    """

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self._done: dict[tuple[object, ...], list[Block]] = {}

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def map_clients(self, job: ClientJob, ids: Tensor, rng: Rng) -> Iterator[Block]:
        start = [float(tensor.double().sum()) for tensor in job.start.values()]
        key = (*ids.tolist(), *start)
        if key not in self._done:
            self._done[key] = list(self.inner.map_clients(job, ids, TRAINING))
        yield from self._done[key]


@dataclass(frozen=True)
class Game:
    """A run that is ready to be played many times."""

    setup: Setup
    folder: Path

    @property
    def clients(self) -> int:
        return self.setup.federation.train.clients

    @property
    def protocol(self) -> Protocol:
        return self.setup.protocol

    @property
    def release(self) -> Release:
        """The first round's."""
        job = client_job(self.protocol, self.protocol.server.init(self.setup.initial))
        width, bound = job.message.width(self.protocol.layout.total), job.message.l2_bound(job.clip_norm)
        return Release(
            width, bound, self.protocol.plan.noise_multiplier, self.clients, self.setup.initial.device, round_=1
        )

    def population(self, present: bool) -> Tensor:
        return torch.arange(self.clients - (not present))

    def rows(self, present: bool) -> Tensor:
        """The first round's messages, [clients, d]."""
        job = client_job(self.protocol, self.protocol.server.init(self.setup.initial))
        blocks = self.setup.engine.map_clients(job, self.population(present), TRAINING)
        return torch.cat([block.bounded.value for block in blocks]).cpu()

    def total(self, present: bool) -> Tensor:
        """The first round's exact sum, [d] int64: known to the adversary for either guess."""
        job = client_job(self.protocol, self.protocol.server.init(self.setup.initial))
        ids = self.population(present)
        task = Task(job, self.protocol.mechanism, replace(self.release, cohort=len(ids)), ids)
        total, _ = self.protocol.sums.total(task, TRAINING)
        return job.message.decode(total, self.protocol.layout.total)[0].cpu()

    def play(self, present: bool, rng: Rng) -> list[Tensor]:
        """One run: the models that it releases."""
        plan, ids, config = self.protocol.plan, self.population(present), self.setup.config
        sampler = Existing(plan.sampler, config.sampling.sampler(len(ids), config.sample_rate), ids)
        self.folder.joinpath("ledger.jsonl").unlink(missing_ok=True)  # each run spends a budget of its own
        ledger = Ledger(self.folder / "ledger.jsonl", Budget(math.inf, 1e-3, plan.accountant, plan.rounds))
        protocol = replace(self.protocol, plan=replace(plan, sampler=sampler), ledger=ledger)
        state, models = protocol.server.init(self.setup.initial), []
        for round_ in range(1, plan.rounds + 1):
            state = run_round(protocol, state, rng.child("round", round_)).state
            models.append(state.theta.cpu())
        return models

    def right(self, adversary: Adversary, trials: int, rng: Rng | None = None) -> int:
        """How often the adversary is right. `rng`: None for noise of the operating system."""
        streams = self.setup.rng if rng is None else rng
        return sum(
            adversary(self.play(present, streams.child("trial", trial))) == present
            for trial in range(trials)
            for present in [bool(trial % 2)]
        )

    def whole(self, model: Tensor) -> Tensor:
        """The numbers of grid steps, float64, that the first model was made of; between two of them, none was."""
        mean = (model - self.setup.initial.cpu()).double()
        return mean * self.protocol.plan.expected_cohort / FixedPoint.of(self.release).step


def game(
    folder: Path, sizes: list[int], samples: tuple[np.ndarray, np.ndarray] | None = None,
    module: nn.Module | None = None, machine: Machine | None = None, seed: int = 1, **settings: Any,
) -> Game:  # fmt: skip
    """A game on random clients of these sizes, or on these samples."""
    x, y = samples if samples is not None else random_samples(sum(sizes), seed)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    data = fedblur.federation_from_arrays(x, y, owners, x[:10], y[:10], classes=CLASSES)
    base: dict[str, Any] = {"delta": 1e-3, "rounds": 1, "sample_rate": 1.0, "clip_norm": 0.1, "model": "logistic"}
    machine = machine or Machine(device="cpu", engine="vectorised")
    setup = prepare(from_dict({**base, **settings}), folder / "setup.jsonl", machine, data, module)
    known = Simulated(Known(setup.engine))
    source = replace(setup.source, sums=known, engine=known.engine)
    return Game(replace(setup, protocol=replace(setup.protocol, sums=known), source=source), folder)


def random_samples(count: int, seed: int, features: int = FEATURES) -> tuple[np.ndarray, np.ndarray]:
    dice = np.random.default_rng(seed)
    return dice.normal(size=(count, features)).astype(np.float32), dice.integers(0, CLASSES, count)


def allowed(epsilon: float, delta: float, trials: int) -> float:
    """How often anyone may be right on average, at this epsilon and delta."""
    return trials * (math.exp(epsilon) + delta) / (1 + math.exp(epsilon))
