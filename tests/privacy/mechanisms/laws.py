"""Oracles: probabilities of discrete laws as logarithms on −reach … reach, and their Rényi divergences by summation."""

from __future__ import annotations

import numpy as np
from scipy.special import gammaln, logsumexp


def discrete_gaussian(tau: float, reach: int) -> np.ndarray:
    x = np.arange(-reach, reach + 1)
    log = -(x**2) / (2 * tau**2)
    return log - logsumexp(log)


def skellam(variance: float, reach: int) -> np.ndarray:
    """The sum over j of Poisson(|x| + j)·Poisson(j)."""
    mean, x, j = variance / 2, np.abs(np.arange(-reach, reach + 1))[:, None], np.arange(0, 400 + int(2 * variance))

    def poisson(k: np.ndarray) -> np.ndarray:
        return k * np.log(mean) - mean - gammaln(k + 1)

    return logsumexp(poisson(x + j) + poisson(j)[None], axis=1)


def convolve(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The law of a sum, on the same range (mass beyond it is dropped)."""
    reach = len(a) // 2
    padded = np.pad(b, len(a), constant_values=-np.inf)
    index = np.arange(len(a))[:, None] - np.arange(len(a))[None] + reach + len(a)
    return logsumexp(a[None] + padded[index], axis=1)


def summed(law: np.ndarray, count: int) -> np.ndarray:
    total = law
    for _ in range(count - 1):
        total = convolve(total, law)
    return total


def shifted(law: np.ndarray, by: int) -> np.ndarray:
    return np.concatenate([np.full(by, -np.inf), law[: len(law) - by]])


def mixed(rate: float, other: np.ndarray, base: np.ndarray) -> np.ndarray:
    return np.logaddexp(np.log1p(-rate) + base, np.log(rate) + other)


def renyi(p: np.ndarray, q: np.ndarray, order: float) -> float:
    """D_order(P ‖ Q), where both have mass."""
    both = np.isfinite(p) & np.isfinite(q)
    return float(logsumexp(order * p[both] + (1 - order) * q[both]) / (order - 1))
