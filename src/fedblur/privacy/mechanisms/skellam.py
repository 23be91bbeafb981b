"""The Skellam mechanism (Agarwal, Kairouz and Liu 2021): noise is the difference of two Poisson variables.

The sum of n Skellam variables is exactly a Skellam variable of the summed variance, so the modes "fast" (one draw on
the sum) and "exact" (one per client) release the same law and have the same event.
Both are drawn exactly (`discrete_sampler.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from fedblur.core.errors import PrivacyError
from fedblur.core.registry import register
from fedblur.core.rng import Keystream
from fedblur.privacy.events import Event
from fedblur.privacy.events import Skellam as SkellamEvent
from fedblur.privacy.mechanisms import discrete_sampler
from fedblur.privacy.mechanisms.rounded_gaussian import Values
from fedblur.privacy.mechanisms.secure_sum import DiscreteMechanism, Grid

LARGEST_MEAN = 2.0**48
_STIRLING = 16.0  # from here on four terms of Stirling's series are good to 2^-46


@dataclass(frozen=True)
class Poisson(discrete_sampler.Law):
    """With this mean > 0."""

    mean: float  # μ

    @property
    def mode(self) -> int:
        return math.floor(self.mean)

    @property
    def width(self) -> int:
        """P(|n − μ| ≥ t) ≤ 2·exp(−t²/2(μ + t/3)), which is 2·exp(−512) at t = 512/3 + √((512/3)² + 1024μ)."""
        third = 512 / 3
        return discrete_sampler.steps_to(third + math.sqrt(third**2 + 1024 * self.mean) + 2)

    @property
    def margin(self) -> float:
        """The exponent is off by |n − μ|·2^-51, and by less than 2^-30 for all else: for μ ≤ 2^48 below 2^-21."""
        return 2.0**-20

    def height(self, n: int, digits: int) -> Decimal:
        if n < 0:
            return Decimal(0)
        precision = digits + 30  # numbers up to 2^48·log(2^48) < 10^16 are added
        with localcontext(Context(prec=precision)):
            log = (n - self.mode) * Decimal(self.mean).ln()
            return (log - (_log_factorial(n, precision) - _log_factorial(self.mode, precision))).exp()

    def heights(self, n: NDArray[np.float64]) -> NDArray[np.float64]:
        log = self._log(np.maximum(n, 0.0)) - self._log(np.array([float(self.mode)]))
        return np.where(n < 0, 0.0, np.exp(np.minimum(log, 0.0)))

    def _log(self, k: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return log P(k), for large k without the difference of large numbers that lgamma would need."""
        n = np.maximum(k, _STIRLING)
        x = (self.mean - n) / n
        series = 1 / (12 * n) - 1 / (360 * n**3) + 1 / (1260 * n**5) - 1 / (1680 * n**7)
        near = n * (np.log1p(x) - x)
        far = n * (math.log(self.mean) - np.log(n)) - (self.mean - n)
        large = np.where(np.abs(x) < 0.5, near, far) - 0.5 * np.log(2 * math.pi * n) - series
        small = np.minimum(k, _STIRLING)
        exact = small * math.log(self.mean) - self.mean - gammaln(small + 1)
        return np.asarray(np.where(k < _STIRLING, exact, large))


def _log_factorial(k: int, digits: int) -> Decimal:
    """Return log k!, in the caller's context, to an absolute error below 10^(2 − digits) times its size.

    Stirling's series at z ≥ digits with about digits/2 terms is off by less than the first term that is left out:
    2K!/(2πz)^2K·z ≤ 17^-digits·z.
    """
    shift = max(0, digits - k)
    z, terms = k + 1 + shift, digits // 2
    total = (Decimal(z) - Decimal("0.5")) * Decimal(z).ln() - z + Decimal(_half_log_of_two_pi(digits))
    square, power = z * z, z
    for number, bernoulli in enumerate(_even_bernoulli(terms), 1):
        total += Decimal(bernoulli.numerator) / (
            Decimal(bernoulli.denominator) * (2 * number * (2 * number - 1)) * power
        )
        power *= square
    return total - Decimal(math.prod(range(k + 1, z))).ln()


@cache
def _even_bernoulli(count: int) -> tuple[Fraction, ...]:
    """Return B_2, B_4, … B_2count."""
    numbers = [Fraction(1)]
    for m in range(1, 2 * count + 1):
        numbers.append(-sum((math.comb(m + 1, j) * numbers[j] for j in range(m)), Fraction(0)) / (m + 1))
    return tuple(numbers[2::2])


@cache
def _half_log_of_two_pi(digits: int) -> str:
    """Return ½·log 2π; π by Machin's formula."""
    with localcontext(Context(prec=digits + 10)):
        pi = 16 * _arctan_of_inverse(5) - 4 * _arctan_of_inverse(239)
        return str((2 * pi).ln() / 2)


def _arctan_of_inverse(n: int) -> Decimal:
    total, power, number = Decimal(0), Decimal(1) / n, 1
    while total != total + power / number:
        total += power / number if number % 4 == 1 else -power / number
        power, number = power / (n * n), number + 2
    return total


def sample_skellam(variance: float, count: int, source: Keystream, threads: int = 1) -> Values:
    """Draw `count` independent numbers with mean 0. variance = 0 gives zeros."""
    both = sample_poisson(variance / 2, 2 * count, source, threads)
    return both[:count] - both[count:]


def sample_poisson(mean: float, count: int, source: Keystream, threads: int = 1) -> Values:
    """Draw `count` independent numbers. mean = 0 gives zeros."""
    if not 0 <= mean <= LARGEST_MEAN:
        raise PrivacyError(f"Poisson noise of mean {mean:g} must be between 0 and 2^48")
    if mean == 0:
        return np.zeros(count, dtype=np.int64)
    return discrete_sampler.draw(Poisson(mean), count, source, threads)


@register("mechanism", "skellam")
@dataclass(frozen=True)
class Skellam(DiscreteMechanism):
    """Skellam noise on whole numbers modulo 2^b: its shares add up exactly."""

    def grid_event(self, grid: Grid, dimension: int, shares: int) -> Event:
        return SkellamEvent(grid.noise_steps, grid.sensitivity, dimension, self.bound)

    def draw(self, std: float, count: int, source: Keystream, threads: int = 1) -> Values:
        # std² was rounded, by 2^-53
        return sample_skellam(std**2 * (1 + 2.0**-50), count, source, threads)
