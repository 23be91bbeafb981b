"""The releases of a round as data: the ledger stores events, the accountants interpret them.

An event says how the clients of a round were chosen and how their sum was blurred; it says nothing about how
that is turned into an epsilon (`accounting.py`). A mechanism with noise of its own adds its event with
`@event_kind`. Reading is strict: an unknown kind or field is refused, never guessed.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from fedblur.core.errors import PrivacyError, nearest


class Event:
    """Something that was computed from clients' updates and left the server's trusted part."""

    kind: ClassVar[str]


E = TypeVar("E", bound=type[Event])
_KINDS: dict[str, type[Event]] = {}


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
        if not 0 <= self.noise_multiplier < math.inf:
            raise PrivacyError(f"noise_multiplier={self.noise_multiplier} must be 0 or more and finite")


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
        if not (0 <= self.noise_std < math.inf and 0 <= self.check_noise_std < math.inf):
            raise PrivacyError(f"noise_std={self.noise_std}, {self.check_noise_std} must be 0 or more and finite")

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


def _check_discrete(noise_std: float, sensitivity: float, dimension: int, bound: str) -> None:
    if not 0 <= noise_std < math.inf:
        raise PrivacyError(f"noise_std={noise_std} must be 0 or more and finite")
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


def flatten(event: Event, count: int = 1) -> dict[Event, int]:
    """List the releases inside compositions, each with its count: nesting makes no difference."""
    if isinstance(event, SelfComposed):
        return flatten(event.inner, event.count * count)
    if not isinstance(event, Composed):
        return {event: count}
    total: dict[Event, int] = {}
    for part in event.events:
        for release, times in flatten(part, count).items():
            total[release] = total.get(release, 0) + times
    return total


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
    return [to_json(item) for item in value] if isinstance(value, tuple) else value


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
    if hint is float and value == "inf":
        return math.inf
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint in (int, str) and type(value) is hint:
        return value
    raise PrivacyError(f"event field {where}={value!r} must be {getattr(hint, '__name__', hint)}")
