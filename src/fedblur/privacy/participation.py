"""Stage 1, sample a cohort by who took part before: samplers that need no trust in secret coins.

In: the number of a release, who took part in earlier ones, a stream of randomness. Out: the sorted ids of a cohort.

    min_separation   a client takes part at least b releases apart, and at most k times; among those, at random
    in_turn          each client is in one of G groups for good; the groups take turns
    cyclic           the same groups, and inside the group whose turn it is each member flips a secret coin

A release has a number: how many rows of the ledger there are once it is paid. A round that a private run repeats after
a crash is another release, so distances and turns are counted in releases, as they are accounted for. Where rounds
were counted, a repeated one would let a client take part twice, one release apart.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedblur.core.config import demand
from fedblur.core.errors import ConfigError, PrivacyError
from fedblur.core.lazy import torch
from fedblur.core.registry import register
from fedblur.core.rng import Rng
from fedblur.privacy.events import CyclicSampled, Event, InTurn, MinSeparated
from fedblur.privacy.sampling import Sampler, check_population, cohort_size

if TYPE_CHECKING:
    from torch import Tensor

Ids = NDArray[np.int64]
S = TypeVar("S", bound="Scheduled")


class Attendance:
    """The past of a run's clients: who took part in which release. `participation_record.py` keeps it on disk."""

    def __init__(self, clients: int = 0) -> None:
        self.last = np.zeros(clients, dtype=np.int64)  # the number of each client's latest release; 0: none yet
        self.times = np.zeros(clients, dtype=np.int64)  # how often each took part
        self._cohorts: dict[int, Ids] = {}

    @property
    def latest(self) -> int:
        """Return the number of the latest release that is recorded; 0 where there is none."""
        return next(reversed(self._cohorts), 0)

    def cohort(self, number: int) -> Ids | None:
        """Return who is recorded for a release; None for one that nobody was chosen for."""
        return self._cohorts.get(number)

    def note(self, number: int, round_: int, ids: Ids) -> None:
        """Record a cohort before any of its clients is asked to train. Numbers rise."""
        self.take_in(number, ids)

    def take_in(self, number: int, ids: Ids) -> None:
        """Count a cohort that is recorded."""
        if number != self.latest + 1:
            raise PrivacyError(f"release {number} comes after release {self.latest} in the record of participation")
        self._cohorts[number] = ids
        self.last[ids] = number
        self.times[ids] += 1


@dataclass(frozen=True)
class Scheduled(ABC):
    """A `Sampler` whose cohorts follow from the number of the release, and perhaps from who took part before.

    Formal guarantee: no cohort has a client who `may` not be in it, whatever was recorded, in whatever run that
    was killed and resumed: that is what `event` accounts for.
    """

    clients: int  # N
    stream: str  # of the run's releases; "" while it is planned

    recorded: ClassVar[bool] = False  # whether cohorts depend on who took part before

    @property
    @abstractmethod
    def expected_cohort(self) -> float: ...

    @property
    @abstractmethod
    def cohort_spread(self) -> float: ...

    @property
    @abstractmethod
    def description(self) -> str: ...

    @property
    def independent(self) -> bool:
        return False

    @abstractmethod
    def chosen(self, number: int, past: Attendance, rng: Rng) -> Ids:
        """Choose the sorted clients of a release; `past` is what a `recorded` sampler needs."""

    @abstractmethod
    def may(self, number: int, past: Attendance) -> NDArray[np.bool_]:
        """Return which clients may take part in a release, [N]."""

    @abstractmethod
    def returns(self, client: int, number: int, past: Attendance) -> int | None:
        """Return the first release, this one or a later one, that a client may take part in; None: never again."""

    @abstractmethod
    def event(self, inner: Event) -> Event: ...

    def cohort(self, rng: Rng) -> Tensor:
        raise PrivacyError(
            f"cohorts of {type(self).__name__} depend on the number of the release and on who took part before; "
            "they are drawn in a run only (cohort_of)"
        )

    def seen(self: S) -> S:
        return self  # no amplification rests on a cohort's size, except that of coins

    def in_stream(self: S, stream: str) -> S:
        return replace(self, stream=stream)

    def demand_enough(self, rounds: int) -> None:  # noqa: B027, only those that count participations can run dry
        """Refuse a plan in which so many rounds could find too few clients."""


def cohort_of(sampler: Sampler, past: Attendance, number: int, round_: int, rng: Rng) -> Tensor:
    """Draw the cohort of a release, recorded before this returns where later cohorts depend on it.

    A release that has a cohort on record keeps it: its round is repeated, and was not paid for or gives the very same
    release. So nobody trains for a release who is not in its record, and nobody is charged twice for one.
    """
    if not isinstance(sampler, Scheduled):
        return sampler.cohort(rng)
    ids = past.cohort(number) if sampler.recorded else None
    if ids is None:
        ids = sampler.chosen(number, past, rng)
        if not sampler.may(number, past)[ids].all():
            raise PrivacyError(f"release {number}: a client was chosen who may not take part yet")
        if sampler.recorded:
            past.note(number, round_, ids)
    return torch.from_numpy(ids)


@dataclass(frozen=True)
class MinSeparationSampler(Scheduled):
    """Exactly `size` of the clients who may take part again, every such set equally likely."""

    size: int
    separation: int  # b
    at_most: int  # k; 0: as often as the separation allows

    recorded: ClassVar[bool] = True

    @property
    def expected_cohort(self) -> float:
        return float(self.size)

    @property
    def cohort_spread(self) -> float:
        return 0.0

    @property
    def description(self) -> str:
        often = f", at most {self.at_most} times" if self.at_most else ""
        return (
            f"minimum separation: {self.size:,} of {self.clients:,} clients a round, each at least {self.separation} "
            f"rounds apart{often}; no secret sampling is assumed"
        )

    def chosen(self, number: int, past: Attendance, rng: Rng) -> Ids:
        free = np.flatnonzero(self.may(number, past))
        if len(free) < self.size:
            raise PrivacyError(
                f"{len(free)} clients may take part in release {number}, and a cohort is {self.size}: the others took "
                f"part less than {self.separation} releases ago, or {self.at_most or 'as many'} times; start a new run "
                "with a lower sample_rate or separation"
            )
        draws = rng.uniform(self.clients)[free]
        return np.sort(free[np.argsort(draws, kind="stable")[: self.size]])

    def returns(self, client: int, number: int, past: Attendance) -> int | None:
        if self.at_most and past.times[client] >= self.at_most:
            return None
        last = int(past.last[client])
        return max(number, last + self.separation) if last else number

    def may(self, number: int, past: Attendance) -> NDArray[np.bool_]:
        rested = (past.last == 0) | (number - past.last >= self.separation)
        return np.asarray(rested & (past.times < self.at_most) if self.at_most else rested)

    def event(self, inner: Event) -> Event:
        return MinSeparated(self.separation, self.at_most, self.stream, inner)

    def demand_enough(self, rounds: int) -> None:
        """Refuse a plan in which a cohort could find too few clients who may take part.

        Formal guarantee: with a plan that passes, `chosen` always finds enough. Before release t at most (b−1)·m
        clients rest, and ⌊(t−1)·m/k⌋ have taken part k times.
        """
        worn_out = 0
        if self.at_most and self.at_most < -(-rounds // self.separation):
            worn_out = (rounds - 1) * self.size // self.at_most
        needed = self.separation * self.size + worn_out
        if needed <= self.clients:
            return
        limit = f" ({worn_out:,} may have taken part {self.at_most} times before the last one)" if worn_out else ""
        way_out = ", or raise at_most" if worn_out else f" (to {1 / self.separation:.3g} or less)"
        raise ConfigError(
            f"cohorts of {self.size} whose clients come back after {self.separation} rounds need {needed:,} clients"
            f"{limit}, and there are {self.clients:,}; lower sampling.rounds or sample_rate{way_out}"
        )


@dataclass(frozen=True)
class InTurnSampler(Scheduled):
    """All clients of one group; release t is of group t modulo G."""

    groups: int  # G

    @property
    def separation(self) -> int:
        return self.groups

    @property
    def expected_cohort(self) -> float:
        return self.clients / self.groups

    @property
    def cohort_spread(self) -> float:
        return math.sqrt(self.clients / self.groups * (1 - 1 / self.groups))

    @property
    def description(self) -> str:
        return (
            f"in turn: each of {self.clients:,} clients is in one of {self.groups} groups for good, and takes part "
            f"every {self.groups} rounds; no secret sampling is assumed"
        )

    def chosen(self, number: int, past: Attendance, rng: Rng) -> Ids:
        return np.flatnonzero(self.may(number, past))

    def may(self, number: int, past: Attendance) -> NDArray[np.bool_]:
        return np.asarray(group_of(np.arange(self.clients), self.groups) == number % self.groups)

    def returns(self, client: int, number: int, past: Attendance) -> int | None:
        return number + int(group_of(np.array([client]), self.groups)[0] - number) % self.groups

    def event(self, inner: Event) -> Event:
        return InTurn(self.groups, self.stream, inner)


@dataclass(frozen=True)
class CyclicSampler(Scheduled):
    """The clients of one group who join with probability `rate`; release t is of group t modulo G.

    Formal guarantee: coins are independent between clients and rounds, as `CyclicSampled` assumes; a client joins with
    probability ⌊rate·2^53⌋/2^53, never above `rate`.
    """

    groups: int  # G
    rate: float  # inside a group
    size_seen: bool = False

    @property
    def separation(self) -> int:
        return self.groups

    @property
    def expected_cohort(self) -> float:
        return self.rate * self.clients / self.groups

    @property
    def cohort_spread(self) -> float:
        share = self.rate / self.groups
        return math.sqrt(self.clients * share * (1 - share))

    @property
    def description(self) -> str:
        return (
            f"cyclic Poisson: {self.groups} groups of {self.clients:,} clients take turns, and each member of a group "
            f"joins its round with probability {self.rate:g}"
        )

    def chosen(self, number: int, past: Attendance, rng: Rng) -> Ids:
        chance = math.floor(self.rate * 2.0**53) * 2.0**-53
        return np.flatnonzero(self.may(number, past) & (rng.uniform(self.clients) < chance))

    def may(self, number: int, past: Attendance) -> NDArray[np.bool_]:
        return np.asarray(group_of(np.arange(self.clients), self.groups) == number % self.groups)

    def returns(self, client: int, number: int, past: Attendance) -> int | None:
        return number + int(group_of(np.array([client]), self.groups)[0] - number) % self.groups

    def seen(self) -> CyclicSampler:
        return replace(self, size_seen=True)

    def event(self, inner: Event) -> Event:
        if self.size_seen and self.rate < 1:  # given a cohort's size, a client's coin is not independent of the others'
            return InTurn(self.groups, self.stream, inner)
        return CyclicSampled(self.groups, self.rate, self.stream, inner)


def group_of(clients: Ids, groups: int) -> Ids:
    """Return the group of each client: a public hash of its number alone (SplitMix64), modulo `groups`."""
    with np.errstate(over="ignore"):
        x = clients.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x % np.uint64(groups)).astype(np.int64)


@register("sampling", "min_separation")
@dataclass(frozen=True)
class MinSeparation:
    """round(p·N) clients a round, each at least `rounds` rounds apart: no secret coins are needed.

    The server keeps a record of who took part, and nobody trains who comes too early.
    """

    rounds: int = 5  # b: a client takes part again after this many at the earliest
    at_most: int = 0  # k: how often a client takes part in a run; 0: as often as `rounds` allows

    scheduled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        demand(self.rounds >= 1, "sampling.rounds", self.rounds, "must be 1 or more")
        demand(self.at_most >= 0, "sampling.at_most", self.at_most, "must be 0 (no limit) or more")

    @property
    def separation(self) -> int:
        return self.rounds

    def sampler(self, clients: int, rate: float) -> Sampler:
        check_population(clients, rate)
        size = cohort_size(clients, rate)
        sampler = MinSeparationSampler(clients, "", size, self.rounds, self.at_most)
        sampler.demand_enough(1)
        return sampler


@register("sampling", "in_turn")
@dataclass(frozen=True)
class Turns:
    """Groups in turn: each client is in one of `groups` groups for good. p must be 1/groups."""

    groups: int = 10  # G

    scheduled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        demand(self.groups >= 1, "sampling.groups", self.groups, "must be 1 or more")

    @property
    def separation(self) -> int:
        return self.groups

    def sampler(self, clients: int, rate: float) -> Sampler:
        check_population(clients, rate)
        if not math.isclose(rate * self.groups, 1, rel_tol=1e-6):
            raise ConfigError(
                f'sample_rate={rate:g} must be 1/groups = {1 / self.groups:.6g}: with sampling = "in_turn" all of a '
                f'group take part; for some of it use "cyclic"'
            )
        return InTurnSampler(clients, "", self.groups)


@register("sampling", "cyclic")
@dataclass(frozen=True)
class Cyclic:
    """Groups in turn, and secret coins inside the group: each of its members joins with probability p·groups."""

    groups: int = 5  # G

    scheduled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        demand(self.groups >= 1, "sampling.groups", self.groups, "must be 1 or more")

    @property
    def separation(self) -> int:
        return self.groups

    def sampler(self, clients: int, rate: float) -> Sampler:
        check_population(clients, rate)
        inside = rate * self.groups
        if inside > 1 + 1e-9:
            raise ConfigError(
                f"sample_rate={rate:g} is more than a group of {self.groups}: set it to {1 / self.groups:.3g} or less, "
                "or take fewer groups"
            )
        return CyclicSampler(clients, "", self.groups, min(1.0, inside))
