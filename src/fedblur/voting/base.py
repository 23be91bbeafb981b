"""Settings of all voting methods, and the contract of an electorate: clients as voters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor, nn

from fedblur.core.errors import ConfigError, RunError
from fedblur.core.rng import Rng
from fedblur.data.population import Population
from fedblur.privacy.events import Event, Votes

if TYPE_CHECKING:
    from fedblur.core.config import Config
    from fedblur.engines.local import EngineName
    from fedblur.privacy.accounting import PrivacyPlan
    from fedblur.training.loop import Run


class Electorate(Protocol):
    """The clients as voters."""

    @property
    def at_once(self) -> int:
        """The number of clients to ask together."""

    def votes(self, ids: Tensor, x: Tensor, rng: Rng) -> Tensor:
        """Return [clients, samples, classes]: each client's vote on each sample, a point of the simplex.

        A client's vote depends on its own data, on `x` and on public constants alone.
        """


@dataclass(frozen=True)
class Booth:
    """All that an electorate is made from."""

    population: Population
    module: nn.Module  # the student's model, as it starts
    device: torch.device
    engine: EngineName
    rng: Rng


@dataclass(frozen=True)
class Voting:
    """Settings of the pool, the votes and the student."""

    queries: int | None = None  # Q_v, samples that get a label; None: 500, or half of the pool where that is smaller
    pool_share: float = 0.1  # of the training clients; these are reserved: their labels are dropped, they do not vote
    threshold: float = 0.0  # confident voting: answer only where this share of all voters agrees; 0: answer all
    checks: int | None = None  # samples whose agreement is checked; None: twice the queries. Only with a threshold
    check_noise: float = 3.0  # σ₁/σ_v: the noise of a check, in units of the noise of a vote
    student_steps: int = 1500  # of SGD, on the public samples with noisy labels
    student_batch_size: int = 64  # samples in each of them
    student_learning_rate: float = 0.05  # of each of them
    consistency: float = 1.0  # weight of the semi-supervised term; 0: pseudo-labels only
    confidence: float = 0.95  # how sure the student must be of a sample to learn from its own prediction

    part_name: ClassVar[str]  # set by @register
    title: ClassVar[str]  # as a table prints it

    def __post_init__(self) -> None:
        self._demand(self.queries is None or self.queries >= 1, "queries", "must be at least 1")
        self._demand(0 < self.pool_share < 1, "pool_share", "must be in (0, 1)")
        self._demand(0 <= self.threshold < 1, "threshold", "must be in [0, 1), a share of the voters")
        self._demand(self.checks is None or self.threshold > 0, "checks", "needs a threshold above 0")
        enough = self.checks is None or self.checks >= (self.queries or 1)
        self._demand(enough, "checks", f"must be at least queries={self.queries}")
        self._demand(1e-3 <= self.check_noise <= 1e6, "check_noise", "must be from 0.001 to 1e6")
        for name in ("student_steps", "student_batch_size"):
            self._demand(getattr(self, name) >= 1, name, "must be at least 1")
        self._demand(0 < self.student_learning_rate < math.inf, "student_learning_rate", "must be above 0")
        self._demand(0 <= self.consistency < math.inf, "consistency", "must be 0 or more")
        self._demand(0 <= self.confidence <= 1, "confidence", "must be in [0, 1]")

    def _demand(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ConfigError(f"method.{self.part_name}.{name}={getattr(self, name)!r} {rule}")

    def electorate(self, booth: Booth) -> Electorate:
        """Return the voters."""
        raise NotImplementedError

    def replan(self, config: Config, clients: int, event: Event) -> PrivacyPlan:
        """Recompute the plan of an election by N voters. How many samples were asked about depends on the pool."""
        from fedblur.voting.release import VoteNoise, plan_votes  # which imports this file

        if not isinstance(event, Votes):
            raise RunError("the ledger's first line plans no votes, config.json does")
        for key, planned in (("queries", event.queries), ("checks", event.checks)):
            if getattr(self, key) not in (None, planned):
                raise RunError(f"the ledger plans {planned} {key}, config.json says {getattr(self, key)}")
        return plan_votes(config, clients, VoteNoise(event.queries, event.checks, self.check_noise))

    @property
    def run(self) -> Callable[..., Run]:
        """The protocol, run in place of rounds."""
        from fedblur.voting.protocol import run_election  # which imports this file

        return run_election
