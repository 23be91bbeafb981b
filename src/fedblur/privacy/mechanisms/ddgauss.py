"""DDGauss, the distributed discrete Gaussian mechanism (Kairouz, Liu and Steinke 2021).

The sum of n discrete Gaussians is close to one discrete Gaussian of n times the variance but, unlike for continuous
ones, not equal to it: the logarithm of their probabilities differs by up to τ_n/2, where
τ_n = 10·Σ_{j<n} exp(−2π²τ²·j/(j+1)) for shares of standard deviation τ ≥ ½ steps.

    mode      noise on the sum                          accounted as
    "fast"    one discrete Gaussian, drawn once         one discrete Gaussian: exactly what is released
    "exact"   n draws, one per client, summed           that, plus what τ_n can add in every coordinate

So "fast" claims nothing about clients that add shares; its trust model names who adds the noise. For shares above five
steps τ_n is below 1e-100 and the two epsilons agree to every digit.

A discrete Gaussian is an integer x with probability in proportion to exp(−x²/2τ²) (Canonne, Kamath and Steinke 2020),
drawn exactly. Rounding a continuous Gaussian gives another law, with another privacy loss (`rounded_gaussian.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fedblur.core.errors import PrivacyError
from fedblur.core.registry import register
from fedblur.core.rng import Keystream
from fedblur.privacy.events import DistributedDiscreteGaussian, Event
from fedblur.privacy.mechanisms import discrete_sampler
from fedblur.privacy.mechanisms.rounded_gaussian import MARGIN, Values
from fedblur.privacy.mechanisms.secure_sum import DiscreteMechanism, Grid

LARGEST = 2.0**40  # τ


@dataclass(frozen=True)
class DiscreteGaussian(discrete_sampler.Law):
    """With parameter τ > 0."""

    tau: float

    @property
    def mode(self) -> int:
        return 0

    @property
    def width(self) -> int:
        return discrete_sampler.steps_to(32 * self.tau + 1)  # P(|x| ≥ 32τ) ≤ 2·exp(−512): x is sub-Gaussian

    @property
    def margin(self) -> float:
        """Two roundings of 2^-53, of x/τ and its square, leave x²/2τ² ≤ 745 off by 2^-41.9; exp adds little."""
        return MARGIN

    def height(self, n: int, digits: int) -> Decimal:
        square = Fraction(n) ** 2 / (2 * Fraction(self.tau) ** 2)
        with localcontext(Context(prec=digits + 25)):  # of an exponent below 10^20, so that exp is good to 10^-digits
            return (-(Decimal(square.numerator) / Decimal(square.denominator))).exp()

    def heights(self, n: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.exp(-0.5 * (n / self.tau) ** 2))


def sample_discrete_gaussian(tau: float, count: int, source: Keystream, threads: int = 1) -> Values:
    """Draw `count` independent numbers. tau = 0 gives zeros."""
    if not 0 <= tau <= LARGEST:
        raise PrivacyError(f"noise of {tau:g} grid steps must be between 0 and 2^40 of them")
    if tau == 0:
        return np.zeros(count, dtype=np.int64)
    return discrete_sampler.draw(DiscreteGaussian(tau), count, source, threads)


@register("mechanism", "ddgauss")
@dataclass(frozen=True)
class DDGauss(DiscreteMechanism):
    """Discrete Gaussian noise on whole numbers modulo 2^b, as a secure sum can do it."""

    def grid_event(self, grid: Grid, dimension: int, shares: int) -> Event:
        return DistributedDiscreteGaussian(grid.noise_steps, grid.sensitivity, dimension, shares, self.bound)

    def draw(self, std: float, count: int, source: Keystream, threads: int = 1) -> Values:
        return sample_discrete_gaussian(std, count, source, threads)
