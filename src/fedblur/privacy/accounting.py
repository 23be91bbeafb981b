"""Stage 8, account. In: events. Out: the (epsilon, delta) they add up to, and the noise that a target needs.

The unit of privacy is a client with all of its samples. What a round released is data (`events.py`), how it
is interpreted is in `accountants.py`; here are the questions that a run asks.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

from fedblur.core.config import MOST_ROUNDS
from fedblur.core.errors import ConfigError, PrivacyError
from fedblur.privacy.accountants import INTERPRETERS, rdp_at_order, renyi
from fedblur.privacy.events import (
    Composed,
    Correlated,
    CyclicSampled,
    DistributedDiscreteGaussian,
    Event,
    FixedSizeSampled,
    Gaussian,
    PoissonSampled,
    PrivateSelection,
    Stream,
    Votes,
    flatten,
    listed,
    stream_of,
)
from fedblur.privacy.participation import Scheduled
from fedblur.privacy.root_finding import find_root
from fedblur.privacy.sampling import Sampler

Accountant = Literal["pld", "rdp"]
ACCOUNTANTS: tuple[Accountant, ...] = get_args(Accountant)
Adjacency = Literal[
    "add or remove one client",
    "replace one client",
    "one client's data against no data (zero-out); its group is not hidden",
    "one client's data against no data (zero-out); that it takes part is not hidden",
]
ZERO_OUT: Adjacency = "one client's data against no data (zero-out); that it takes part is not hidden"
ZERO_OUT_IN_GROUP: Adjacency = "one client's data against no data (zero-out); its group is not hidden"
# What holds with and without a client also holds with and without its data, so a total of both claims the weaker one.
_WEAKER: tuple[Adjacency, ...] = ("add or remove one client", ZERO_OUT_IN_GROUP, ZERO_OUT)

SMALLEST_SIGMA, LARGEST_SIGMA = 2.0**-6, 2.0**20  # where a noise multiplier is looked for
_TOLERANCE = 1e-4  # of a calibrated noise multiplier, relative
# The share of delta that pays for noise being cut off at 32 standard deviations (`mechanisms/rounded_gaussian.py`): D
# draws cost D·(1 + e^ε)·2^-737 of delta. For D ≤ 2^64 that is at most δ·2^-40 as long as e^ε ≤ δ·2^632. A larger
# epsilon is no claim any more, and is reported as inf: from 427 on at δ = 1e-5.
_CUT_OFF = 2.0**-40
_LARGEST_EXPONENT = 737 - 64 - 40 - 1


def epsilon(event: Event, count: int, delta: float, accountant: Accountant = "pld") -> float:
    """Return the epsilon of releasing `event` `count` times, at `delta`. Memoised.

    Formal guarantees: an upper bound, up to dp_accounting's rounding; never falls when `count` rises; the
    same for every nesting of a composition. PLD exceeds the exact value by 0.06 % or less for p >= 0.001
    (`accountants.py`). `adjacency` says between which neighbours it holds.

        noise_multiplier = 0                 inf
        epsilon above 438 + log(delta)       inf: noise is cut off at 32 standard deviations
        count = 0                            0
        delta above all that can leak        0, for instance one round at sampling rate p <= delta
        delta outside (0, 1)                 ConfigError
        unknown event or accountant          PrivacyError; for PLD also fixed-size cohorts, delta < 2e-12
    """
    return _spent(event, count, delta, accountant)


def epsilon_at_orders(event: Event, orders: tuple[float, ...], delta: float) -> float:
    """Return the epsilon of everything in `event` at the best of a few Rényi orders, each with its share of delta.

    Formal guarantee: if the orders were fixed before the first release, the bound holds also where the noise and the
    rate of later releases were chosen by looking at earlier ones. Limits as for `epsilon`.
    """
    _demand_delta(delta)
    adjacency(event)
    share = delta / len(orders)  # which order is the best may depend on what was released: each may fail
    spent = min(rdp_at_order(flatten(event), order, share * (1 - _CUT_OFF)) for order in orders)
    return spent if spent <= largest_epsilon(share) else math.inf


def _demand_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ConfigError(f"delta={delta} must be in (0, 1)")


@functools.lru_cache(maxsize=2**16)
def _spent(event: Event, count: int, delta: float, accountant: str) -> float:
    """Return `epsilon` of this module, for functions in which epsilon is the target."""
    _demand_delta(delta)
    if count < 0:
        raise ConfigError(f"count={count} must be 0 or more")
    adjacency(event)  # refuses a mixture of neighbouring relations: their epsilons do not add up
    if accountant not in INTERPRETERS:
        raise PrivacyError(f'accountant={accountant!r} is unknown; use "pld" or "rdp"')
    spent = INTERPRETERS[accountant](flatten(event, count), delta * (1 - _CUT_OFF)) if count else 0.0
    return spent if spent <= largest_epsilon(delta) else math.inf


def largest_epsilon(delta: float) -> float:
    """Return the largest epsilon at which the missing noise beyond 32 standard deviations is paid for."""
    return math.log(delta) + _LARGEST_EXPONENT * math.log(2)


def adjacency(event: Event) -> Adjacency:
    """Return which two populations the guarantee cannot tell apart. An unknown event is refused."""
    relations = {_relation(release) for release in listed(event)}
    if len(relations) == 1:
        return relations.pop()
    if not relations <= set(_WEAKER):
        raise PrivacyError("fixed-size and other cohorts protect different neighbours; account for them apart")
    return max(relations, key=_WEAKER.index)


def _relation(release: Event) -> Adjacency:
    if isinstance(release, Stream):
        _relation(release.resolved(1)[0])
        return ZERO_OUT_IN_GROUP if isinstance(release, CyclicSampled) else ZERO_OUT
    if isinstance(release, FixedSizeSampled | PoissonSampled):
        _relation(release.inner)
    if isinstance(release, Correlated):
        raise PrivacyError(
            f"what {type(release).__name__} costs depends on when each client takes part; set sampling = "
            '{ name = "min_separation", rounds = 20 }, or "in_turn"'
        )
    if isinstance(release, PrivateSelection):
        trials = Composed(release.trials)
        if any(isinstance(trial, Stream) for trial in listed(trials)):
            raise PrivacyError(
                "a private search cannot try runs whose clients take turns or keep a distance: all trials have the "
                'same clients; use sampling = "poisson"'
            )
        return adjacency(trials)
    if renyi.dispatch(type(release)) is renyi.dispatch(object):
        raise PrivacyError(f"{type(release).__name__} is known to no accountant; an unknown event is refused")
    return "replace one client" if isinstance(release, FixedSizeSampled) else "add or remove one client"


def calibrate(
    make_event: Callable[[float], Event],
    rounds: int,
    epsilon: float,
    delta: float,
    accountant: Accountant = "pld",
) -> float:
    """Return the smallest noise multiplier σ that keeps `rounds` releases of `make_event(σ)` within epsilon.

    Formal guarantee: the epsilon of the result, by the same accountant, is at most the target. The result is
    within 1e-4 (relative) of the smallest that this holds for.

        epsilon = inf                        0: no noise
        epsilon <= 0 or nan                  ConfigError
        epsilon that 2^20 does not reach     PrivacyError: too small for these rounds and this delta
        epsilon that 2^-6 stays below        PrivacyError: so large that noise makes no difference
        epsilon above 438 + log(delta)       the same
    """
    if not epsilon > 0:
        raise ConfigError(f"epsilon={epsilon} must be above 0 (inf: no noise)")
    if rounds < 1:
        raise ConfigError(f"rounds={rounds} must be 1 or more")
    if math.isinf(epsilon):
        return 0.0
    _demand_delta(delta)
    if epsilon > largest_epsilon(delta):
        raise PrivacyError(
            f"epsilon={epsilon:g} is met with next to no noise; lower it, or set epsilon = inf to train without noise"
        )

    def excess(log_sigma: float) -> float:
        spent = _spent(make_event(math.exp(log_sigma)), rounds, delta, accountant)
        return math.log(min(max(spent / epsilon, 1e-6), 1e6))  # bounded, since spent may be 0 or inf

    low, high = _bracket(excess, f"epsilon={epsilon:g} over {rounds} rounds at delta={delta:.3g}")
    sigma = math.exp(find_root(excess, low, high, xtol=_TOLERANCE / 4))
    while _spent(make_event(sigma), rounds, delta, accountant) > epsilon:
        sigma *= 1 + _TOLERANCE / 2
    return sigma


def _bracket(excess: Callable[[float], float], target: str) -> tuple[float, float]:
    """Find the logarithms of a noise multiplier that spends too much, and of one that does not."""
    low = high = 0.0
    while excess(high) > 0:
        low, high = high, high + math.log(4)
        if high > math.log(LARGEST_SIGMA):
            raise PrivacyError(
                f"{target} cannot be reached, even with noise_multiplier={LARGEST_SIGMA:.0f}; "
                "raise epsilon or delta, or lower rounds or sample_rate"
            )
    while excess(low) <= 0:
        low, high = low - math.log(4), low
        if low < math.log(SMALLEST_SIGMA):
            raise PrivacyError(
                f"{target} is met with next to no noise (noise_multiplier={math.exp(high):.3g}); "
                "lower epsilon or delta, or set epsilon = inf to train without noise"
            )
    return low, high


def rounds_within(
    event: Event, epsilon: float, delta: float, accountant: Accountant = "pld", at_most: int = 10**6
) -> int:
    """Return how many releases of `event` a budget allows, up to `at_most`.

    Formal guarantee: the result's epsilon is at most the budget; 0 where not even one release fits.

        epsilon = inf                        at_most
        noise_multiplier = 0                 0, unless epsilon = inf
    """
    if math.isinf(epsilon):
        return at_most
    fits = 0
    while fits < at_most:  # in large strides: very many rounds are slow to compose, and few budgets allow them
        fails = min(8 * fits, at_most) if fits else 1
        if _spent(event, fails, delta, accountant) > epsilon:
            break
        fits = fails
    else:
        return at_most
    while fails - fits > 1:
        middle = (fits + fails) // 2
        within = _spent(event, middle, delta, accountant) <= epsilon
        fits, fails = (middle, fails) if within else (fits, middle)
    return fits


def zcdp(event: Event | None) -> float | None:
    """Return ρ of zero-concentrated differential privacy (Bun and Steinke 2016); None where no useful bound is known.

    A Gaussian with noise multiplier σ has ρ = 1/(2σ²), and ρ adds up. One discrete Gaussian draw has the same ρ for its
    own sensitivity over noise. Sampling does not amplify ρ, so a sampled release has none here.

        no event                             0
        noise_multiplier = 0                 inf
    """
    total = 0.0
    for release, count in flatten(event).items() if event is not None else ():
        inner = release.inner if isinstance(release, PoissonSampled) and release.rate == 1 else release
        if isinstance(inner, Gaussian | Votes):
            ratio = 1 / inner.noise_multiplier if inner.noise_multiplier else math.inf
        elif isinstance(inner, DistributedDiscreteGaussian) and inner.shares == 1:
            ratio = inner.sensitivity / inner.noise_std if inner.noise_std else math.inf
        else:
            return None
        total += count * ratio**2 / 2
    return total


def parse_delta(value: float | str, clients: int) -> float:
    """Parse a delta: a number, "1/N" or "N^-1.1", for N clients. Outside (0, 1) it is a ConfigError."""
    text = str(value).replace(" ", "")
    power = re.fullmatch(r"1/N|N\^-(\d+(?:\.\d*)?|\.\d+)", text, re.IGNORECASE)
    try:
        delta = clients ** -float(power[1] or 1) if power else float(text)
    except ValueError:
        raise ConfigError(f'delta={value!r} must be a number in (0, 1), "1/N" or "N^-1.1"') from None
    if not 0 < delta < 1:
        meaning = f" ({delta:g} for {clients} clients)" if power else ""
        raise ConfigError(f"delta={value}{meaning} must be in (0, 1)")
    return delta


class Noise(Protocol):
    """The side of a mechanism that accounting sees."""

    @property
    def shows_cohort(self) -> bool: ...

    @property
    def excess(self) -> float: ...

    def event(self, noise_multiplier: float) -> Event: ...


@dataclass(frozen=True)
class PrivacyPlan:
    """The releases of a run, and their cost. The sampler also makes the event accounted for (invariant 4)."""

    sampler: Sampler
    release: Event  # of one cohort's noisy sum, before sampling
    noise_multiplier: float  # σ
    rounds: int  # T
    delta: float
    accountant: Accountant
    epsilon_target: float  # a run may not pass it; inf: no privacy
    shows_cohort: bool = False  # a release tells how many clients came
    excess: float = 1.0  # variance of the noise in a sum over rounds, over what σ would add each time

    @property
    def expected_cohort(self) -> float:
        """The constant that sums are divided by."""
        return self.sampler.expected_cohort

    @property
    def added_noise(self) -> float:
        """σ of independent noise that would add up to as much over the rounds as this noise does."""
        return self.noise_multiplier * math.sqrt(self.excess)

    def event(self) -> Event:
        """Return the event of one round."""
        return self.sampler.event(self.release)

    @property
    def stream(self) -> str | None:
        """Return the name of the run's stream of releases: "" while it is planned; None where each stands by itself."""
        return stream_of(self.event())

    def in_stream(self, stream: str | None) -> PrivacyPlan:
        """Return the same plan with its releases in a stream of this name, if they are of one."""
        if stream is None or not isinstance(self.sampler, Scheduled):
            return self
        return replace(self, sampler=self.sampler.in_stream(stream))

    @property
    def adjacency(self) -> str:
        """Between which neighbours epsilon holds. Where it shows who came, a client's presence is no secret."""
        return ZERO_OUT if self.shows_cohort else adjacency(self.event())

    def epsilon(self, rounds: int | None = None) -> float:
        """Return what is spent after this many rounds; after all of them by default."""
        return epsilon(self.event(), self.rounds if rounds is None else rounds, self.delta, self.accountant)


def make_plan(
    sampler: Sampler,
    mechanism: Noise,
    *,
    rounds: int,
    delta: float | str = "1/N",
    accountant: Accountant = "pld",
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
) -> PrivacyPlan:
    """Make the plan with this epsilon or this noise multiplier; the other follows. Exactly one is given."""
    if (epsilon is None) == (noise_multiplier is None):
        raise ConfigError(f"epsilon={epsilon} and noise_multiplier={noise_multiplier}: give exactly one of them")
    if rounds > MOST_ROUNDS:
        raise ConfigError(f"rounds={rounds} must be at most {MOST_ROUNDS:,}")
    if noise_multiplier is not None and noise_multiplier and not SMALLEST_SIGMA <= noise_multiplier <= LARGEST_SIGMA:
        raise ConfigError(
            f"noise_multiplier={noise_multiplier:g} must be from {SMALLEST_SIGMA:.3g} to {LARGEST_SIGMA:.3g}, or 0: "
            "less protects nobody, and more leaves nothing to learn from"
        )
    if isinstance(sampler, Scheduled):
        sampler.demand_enough(rounds)
    fixed = parse_delta(delta, sampler.clients)
    shown = mechanism.shows_cohort
    sampler = sampler.seen() if shown else sampler
    if noise_multiplier is None:
        assert epsilon is not None
        noise_multiplier = calibrate(
            lambda sigma: sampler.event(mechanism.event(sigma)), rounds, epsilon, fixed, accountant
        )
    release = mechanism.event(noise_multiplier)
    if epsilon is None:
        epsilon = _spent(sampler.event(release), rounds, fixed, accountant)
    return PrivacyPlan(sampler, release, noise_multiplier, rounds, fixed, accountant, epsilon, shown, mechanism.excess)
