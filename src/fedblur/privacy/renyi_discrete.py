"""Stage 8, account: Rényi divergences of discrete noise. In: an event. Out: upper bounds, order by order.

A release is z + noise, where one client moves z by a vector of whole numbers with an l2 norm of at most B (and so an l1
norm of at most B·min(√d', B)). Neighbours differ by one client, in both directions.

Sampling. Let μ₀ be the law without the client and μ₁ with it, and p the chance that it takes part. For a whole order α,
with e^((l−1)ε(l)) ≥ E[(μ₁/μ₀)^l] under μ₀,

    D_α((1−p)μ₀ + pμ₁ ‖ μ₀) ≤ 1/(α−1)·log Σ_l C(α,l)(1−p)^(α−l) p^l e^((l−1)ε(l)).

"tight" takes this for the other direction too, which is right for symmetric noise: x ↦ z − x then swaps μ₀ and μ₁, and
the divergence above dominates its reverse (Mironov, Talwar and Zhang 2019). "general" asks for no symmetry,
and has a factor 3 on the terms l ≥ 3 (Zhu and Wang 2019); it is what the public DDGauss code uses. Neither exceeds what
no sampling would give.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

from fedblur.core.errors import PrivacyError
from fedblur.privacy.events import DistributedDiscreteGaussian, Skellam

Orders = Sequence[float] | NDArray[np.float64]
Curve = NDArray[np.float64]
Discrete = DistributedDiscreteGaussian | Skellam
_TERMS = 4096  # of τ_n that are summed one by one


@functools.singledispatch
def divergence(event: object, orders: Orders) -> Curve:
    """Return the Rényi divergences of one release without sampling, at these orders; inf without noise."""
    raise PrivacyError(f"{type(event).__name__} is not discrete noise")


@divergence.register
def _discrete_gaussian(event: DistributedDiscreteGaussian, orders: Orders) -> Curve:
    """Return the smallest of three bounds by Kairouz, Liu and Steinke (2021).

    They hold between cohorts of n and n + 1 clients, each client with a share (σc)²/n or (σc)²/(n+1) of the variance:
    either law is within e^(±τ/2) of one discrete Gaussian, and sums of shares are sub-Gaussian with its variance.
    """
    alpha = np.asarray(orders, dtype=np.float64)
    if event.noise_std == 0:
        return np.full(len(alpha), np.inf)
    tau, d = convolution_gap(event.noise_std, event.shares), event.dimension
    a = event.sensitivity / event.noise_std
    a1 = a * min(math.sqrt(d), event.sensitivity)
    exponents = (alpha * a**2 / 2 + tau * d, alpha / 2 * (a**2 + 2 * a1 * tau + tau**2 * d))
    return np.asarray(np.minimum.reduce([*exponents, alpha / 2 * (a + math.sqrt(d) * tau) ** 2]))


@divergence.register
def _skellam(event: Skellam, orders: Orders) -> Curve:
    """Apply Agarwal, Kairouz and Liu (2021) at whole orders; others take the next one, which is no smaller."""
    alpha = np.ceil(np.asarray(orders, dtype=np.float64))
    if event.noise_std == 0:
        return np.full(len(alpha), np.inf)
    mu, b = event.noise_std**2, event.sensitivity
    l1 = b * min(math.sqrt(event.dimension), b)
    extra = np.minimum(((2 * alpha - 1) * b**2 + 6 * l1) / (4 * mu**2), 3 * l1 / (2 * mu))
    return np.asarray(alpha * b**2 / (2 * mu) + extra)


def convolution_gap(noise_std: float, shares: int) -> float:
    """Return τ_n = 10·Σ_{j<n} exp(−2π²τ²·j/(j+1)): the gap of n discrete Gaussians to one, in log-probability.

    Grows with n, so the largest possible n covers all. Terms fall with j: those after the first 4096 are bounded by the
    last one that is summed.

        n = 1                                0
        shares below ½ step                  inf: the bound is not proven there
    """
    if shares == 1:
        return 0.0
    share = noise_std / math.sqrt(shares)
    if share < 0.5:
        return math.inf
    j = np.arange(1, min(shares, _TERMS + 1))
    terms = np.exp(-2 * (math.pi * share) ** 2 * j / (j + 1))
    return 10 * float(terms.sum() + (shares - 1 - len(j)) * terms[-1])


def poisson_sampled(event: Discrete, rate: float, orders: Orders) -> Curve:
    """Bound one release on a Poisson sample. Sampling lowers whole orders only: less tight, but sound."""
    alpha = np.asarray(orders, dtype=np.float64)
    whole = np.flatnonzero(alpha == np.floor(alpha))
    curve = np.full(len(alpha), np.inf)
    if event.noise_std == 0 or not len(whole):
        return curve
    l = np.arange(2, int(alpha[whole].max()) + 1)  # noqa: E741, the formula's name
    exponents = (l - 1) * divergence(event, l.astype(np.float64))
    for index in whole:
        a = int(alpha[index])
        bound = _log_moment(a, rate, exponents[: a - 1], event.bound == "general") / (a - 1)
        curve[index] = bound + _asymmetry(event, a)
    return np.asarray(np.minimum(curve, divergence(event, alpha)))


def _log_moment(a: int, rate: float, exponents: Curve, general: bool) -> float:
    """Return log of the sum over l, for exponents (l−1)ε(l) at l = 2 … a.

    The binomial weights add up to 1, so the sum is 1 + Σ_{l≥2} w_l·(e^x − 1): small divergences keep their digits.
    """
    l = np.arange(2, a + 1)  # noqa: E741
    log_binomial = gammaln(a + 1) - gammaln(l + 1) - gammaln(a - l + 1)
    log_weights = log_binomial + (a - l) * math.log1p(-rate) + l * math.log(rate)
    with np.errstate(divide="ignore", over="ignore"):
        terms = log_weights + exponents + np.log(-np.expm1(-exponents))
        if general:
            terms = np.append(terms, (log_weights + exponents + math.log(2))[1:])
    return float(np.logaddexp(0, logsumexp(terms)))


def _asymmetry(event: Discrete, a: int) -> float:
    """Return what "tight" must add if a joining client changes the noise: n shares become n + 1.

    Both laws are within e^(±τ/2) of one discrete Gaussian in each of d' coordinates, for which symmetry holds; passing
    to it and back costs at most τd'(α − ½)/(α − 1). "general" needs no symmetry, and Skellam shares add up exactly.
    """
    if not isinstance(event, DistributedDiscreteGaussian) or event.bound == "general":
        return 0.0
    return convolution_gap(event.noise_std, event.shares) * event.dimension * (a - 0.5) / (a - 1)
