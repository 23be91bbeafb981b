"""Stage 8, account: the two interpreters. In: releases and how often. Out: their epsilon at a delta.

    accountant   interprets                                   through
    "pld"        Gaussian, votes, Poisson-sampled Gaussian    the privacy loss distribution: tight, and
                                                              exact where nothing is sampled
    "rdp"        the same, fixed-size cohorts, discrete noise Rényi divergences: needs more noise, by 6 to
                 the best of a random number of trials        13 % at p=0.04 and 0.06, 31 % at p=0.001

Each is one function that dispatches by the type of event and refuses what it does not know; a mechanism with
noise of its own adds its curve with `@renyi.register`. The only importer of dp_accounting.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr, ndtri

from fedblur.core.errors import PrivacyError
from fedblur.core.lazy import Lazy, standing_in
from fedblur.privacy.events import Event, FixedSizeSampled, Gaussian, PoissonSampled, PrivateSelection, Votes, flatten
from fedblur.privacy.private_selection import TrialCount, best_of
from fedblur.privacy.renyi_discrete import Discrete, divergence, poisson_sampled
from fedblur.privacy.root_finding import find_root


class Normal:
    """A stand-in for what dp_accounting uses of `scipy.stats.norm`: the same values to the last bit."""

    def __init__(self, loc: float = 0.0, scale: float = 1.0) -> None:
        self.loc, self.scale = loc, scale

    def cdf(self, x: Curve) -> Curve:
        return np.asarray(ndtr((np.asarray(x) - self.loc) / self.scale))[()]

    def logcdf(self, x: Curve) -> Curve:
        return np.asarray(log_ndtr((np.asarray(x) - self.loc) / self.scale))[()]

    def ppf(self, q: Curve) -> Curve:
        return np.asarray(ndtri(q) * self.scale + self.loc)[()]


def convolve(one: Curve, other: Curve) -> Curve:
    """Return what `scipy.signal.fftconvolve` does: it multiplies where one side is a single value (no round yet)."""
    if 1 in (len(one), len(other)):
        return np.asarray(one) * np.asarray(other)
    from scipy.signal import fftconvolve

    return np.asarray(fftconvolve(one, other))


# dp_accounting imports these for a normal distribution, a convolution, and functions that are not called here. It takes
# longer than all else that `fedblur plan` does (docs/decisions/0112-light-start.md).
with standing_in(
    {
        "scipy.stats": Lazy("scipy.stats", norm=Normal),
        "scipy.optimize": Lazy("scipy.optimize"),
        "scipy.signal": Lazy("scipy.signal", fftconvolve=convolve),
    }
):
    import dp_accounting
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant, compute_epsilon
    from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

Curve = NDArray[np.float64]  # Rényi divergence of one release at each of ORDERS; inf where it is not known

ORDERS: tuple[float, ...] = (
    *(x / 10 for x in range(11, 110)),
    *(x / 2 for x in range(22, 41)),
    *(float(x) for x in range(21, 65)),
    *(float(x) for x in (80, 96, 128, 160, 192, 256, 384, 512, 768, 1024)),
)


def _refusal(event: object, accountant: str) -> PrivacyError:
    inner = getattr(event, "inner", None)
    name = type(event).__name__ + (f" of {type(inner).__name__}" if inner is not None else "")
    return PrivacyError(f'{name} has no interpretation by the "{accountant}" accountant; an unknown event is refused')


# --- RDP: one curve per kind of event; curves add up ---


@functools.singledispatch
def renyi(event: object) -> Curve:
    """Return the Rényi divergence of one release at each of ORDERS. Other mechanisms register theirs here.

    Formal guarantee: an upper bound in both directions, at every order. inf at an order costs tightness, not
    soundness, so an order that is expensive or does not converge may be left out.
    """
    raise _refusal(event, "rdp")


@renyi.register
def _gaussian_curve(event: Gaussian | Votes) -> Curve:
    if event.noise_multiplier == 0:
        return np.full(len(ORDERS), np.inf)
    return np.array(ORDERS) / (2 * event.noise_multiplier**2)


@renyi.register
def _discrete_curve(event: Discrete) -> Curve:
    return divergence(event, ORDERS)


@renyi.register
def _poisson_curve(event: PoissonSampled) -> Curve:
    if event.rate == 1:
        return renyi(event.inner)
    if isinstance(event.inner, Discrete):
        return poisson_sampled(event.inner, event.rate, ORDERS)
    if not isinstance(event.inner, Gaussian):
        raise _refusal(event, "rdp")
    if event.inner.noise_multiplier == 0:
        return np.full(len(ORDERS), np.inf)
    inner = dp_accounting.GaussianDpEvent(event.inner.noise_multiplier)
    return _dp_accounting_curve(
        dp_accounting.PoissonSampledDpEvent(event.rate, inner),
        ORDERS,
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )


@renyi.register
def _fixed_size_curve(event: FixedSizeSampled) -> Curve:
    """Apply theorem 27 of Wang, Balle and Kasiviswanathan (2019), for replacing one client.

    dp_accounting applies it to a Gaussian whose divergence between neighbours is α/(2σ²): its σ is the noise
    over the sensitivity *of the neighbouring relation*. Our noise multiplier is relative to the clip norm S,
    and replacing a client moves the sum by up to 2S (u becomes −u), so half of it is what dp_accounting must
    be given.
    """
    if isinstance(event.inner, Discrete):
        raise PrivacyError('fixed-size cohorts of discrete noise have no bound here; set sampling = "poisson"')
    if not isinstance(event.inner, Gaussian):
        raise _refusal(event, "rdp")
    if event.inner.noise_multiplier == 0:
        return np.full(len(ORDERS), np.inf)
    inner = dp_accounting.GaussianDpEvent(event.inner.noise_multiplier / 2)
    orders = [a for a in ORDERS if a <= 128 and a.is_integer()]  # the work grows as the square of the order
    curve = np.full(len(ORDERS), np.inf)
    curve[[ORDERS.index(order) for order in orders]] = _dp_accounting_curve(
        dp_accounting.SampledWithoutReplacementDpEvent(event.population, event.cohort, inner),
        orders,
        dp_accounting.NeighboringRelation.REPLACE_ONE,
    )
    return curve


@renyi.register
def _selection_curve(event: PrivateSelection) -> Curve:
    """Bound the best of K trials. A trial is one of several mechanisms, drawn blindly: at each order the worst."""
    trial = np.max([_total(flatten(trial)) for trial in event.trials], axis=0)
    count = TrialCount(event.shape, event.mean)
    return best_of(trial, ORDERS, count, lambda epsilon: float(compute_delta(ORDERS, trial, epsilon)[0]))


def _dp_accounting_curve(
    event: dp_accounting.DpEvent,
    orders: list[float] | tuple[float, ...],
    relation: dp_accounting.NeighboringRelation,
) -> Curve:
    # dp_accounting logs each order that did not converge; those are inf, which is safe.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        curve = RdpAccountant(list(orders), relation).compose(event).rdp
    finally:
        logger.setLevel(level)
    # dp_accounting takes a divergence that rounding has made negative for an epsilon of 0, whatever the
    # count. Rounding is below 1e-15 (it shows for a noise multiplier above 1e5), so no curve goes below that.
    return np.maximum(np.nan_to_num(np.asarray(curve, dtype=np.float64), nan=np.inf, posinf=np.inf), 1e-15)


_curve = functools.lru_cache(maxsize=1024)(renyi)


def _total(releases: Mapping[Event, int]) -> Curve:
    return np.asarray(sum(count * _curve(release) for release, count in releases.items()))


def _rdp(releases: Mapping[Event, int], delta: float) -> float:
    return float(compute_epsilon(ORDERS, _total(releases), delta)[0])


def rdp_at_order(releases: Mapping[Event, int], order: float, delta: float) -> float:
    """Return the epsilon that the divergence at one of ORDERS gives, without choosing the best of them."""
    return float(compute_epsilon([order], [float(_total(releases)[ORDERS.index(order)])], delta)[0])


# --- PLD: everything that it knows is a Gaussian at some sampling rate ---


@functools.singledispatch
def sampled_gaussian(event: object) -> tuple[float, float]:
    """Return (sampling rate, noise multiplier) of events whose privacy loss distribution is known."""
    raise _refusal(event, "pld")


@sampled_gaussian.register
def _plain(event: Gaussian | Votes) -> tuple[float, float]:
    return 1.0, event.noise_multiplier


@sampled_gaussian.register
def _poisson(event: PoissonSampled) -> tuple[float, float]:
    if event.rate == 1 or isinstance(event.inner, Discrete):
        return sampled_gaussian(event.inner)  # which refuses discrete noise, with the way out
    if not isinstance(event.inner, Gaussian):
        raise _refusal(event, "pld")
    return event.rate, event.inner.noise_multiplier


@sampled_gaussian.register
def _unbounded(event: Discrete | PrivateSelection | FixedSizeSampled) -> tuple[float, float]:
    if isinstance(event, FixedSizeSampled):
        raise PrivacyError('fixed-size cohorts have no PLD bound; set accountant = "rdp", or sampling = "poisson"')
    selection = isinstance(event, PrivateSelection)
    what = "the best of a random number of trials" if selection else "discrete noise (ddgauss, skellam)"
    raise PrivacyError(f'{what} has no PLD bound here; set accountant = "rdp"')


def _pld(releases: Mapping[Event, int], delta: float) -> float:
    known = [(*sampled_gaussian(release), count) for release, count in releases.items()]
    if any(sigma == 0 for _, sigma, _ in known):
        return math.inf
    if all(rate == 1 for rate, _, _ in known):  # Gaussians on everyone add up to one Gaussian
        return gaussian_epsilon(math.sqrt(sum(count / sigma**2 for _, sigma, count in known)), delta)
    accountant = PLDAccountant(value_discretization_interval=_interval(known))
    for rate, sigma, count in known:
        event = dp_accounting.GaussianDpEvent(sigma)
        accountant.compose(event if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, event), count)
    return float(accountant.get_epsilon(delta - _rounding(sum(releases.values()), delta)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact epsilon of a Gaussian with sensitivity over noise μ (Balle and Wang 2018, Theorem 8).

    μ = 0                                0
    μ so small that δ(0) <= delta        0
    """

    def excess(epsilon: float) -> float:  # log of δ(ε)/delta, which falls with ε; logarithms, since ε may be large
        a, b = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        return float(a + np.log(-np.expm1(min(b - a, -1e-300))) - math.log(delta))

    if mu == 0 or excess(0.0) <= 0:
        return 0.0
    high = mu**2 / 2 - mu * float(ndtri(delta))  # where the first term alone is delta
    return float(find_root(excess, 0.0, high, xtol=1e-12, rtol=1e-12))


def _rounding(count: int, delta: float) -> float:
    """Return what rounding in the FFT of `count` rounds may hide: it is paid for out of delta.

    Against the exact formula, and between intervals, delta was off by at most 7e-17 a round (1e4 to 1e6
    rounds), in either direction; this is more than ten times that.
    """
    rounding = 1e-15 * max(count, 1000)
    if delta < 2 * rounding:
        raise PrivacyError(
            f'delta={delta:g} is too small for PLD over {count} rounds; set accountant = "rdp", or raise delta'
        )
    return rounding


def _interval(known: list[tuple[float, float, int]]) -> float:
    """Return the step that divides the privacy loss: a fourteenth of its standard deviation in one round.

    dp_accounting rounds pessimistically, so a coarse division is safe but wasteful, and no single one fits:
    1e-3 is within 2.5e-4 of the exact epsilon for p=0.04, σ=2.2, T=1000, but 2.4 % above it for σ=20 and 2.5
    times too large for σ=200. The excess follows (interval / deviation)²: a fourteenth kept it below 6e-4 in
    25 settings with p from 1e-3 to 1, σ from 0.1 to 200 and T up to 1e6. Rarer sampling is bounded by time
    and memory: 4e-3 at p=1e-4, epsilon=0.05, and 2.6e-2 at p=1e-5, epsilon=0.02. Much finer is not better:
    dp_accounting's rounding grows as the interval shrinks and inflates epsilon again. Powers of two are
    nested, so epsilon stays monotone in σ; the count of sampled rounds plays no part, so it stays monotone in
    T.
    """
    # T plain Gaussian rounds are exactly one with σ/√T, and dp_accounting composes them so.
    scales = [_loss_scale(rate, sigma / math.sqrt(n) if rate == 1 else sigma) for rate, sigma, n in known]
    deviation, reach = min(d for d, _ in scales), max(r for _, r in scales)
    coarsest = max(2.0**-6, reach * 2.0**-14)  # large losses add up linearly and need no more than this
    finest = reach * 2.0**-15
    return float(2.0 ** math.floor(math.log2(max(min(deviation / 14, coarsest), finest))))


def _loss_scale(rate: float, sigma: float) -> tuple[float, float]:
    """Return the deviation of one round's privacy loss (√ of its Rényi divergence of order 2), and its far end."""
    x = sigma**-2
    if rate == 1:
        return math.sqrt(x), 10 / sigma + x / 2
    variance = np.logaddexp(0, 2 * math.log(rate) + x + math.log(-math.expm1(-x)))  # log(1 + p²(e^x − 1))
    return math.sqrt(variance), float(np.logaddexp(math.log1p(-rate), math.log(rate) + 10 / sigma + x / 2))


INTERPRETERS: dict[str, Callable[[Mapping[Event, int], float], float]] = {"pld": _pld, "rdp": _rdp}
