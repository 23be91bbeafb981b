"""The releases of a round as data: the ledger stores events, the accountants interpret them.

An event says how the clients of a round were chosen and how their sum was blurred; it says nothing about how
that is turned into an epsilon (`accounting.py`). A mechanism with noise of its own adds its event with
`@event_kind`. Reading is strict: an unknown kind or field is refused, never guessed.

Releases of a `Stream` belong together: which clients may take part in one follows from who took part in earlier ones,
or their noise is correlated. What n of them cost is not n times what one costs, and `flatten` says what it is.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fedblur.core.errors import PrivacyError, nearest

if TYPE_CHECKING:
    from fedblur.privacy.noise_matrices import NoiseMatrix


class Event:
    """Something that was computed from clients' updates and left the server's trusted part."""

    kind: ClassVar[str]


E = TypeVar("E", bound=type[Event])
_KINDS: dict[str, type[Event]] = {}
MOST_NOISE = 2.0**80  # far beyond any plan; accountants compute with all that is below


def event_kind(name: str) -> Callable[[E], E]:
    """Decorate a frozen dataclass that is written to the ledger under this name."""

    def add(event: E) -> E:
        _KINDS[name] = event
        event.kind = name
        return event

    return add


@event_kind("gaussian")
@dataclass(frozen=True)
class Gaussian(Event):
    """A sum of clipped updates plus Gaussian noise on every coordinate."""

    noise_multiplier: float  # σ: noise std / clip norm S

    def __post_init__(self) -> None:
        _demand_noise(noise_multiplier=self.noise_multiplier)


@event_kind("votes")
@dataclass(frozen=True)
class Votes(Event):
    """Labels by noisy plurality: `queries` of them, perhaps after `checks` of whether voters agree.

    One client moves the counts of a query, and the largest of them, by at most 1 in l2 norm. So all of it is one
    Gaussian mechanism, with 1/σ² = queries/noise_std² + checks/check_noise_std².
    """

    queries: int  # Q_v, answers at most
    noise_std: float  # σ_v, in votes
    checks: int
    check_noise_std: float  # σ₁, in votes

    def __post_init__(self) -> None:
        if self.queries < 1 or self.checks < 0:
            raise PrivacyError(f"queries={self.queries} must be 1 or more and checks={self.checks} 0 or more")
        _demand_noise(noise_std=self.noise_std, check_noise_std=self.check_noise_std)

    @property
    def noise_multiplier(self) -> float:
        """σ of the Gaussian mechanism that this is: noise over sensitivity, √Q of it for Q answers."""
        if self.noise_std == 0 or (self.checks and self.check_noise_std == 0):
            return 0.0
        checks = self.checks / self.check_noise_std**2 if self.checks else 0.0
        return 1 / math.sqrt(self.queries / self.noise_std**2 + checks)


@event_kind("distributed_discrete_gaussian")
@dataclass(frozen=True)
class DistributedDiscreteGaussian(Event):
    """A sum of whole vectors plus discrete Gaussian noise, in one draw or as the sum of clients' shares."""

    noise_std: float  # of the whole noise, in steps of the grid
    sensitivity: float  # B, the largest l2 norm of a client's vector, in steps
    dimension: int  # d'
    shares: int  # how many draws the noise may consist of, at most
    bound: str  # of Poisson sampling: "tight" or "general"

    def __post_init__(self) -> None:
        _check_discrete(self.noise_std, self.sensitivity, self.dimension, self.bound)
        if self.shares < 1:
            raise PrivacyError(f"shares={self.shares} must be 1 or more")


@event_kind("skellam")
@dataclass(frozen=True)
class Skellam(Event):
    """A sum of whole vectors plus Skellam noise, in however many shares."""

    noise_std: float  # in steps of the grid
    sensitivity: float  # B
    dimension: int  # d'
    bound: str

    def __post_init__(self) -> None:
        _check_discrete(self.noise_std, self.sensitivity, self.dimension, self.bound)


def _demand_noise(**noise: float) -> None:
    for name, value in noise.items():
        if not 0 <= value < MOST_NOISE:
            raise PrivacyError(f"{name}={value} must be 0 or more, finite, and below {MOST_NOISE:.0e}")


def _check_discrete(noise_std: float, sensitivity: float, dimension: int, bound: str) -> None:
    _demand_noise(noise_std=noise_std)
    if not 0 < sensitivity < math.inf or dimension < 1:
        raise PrivacyError(f"sensitivity={sensitivity} and dimension={dimension} must be above 0")
    if bound not in ("tight", "general"):
        raise PrivacyError(f'bound={bound!r} must be "tight" or "general"')


@event_kind("poisson_sampled")
@dataclass(frozen=True)
class PoissonSampled(Event):
    """`inner` on a cohort that each client joined on its own with probability `rate`."""

    rate: float  # p
    inner: Event

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise PrivacyError(f"sampling rate={self.rate} must be in (0, 1]")


@event_kind("fixed_size_sampled")
@dataclass(frozen=True)
class FixedSizeSampled(Event):
    """`inner` on a cohort of exactly `cohort` of the `population` clients, drawn without replacement."""

    population: int  # N
    cohort: int
    inner: Event

    def __post_init__(self) -> None:
        if not 1 <= self.cohort <= self.population:
            raise PrivacyError(f"cohort={self.cohort} must be between 1 and population={self.population}")


@event_kind("self_composed")
@dataclass(frozen=True)
class SelfComposed(Event):
    """`inner` released `count` times, each with fresh sampling and noise."""

    inner: Event
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise PrivacyError(f"count={self.count} must be 1 or more")


@event_kind("composed")
@dataclass(frozen=True)
class Composed(Event):
    """Several releases about the same clients, one after the other."""

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        if not self.events:
            raise PrivacyError("a composition of no events says nothing; leave it out")


@event_kind("private_selection")
@dataclass(frozen=True)
class PrivateSelection(Event):
    """The best of a secret, random number of trials, each of a configuration picked at random; only it is released.

    `trials` are all that one trial may release about a client, alternatives and not a sequence: the training of each
    configuration, and the noisy score of clients who do not train.
    """

    trials: tuple[Event, ...]
    shape: float  # η of the truncated negative binomial: 0 logarithmic, 1 geometric; inf: Poisson
    mean: float  # expected number of trials

    def __post_init__(self) -> None:
        if not self.trials:
            raise PrivacyError("a selection among no trials says nothing; leave it out")
        if not self.shape > -1 or not 1 < self.mean < math.inf:
            raise PrivacyError(f"shape={self.shape} must be above -1 and mean={self.mean} above 1 and finite")


@dataclass(frozen=True)
class Correlated(Event, ABC):
    """A sum of clipped updates plus one round's noise of many: y = Cx + z over a run's rounds, C lower triangular.

    It is no release by itself: what it costs follows from all rounds and from who takes part in which, so it stands
    inside a `Stream` only. Noise std is σ times the clip norm on each entry of z; C's diagonal is 1.
    """

    noise_multiplier: float  # σ of z

    def __post_init__(self) -> None:
        _demand_noise(noise_multiplier=self.noise_multiplier)
        _ = self.matrix  # which refuses coefficients that are none

    @property
    @abstractmethod
    def matrix(self) -> NoiseMatrix:
        """Return C."""


@event_kind("tree_noise")
@dataclass(frozen=True)
class TreeNoise(Correlated):
    """Noise on the nodes of a binary tree over the rounds, a fresh tree every `restart` rounds."""

    restart: int  # a power of two

    @property
    def matrix(self) -> NoiseMatrix:
        from fedblur.privacy.noise_matrices import Tree

        return Tree(self.restart)


@event_kind("toeplitz_noise")
@dataclass(frozen=True)
class ToeplitzNoise(Correlated):
    """Noise correlated by a banded Toeplitz matrix; c_1, c_2, … in units of 2^-20, c_0 = 1."""

    coefficients: tuple[int, ...]

    @property
    def matrix(self) -> NoiseMatrix:
        from fedblur.privacy.noise_matrices import Toeplitz

        return Toeplitz(self.coefficients)


@event_kind("blt_noise")
@dataclass(frozen=True)
class BltNoise(Correlated):
    """Noise correlated by a buffered linear Toeplitz matrix: c_k = Σ ω θ^(k−1), in units of 2^-20, c_0 = 1."""

    decays: tuple[int, ...]  # θ
    weights: tuple[int, ...]  # ω

    @property
    def matrix(self) -> NoiseMatrix:
        from fedblur.privacy.noise_matrices import Blt

        return Blt(self.decays, self.weights)


class Stream(Event, ABC):
    """One of the releases of one run, whose cost together follows from their number and from who may take part.

    `stream` is the run's own random name, so that the releases of two runs never count as those of one. It is empty
    while a run is planned; a ledger takes no such event.
    """

    stream: str
    inner: Event

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{0,64}", self.stream):
            raise PrivacyError(f"stream={self.stream!r} must be hexadecimal digits")
        if not isinstance(self.inner, Gaussian | Correlated):
            raise PrivacyError(
                f"{type(self.inner).__name__} has no bound where clients take turns or keep a distance; set mechanism "
                '= "gaussian", or a mechanism of correlated noise'
            )

    @abstractmethod
    def resolved(self, count: int) -> tuple[Event, int]:
        """Return an ordinary release, and how many of them cost as much as the first `count` of this stream.

        Formal guarantee: an upper bound for every way in which clients may take part, and it never falls as `count`
        rises.
        """


@event_kind("min_separated")
@dataclass(frozen=True)
class MinSeparated(Stream):
    """`inner` on cohorts in which a client takes part at least `separation` releases apart, `at_most` times.

    No sampling is assumed: everyone may know who takes part.
    """

    separation: int  # b
    at_most: int  # k; 0: as often as the separation allows
    stream: str
    inner: Event

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.separation < 1 or self.at_most < 0:
            raise PrivacyError(f"separation={self.separation} must be 1 or more, and at_most={self.at_most} 0 or more")

    def resolved(self, count: int) -> tuple[Event, int]:
        times = -(-count // self.separation)  # ⌈n/b⌉
        times = min(times, self.at_most) if self.at_most else times
        if isinstance(self.inner, Correlated):
            sensitivity = _sensitivity(self.inner.matrix, count, self.separation, times)
            return Gaussian(self.inner.noise_multiplier / sensitivity), 1
        return self.inner, times


@event_kind("in_turn")
@dataclass(frozen=True)
class InTurn(Stream):
    """`inner` on one of `groups` groups of clients in turn. No sampling is assumed: a client's group is no secret."""

    groups: int
    stream: str
    inner: Event

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_groups(self.groups)

    def resolved(self, count: int) -> tuple[Event, int]:
        if isinstance(self.inner, Correlated):
            sensitivity = _sensitivity_in_turn(self.inner.matrix, count, self.groups)
            return Gaussian(self.inner.noise_multiplier / sensitivity), 1
        return self.inner, -(-count // self.groups)


@event_kind("cyclic_sampled")
@dataclass(frozen=True)
class CyclicSampled(Stream):
    """`inner` on those of one of `groups` groups in turn who join on their own with probability `rate`.

    A group is no secret, its members' coins are. For correlated noise the amplification is proven where no column of C
    reaches into the same group's next turn (Choquette-Choo et al. 2023, theorem 4); any other matrix is refused.
    """

    groups: int
    rate: float  # inside a group
    stream: str
    inner: Event

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_groups(self.groups)
        if not 0 < self.rate <= 1:
            raise PrivacyError(f"sampling rate={self.rate} must be in (0, 1]")

    def resolved(self, count: int) -> tuple[Event, int]:
        inner, turns = self.inner, -(-count // self.groups)
        if isinstance(inner, Correlated):
            if inner.matrix.columns_overlap(self.groups):
                raise PrivacyError(
                    f"this noise is correlated over more than {self.groups} rounds, where no amplification by sampling "
                    'is proven; take that many bands at most, more groups, or sampling = "in_turn"'
                )
            inner = Gaussian(inner.noise_multiplier / _sensitivity(inner.matrix, count, self.groups, 1))  # one column
        return PoissonSampled(self.rate, inner), turns


def _check_groups(groups: int) -> None:
    if groups < 1:
        raise PrivacyError(f"groups={groups} must be 1 or more")


@functools.lru_cache(maxsize=4096)
def _sensitivity(matrix: NoiseMatrix, rounds: int, separation: int, at_most: int) -> float:
    return matrix.sensitivity(rounds, separation, at_most)


@functools.lru_cache(maxsize=4096)
def _sensitivity_in_turn(matrix: NoiseMatrix, rounds: int, groups: int) -> float:
    return matrix.sensitivity_in_turn(rounds, groups)


def listed(event: Event, count: int = 1) -> dict[Event, int]:
    """List the releases inside compositions as they are, each with its count: nesting makes no difference."""
    if isinstance(event, SelfComposed):
        return listed(event.inner, event.count * count)
    if not isinstance(event, Composed):
        return {event: count}
    total: dict[Event, int] = {}
    for part in event.events:
        for release, times in listed(part, count).items():
            total[release] = total.get(release, 0) + times
    return total


def flatten(event: Event, count: int = 1) -> dict[Event, int]:
    """List what the releases inside compositions cost as ordinary releases, each with its count.

    Formal guarantee: nesting makes no difference. All releases of one stream are counted before what they cost
    together is looked up, and those of two streams never count as one.
    """
    releases, total = listed(event, count), dict[Event, int]()
    streams = [release.stream for release in releases if isinstance(release, Stream)]
    if len(set(streams)) < len(streams):
        raise PrivacyError("two kinds of releases are said to be of one run; what they cost together is not known")
    for release, times in releases.items():
        ordinary, count = release.resolved(times) if isinstance(release, Stream) else (release, times)
        total[ordinary] = total.get(ordinary, 0) + count
    return total


def stream_of(event: Event) -> str | None:
    """Return the name of the stream that a release belongs to; None for a release that stands by itself."""
    return event.stream if isinstance(event, Stream) else None


def in_stream(event: Event, stream: str) -> Event:
    """Return the release as one of this stream; one that stands by itself stays as it is."""
    return replace(event, stream=stream) if isinstance(event, Stream) else event  # type: ignore[type-var]


def apart(event: Event, ledger: str) -> Event:
    """Return a release as one of this ledger alone: a copy that was continued elsewhere shares the stream's name.

    Formal guarantee: releases of two ledgers never count as those of one run, whatever the ledgers say.
    """
    demand_stream(event)
    stream = stream_of(event)
    return event if stream is None else in_stream(event, hashlib.sha256(f"{ledger} {stream}".encode()).hexdigest())


def demand_stream(event: Event) -> None:
    """Refuse a planned release where releases of several runs meet: they would count as those of one run."""
    if stream_of(event) == "":
        raise PrivacyError(f"{type(event).__name__} names no stream, so it could be taken for a release of another run")


def to_json(event: Event) -> dict[str, Any]:
    """Return plain values for the ledger; `from_json` is the inverse."""
    if _KINDS.get(getattr(event, "kind", "")) is not type(event):
        raise PrivacyError(f"{type(event).__name__} is not a kind of event that a ledger can hold; add @event_kind")
    fields = dataclasses.fields(event)  # type: ignore[arg-type]  # every registered kind is a dataclass
    return {"kind": event.kind} | {field.name: _plain(getattr(event, field.name)) for field in fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Event):
        return to_json(value)
    if value == math.inf:
        return "inf"  # JSON has no infinity; only a selection may hold one
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def from_json(data: object) -> Event:
    """Read an event from plain values.

    Formal guarantee: the result means what was written, or PrivacyError is raised. A field that is missing,
    unknown or of another type is refused: a guess here would be a wrong epsilon later.
    """
    if not isinstance(data, Mapping):
        raise PrivacyError(f"event {data!r} must be a table with a kind")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise PrivacyError(f"event kind {kind!r} is unknown: {nearest(str(kind), _KINDS)}")
    hints = typing.get_type_hints(_KINDS[kind])
    known = [field.name for field in dataclasses.fields(_KINDS[kind])]  # type: ignore[arg-type]
    for key in data:
        if key not in known and key != "kind":
            raise PrivacyError(f"event {kind!r} has an unknown field {key!r}: {nearest(key, known)}")
    for name in known:
        if name not in data:
            raise PrivacyError(f"event {kind!r} lacks the field {name!r}; its epsilon cannot be known without it")
    return _KINDS[kind](**{name: _read(f"{kind}.{name}", hints[name], data[name]) for name in known})


def _read(where: str, hint: Any, value: Any) -> Any:
    if hint is Event:
        return from_json(value)
    if hint == tuple[Event, ...] and isinstance(value, list | tuple):
        return tuple(from_json(item) for item in value)
    if hint == tuple[int, ...] and isinstance(value, list | tuple) and all(type(item) is int for item in value):
        return tuple(value)
    if hint is float and value == "inf":
        return math.inf
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint in (int, str) and type(value) is hint:
        return value
    raise PrivacyError(f"event field {where}={value!r} must be {getattr(hint, '__name__', hint)}")
