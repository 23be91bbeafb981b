"""Stage 8, account: what it costs to release the best of K trials, when K is random and secret.

Papernot and Steinke, "Hyperparameter Tuning with Rényi Differential Privacy" (ICLR 2022). Contract of a trial: it is
one private mechanism Q whose output, *its score included*, is all that is compared and released; trials are
independent; K is drawn before the first of them, from a law that does not depend on data, and is not released. A best
trial chosen among a fixed number of trials, or a score that is itself not private, is not covered.

    truncated negative binomial, η > -1, 0 < γ < 1:    P[K=k] ∝ (1-γ)^k ∏_{l<k} (l+η)/(l+1), k ≥ 1     # Definition 1
    (η = 0: the limit, logarithmic (1-γ)^k/k;  η = 1: geometric)
    Poisson(μ), written η = inf:                       K = 0 releases that there is nothing
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

from fedblur.core.errors import ConfigError
from fedblur.privacy.root_finding import find_root

Curve = NDArray[np.float64]
_SMALLEST_LOG_GAMMA = -60.0
WORDS = 13  # of 64 bits, from which K is drawn
_DIGITS = 700  # γ^-η − 1 loses up to 324 of them where η is tiny


@dataclass(frozen=True)
class TrialCount:
    """The law of K, by its shape η and its mean; γ follows."""

    shape: float = 0.0  # η; inf: Poisson
    mean: float = 10.0  # E[K]

    def __post_init__(self) -> None:
        if not self.shape > -1:
            raise ConfigError(f"eta={self.shape} must be above -1 (0 logarithmic, 1 geometric, inf Poisson)")
        if not 1 < self.mean < math.inf:
            raise ConfigError(f"trials={self.mean} must be above 1: it is the expected number of trials")

    @property
    def poisson(self) -> bool:
        return math.isinf(self.shape)

    @functools.cached_property
    def gamma(self) -> float:
        """γ, for which E[K] is the mean."""

        def excess(log_gamma: float) -> float:
            return log_mean(self.shape, math.exp(log_gamma)) - math.log(self.mean)

        if excess(_SMALLEST_LOG_GAMMA) < 0:
            raise ConfigError(f"trials={self.mean} cannot be reached with eta={self.shape}; raise eta or lower trials")
        return math.exp(find_root(excess, _SMALLEST_LOG_GAMMA, -1e-9, xtol=1e-13))

    def chances(self, most: int) -> Curve:
        """Return P[K = 0], ..., P[K = most]."""
        k = np.arange(1, most + 1)
        if self.poisson:
            logs = np.concatenate([[0.0], np.cumsum(np.log(self.mean / k))]) - self.mean
            return np.exp(logs)
        eta, log_rest = self.shape, math.log1p(-self.gamma)
        # k·P[k] ∝ (1-γ)^k ∏_{0<l<k} (l+η)/l: the factor η of l = 0 is in the constant, which stays finite at η = 0
        weights = np.concatenate([[0.0], np.cumsum(np.log((k[:-1] + eta) / k[:-1]))]) + k * log_rest - np.log(k)
        return np.concatenate([[0.0], np.exp(weights - _log_constant(eta, self.gamma))])

    def draw(self, words: NDArray[np.uint64]) -> int:
        """Draw K from WORDS random words, read as a uniform number u in [0, 1): the smallest k with P[K ≤ k] > u.

        Formal guarantee: K follows the law, for γ as it is in float64, up to 2^-800 in total variation.
        """
        (k, chance), eta = self._first, Decimal(self.shape)
        with localcontext(Context(prec=_DIGITS)):
            u = Decimal(int.from_bytes(words.astype("<u8").tobytes(), "little")) / 2 ** (64 * WORDS)
            mean, rest = Decimal(self.mean), Decimal(0) if self.poisson else 1 - Decimal(self.gamma)
            total = chance
            while total <= u:
                chance *= (mean if self.poisson else rest * (k + eta)) / (k + 1)
                total, k = total + chance, k + 1
            return k

    @functools.cached_property
    def _first(self) -> tuple[int, Decimal]:
        """The smallest k, and its probability to all digits."""
        with localcontext(Context(prec=_DIGITS)):
            if self.poisson:
                return 0, (-Decimal(self.mean)).exp()
            eta, gamma = Decimal(self.shape), Decimal(self.gamma)
            log = -gamma.ln()
            return 1, (1 - gamma) * (eta / ((eta * log).exp() - 1) if eta else 1 / log)


def log_mean(eta: float, gamma: float) -> float:
    """Return log of E[K] = η(1-γ)/(γ(1-γ^η)), and of (1/γ-1)/log(1/γ) at η = 0."""
    return -eta * math.log(gamma) + math.log(1 / gamma - 1) - _log_constant(eta, gamma)


def _log_constant(eta: float, gamma: float) -> float:
    """Return log of (γ^-η - 1)/η, and of log(1/γ) at η = 0: the weights of `chances` add up to it."""
    x = -eta * math.log(gamma)
    if x > 0:
        return x + math.log(-math.expm1(-x) / eta)
    return math.log(math.expm1(x) / eta if x else -math.log(gamma))


def best_of(trial: Curve, orders: Sequence[float], count: TrialCount, delta: Callable[[float], float]) -> Curve:
    """Return the Rényi divergence of the best of K trials, from that of one trial at the same orders.

    `delta(ε)` must be such that a trial is (ε, δ)-differentially private; only Poisson asks for it.

    Formal guarantee: an upper bound in both directions at every order, if `trial` is one.

        trial = inf at an order              inf there, unless a higher order is finite
        E[K] -> 1 (truncated)                the trial's own curve, in the limit
    """
    order = np.array(orders)
    if count.poisson:  # theorem 6: ε' = ε + μδ̂ + log μ/(λ-1), where a trial is (log(1+1/(λ-1)), δ̂)-private
        chance = np.array([delta(math.log1p(1 / (a - 1))) for a in order])
        curve = trial + count.mean * chance + math.log(count.mean) / (order - 1)
    else:  # theorem 2: ε' = ε + (1+η)(1-1/λ̂)ε̂ + (1+η)log(1/γ)/λ̂ + log E[K]/(λ-1), for the best λ̂
        other = (1 - 1 / order) * trial - math.log(count.gamma) / order
        curve = trial + (1 + count.shape) * other.min() + math.log(count.mean) / (order - 1)
    # A divergence never falls with the order, so what holds at a higher order holds here too.
    return np.asarray(np.minimum.accumulate(curve[::-1])[::-1])
