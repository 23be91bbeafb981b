"""Stage 1, sample a cohort. In: a stream of randomness. Out: the sorted ids of this round's clients.

Who takes part and how that is accounted for are one object: a `Sampler` draws the cohort and wraps the
round's event, so the two cannot disagree. The denominator of the round's mean is its `expected_cohort`, a
constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fedblur.core.errors import ConfigError
from fedblur.core.lazy import torch
from fedblur.core.registry import register
from fedblur.core.rng import Rng
from fedblur.privacy.events import Event, FixedSizeSampled, PoissonSampled

if TYPE_CHECKING:
    from torch import Tensor


class Sampler(Protocol):
    """A sampler decides who takes part in a round, and what that means for privacy."""

    @property
    def clients(self) -> int:
        """N, of the population."""

    @property
    def expected_cohort(self) -> float:
        """The constant that a round's sum is divided by; the size of the cohort that came is private."""

    @property
    def cohort_spread(self) -> float:
        """Standard deviation of the cohort's size."""

    @property
    def description(self) -> str: ...

    @property
    def independent(self) -> bool:
        """Whether one client's taking part says nothing about another's: what clients remember needs it."""

    def cohort(self, rng: Rng) -> Tensor:
        """Draw sorted client ids, int64; possibly none."""

    def event(self, inner: Event) -> Event:
        """Return the event of releasing `inner` on such a cohort."""

    def seen(self) -> Sampler:
        """Return the sampler of the same cohorts if a release shows how many clients came."""


class Sampling(Protocol):
    """A part of kind "sampling": makes the sampler for a population."""

    def sampler(self, clients: int, rate: float) -> Sampler: ...


@dataclass(frozen=True)
class PoissonSampler:
    """Each client joins on its own with probability `rate`, so the cohort's size is binomial.

    Formal guarantees: membership is independent between clients and rounds, as `PoissonSampled` assumes. A draw is
    a multiple of 2^-53, so a client joins with probability ⌊p·2^53⌋/2^53: never above p. At rate 1 everyone joins.

    Where the cohort's size is seen, sampling amplifies nothing here: given the size, that one client came means that
    another one did not, so a client moves the sum by its own update and by somebody else's (up to 2S). An adversary
    with all others' data would learn more than `PoissonSampled` accounts for.
    """

    clients: int  # N
    rate: float  # p
    size_seen: bool = False

    @property
    def expected_cohort(self) -> float:
        return self.rate * self.clients

    @property
    def cohort_spread(self) -> float:
        return math.sqrt(self.clients * self.rate * (1 - self.rate))

    @property
    def independent(self) -> bool:
        return True

    @property
    def description(self) -> str:
        seen = "; how many came can be seen, so sampling amplifies nothing" if self._exposed else ""
        return f"Poisson: each of {self.clients:,} clients joins a round with probability {self.rate:g}{seen}"

    @property
    def _exposed(self) -> bool:
        return self.size_seen and self.rate < 1

    def cohort(self, rng: Rng) -> Tensor:
        chance = math.floor(self.rate * 2.0**53) * 2.0**-53
        return torch.from_numpy(np.flatnonzero(rng.uniform(self.clients) < chance))

    def event(self, inner: Event) -> Event:
        return inner if self._exposed else PoissonSampled(self.rate, inner)

    def seen(self) -> PoissonSampler:
        return replace(self, size_seen=True)


@dataclass(frozen=True)
class FixedSizeSampler:
    """Exactly `size` clients, every such set equally likely: those with the smallest of N uniform draws.

    Formal guarantees: without replacement, as `FixedSizeSampled` assumes, and every set exactly as likely as any other:
    draws are repeated where the last one in and the first one out are equal.
    """

    clients: int  # N
    size: int

    @property
    def expected_cohort(self) -> float:
        return float(self.size)

    @property
    def cohort_spread(self) -> float:
        return 0.0

    @property
    def independent(self) -> bool:
        return self.size == self.clients

    @property
    def description(self) -> str:
        return f"fixed size: {self.size:,} of {self.clients:,} clients a round, without replacement"

    def cohort(self, rng: Rng) -> Tensor:
        draws = rng.uniform(self.clients)
        chosen = np.flatnonzero(draws <= np.partition(draws, self.size - 1)[self.size - 1])
        return torch.from_numpy(chosen) if len(chosen) == self.size else self.cohort(rng.child("again"))

    def event(self, inner: Event) -> Event:
        return FixedSizeSampled(self.clients, self.size, inner)

    def seen(self) -> FixedSizeSampler:
        return self  # everyone knows the size


@dataclass(frozen=True)
class FullSampler:
    """Everyone, every round: no sampling, so no amplification."""

    clients: int  # N

    @property
    def expected_cohort(self) -> float:
        return float(self.clients)

    @property
    def cohort_spread(self) -> float:
        return 0.0

    @property
    def independent(self) -> bool:
        return True

    @property
    def description(self) -> str:
        return f"full participation: all {self.clients:,} clients in every round"

    def cohort(self, rng: Rng) -> Tensor:
        return torch.arange(self.clients)

    def event(self, inner: Event) -> Event:
        return inner

    def seen(self) -> FullSampler:
        return self


@register("sampling", "poisson")
@dataclass(frozen=True)
class Poisson:
    """Each client joins independently with probability p. The default, and the best understood."""

    def sampler(self, clients: int, rate: float) -> Sampler:
        check_population(clients, rate)
        return PoissonSampler(clients, rate)


@register("sampling", "fixed")
@dataclass(frozen=True)
class Fixed:
    """Exactly round(p·N) clients a round. Needs two to four times Poisson's noise (`accountants.py`)."""

    def sampler(self, clients: int, rate: float) -> Sampler:
        check_population(clients, rate)
        return FixedSizeSampler(clients, cohort_size(clients, rate))


@register("sampling", "full")
@dataclass(frozen=True)
class Full:
    """All clients in every round; p must be 1."""

    def sampler(self, clients: int, rate: float) -> Sampler:
        check_population(clients, rate)
        if rate != 1:
            raise ConfigError(f'sample_rate={rate:g} must be 1 with sampling = "full"; or use sampling = "poisson"')
        return FullSampler(clients)


def each_once(ids: Tensor) -> bool:
    """Return whether a cohort names no client twice, in rising order: who is named twice is summed twice."""
    return bool((ids[1:] > ids[:-1]).all())


def cohort_size(clients: int, rate: float) -> int:
    """Return the size of a cohort that is always as large; refuse one of nobody."""
    size = round(rate * clients)
    if size < 1:
        raise ConfigError(
            f"sample_rate={rate:g} of {clients} clients rounds to a cohort of 0; "
            f"set sample_rate to {1 / clients:.3g} or more"
        )
    return size


def check_population(clients: int, rate: float) -> None:
    if clients < 1:
        raise ConfigError(f"clients={clients} must be 1 or more")
    if not 0 < rate <= 1:
        raise ConfigError(f"sample_rate={rate:g} must be in (0, 1]")
