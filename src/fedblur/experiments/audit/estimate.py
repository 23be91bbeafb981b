"""From what an attacker sees to an epsilon. In: a statistic with and without the client. Out: an estimate or a bound.

`gaussian_fit` is the one-shot estimate of Andrew et al. (2023): normal laws are fitted to both sides, and the epsilon
is that of telling these two laws apart. `lower_bound` assumes nothing: with confidence 95 %, no mechanism that is
(epsilon, delta)-private for a smaller epsilon gives such counts (Clopper and Pearson).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr
from scipy.stats import beta, kurtosis

Values = NDArray[np.float64]

_BY_CHANCE = 2.58  # standard errors
_LARGEST = 1e6  # epsilons above this cannot be distinguished from infinity


def epsilon_between(mean: Values, std: Values, delta: float) -> Values:
    """Return the smallest epsilon at which N(mean, std²) and N(0, 1) are (epsilon, delta)-close, elementwise.

    mean = 0, std = 1                    0
    std = 0 (a point)                    1e6, the largest that can be distinguished from infinity
    """
    mean, std = np.broadcast_arrays(np.asarray(mean, float), np.maximum(np.asarray(std, float), 1e-12))
    low, high = np.zeros(mean.shape), np.full(mean.shape, _LARGEST)
    for _ in range(80):
        middle = np.where(high > 1, np.sqrt(np.maximum(low, 1e-9) * high), (low + high) / 2)
        there, back = _delta(middle, mean, std), _delta(middle, -mean / std, 1 / std)
        private = np.maximum(there, back) <= delta
        low, high = np.where(private, low, middle), np.where(private, middle, high)
    start = np.maximum(_delta(np.zeros_like(mean), mean, std), _delta(np.zeros_like(mean), -mean / std, 1 / std))
    return np.where(start <= delta, 0.0, high)


def _delta(epsilon: Values, mean: Values, std: Values) -> Values:
    """Return P(L > ε) − e^ε·Q(L > ε) for P = N(mean, std²), Q = N(0, 1) and the log ratio L = ax² + bx + c."""
    a, b = (1 - std**-2) / 2, mean / std**2
    c = -(mean**2) / (2 * std**2) - np.log(std) - epsilon
    inside = a < 0
    with np.errstate(all="ignore"):
        root = np.sqrt(np.maximum(b**2 - 4 * a * c, 0.0))
        far = -(b + np.where(b >= 0, 1.0, -1.0) * root) / 2  # the stable form: a may be next to 0
        ends = np.sort(np.stack([np.nan_to_num(far / a, nan=np.inf), np.nan_to_num(c / far, nan=np.inf)]), axis=0)
    p = _mass(ends, mean, std, inside)
    q = _mass(ends, np.zeros_like(mean), np.ones_like(std), inside)
    with np.errstate(over="ignore"):
        found = np.exp(p) - np.exp(np.minimum(epsilon + q, 700.0))
    nowhere = (b**2 - 4 * a * c < 0) & inside
    everywhere = (b**2 - 4 * a * c < 0) & ~inside
    return np.where(nowhere, 0.0, np.where(everywhere, 1 - np.exp(np.minimum(epsilon, 700.0)), found))


def _mass(ends: Values, mean: Values, std: Values, inside: NDArray[np.bool_]) -> Values:
    """Log probability between the ends, or outside of them."""
    with np.errstate(all="ignore"):
        low, high = (ends[0] - mean) / std, (ends[1] - mean) / std
        flip = low > 0  # in the upper tail, count from the other side: no digits are lost
        low, high = np.where(flip, -high, low), np.where(flip, -low, high)
        gap = log_ndtr(low) - log_ndtr(high)
        between = log_ndtr(high) + np.log1p(-np.exp(np.minimum(gap, -1e-300)))
    outside = np.logaddexp(log_ndtr(low), log_ndtr(-high))
    return np.asarray(np.where(inside, np.nan_to_num(between, nan=-np.inf), outside))


@dataclass(frozen=True)
class Estimate:
    """An empirical epsilon, with the central 95 % of its bootstrap distribution."""

    epsilon: float
    low: float
    high: float


def gaussian_fit(present: Values, absent: Values | None, null_std: float, delta: float, draws: int = 2000) -> Estimate:
    """Estimate epsilon between normal fits of the sides; `absent=None`: the null is N(0, null_std²), known exactly.

    The interval resamples canaries (and held-out ones where the null is fitted). Far in the tails, where delta lies, a
    difference of one percent between the two fitted deviations weighs more than all else, so a difference that chance
    explains (99 %) is taken for none; only the means tell the sides apart then.
    """
    lots = np.random.default_rng(0)
    mean, std = _resampled(present, draws, lots)
    if absent is None:
        centre, scale = np.zeros(draws + 1), np.full(draws + 1, null_std)
    else:
        centre, scale = _resampled(absent, draws, lots)
    spread = np.hypot(_std_error(present), 0.0 if absent is None else _std_error(absent))
    if abs(math.log(std[0] / scale[0])) < _BY_CHANCE * spread:
        std = scale
    found = epsilon_between((mean - centre) / scale, std / scale, delta)
    low, high = np.quantile(found[1:], [0.025, 0.975])
    return Estimate(float(found[0]), float(low), float(high))


def _resampled(values: Values, draws: int, lots: np.random.Generator) -> tuple[Values, Values]:
    """Mean and standard deviation of the values, then of so many bootstrap samples."""
    chosen = [np.arange(len(values))[None], *(lots.integers(0, len(values), (1, len(values))) for _ in range(draws))]
    mean = np.concatenate([values[index].mean(axis=1) for index in chosen])
    std = np.concatenate([np.std(values[index], axis=1, ddof=1) for index in chosen])
    return mean, std


def _std_error(values: Values) -> float:
    """Return the standard error of the logarithm of the standard deviation, for any kurtosis."""
    return math.sqrt(max(float(kurtosis(values, fisher=False)) - 1, 0.1) / (4 * len(values)))


def lower_bound(present: Values, absent: Values, delta: float, confidence: float = 0.95) -> float:
    """Return a lower bound on epsilon from [repetitions, statistics] with and without the client.

    A quarter of the repetitions chooses the statistic, the threshold and its side, the others count: so the confidence
    holds, however many were tried. The choice is by a stricter bound, or it would fall on lucky, rare outcomes.
    """
    present, absent = (np.atleast_2d(side.T).T for side in (present, absent))
    first = min(len(present), len(absent)) // 4
    best, rule = 0.0, None
    for column in range(present.shape[1]):
        pooled = np.concatenate([present[:first, column], absent[:first, column]])
        cuts = np.unique(np.quantile(pooled, np.linspace(0.0, 1.0, 101)))
        cuts = np.unique(np.concatenate([cuts, (cuts[1:] + cuts[:-1]) / 2]))
        for sign in (1.0, -1.0):
            ours, theirs = (_above(sign * side[:first, column], sign * cuts) for side in (present, absent))
            for swapped, (hits, misses) in enumerate(((ours, theirs), (theirs, ours))):
                bounds = _bound(hits, misses, first, delta, 1 - (1 - confidence) / 50)
                place = int(np.argmax(bounds))
                if bounds[place] > best:
                    best, rule = float(bounds[place]), (column, sign, float(cuts[place]), bool(swapped))
    if rule is None:
        return 0.0
    column, sign, cut, swapped = rule
    counts = [_above(sign * side[first:, column], np.array([sign * cut])) for side in (present, absent)]
    hits, misses = reversed(counts) if swapped else counts
    rest = min(len(present), len(absent)) - first
    return max(0.0, float(_bound(hits, misses, rest, delta, confidence)[0]))


def _above(values: Values, cuts: Values) -> Values:
    """Count the values at or above each cut."""
    return np.asarray(len(values) - np.searchsorted(np.sort(values), cuts, side="left"), dtype=float)


def _bound(hits: Values, misses: Values, count: int, delta: float, confidence: float) -> Values:
    """Return log((p₁ − δ)/p₀) with p₁ bounded from below and p₀ from above."""
    tail = (1 - confidence) / 2
    likely = np.where(hits > 0, beta.ppf(tail, np.maximum(hits, 1), count - np.maximum(hits, 1) + 1), 0.0)
    rare = np.where(misses < count, beta.ppf(1 - tail, misses + 1, np.maximum(count - misses, 1e-9)), 1.0)
    return np.where(likely > delta, np.log(np.maximum(likely - delta, 1e-300) / rare), 0.0)
