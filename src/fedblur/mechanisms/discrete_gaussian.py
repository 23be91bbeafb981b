"""The discrete Gaussian (Canonne, Kamath and Steinke 2020): integers x with probability in proportion to exp(−x²/2τ²).

Drawn exactly (`lattice.py`). Rounding a continuous Gaussian gives another law, with another privacy loss: for that one,
see `rounded_gaussian.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fedblur.errors import PrivacyError
from fedblur.mechanisms import lattice, rejection
from fedblur.mechanisms.rejection import Values
from fedblur.rng import Keystream

LARGEST = 2.0**40  # τ


@dataclass(frozen=True)
class DiscreteGaussian(lattice.Law):
    """With parameter τ > 0."""

    tau: float

    @property
    def mode(self) -> int:
        return 0

    @property
    def width(self) -> int:
        return lattice.steps_to(32 * self.tau + 1)  # P(|x| ≥ 32τ) ≤ 2·exp(−512): x is sub-Gaussian

    @property
    def margin(self) -> float:
        """Two roundings of 2^-53, of x/τ and its square, leave x²/2τ² ≤ 745 off by 2^-41.9; exp adds little."""
        return rejection.MARGIN

    def height(self, n: int, digits: int) -> Decimal:
        square = Fraction(n) ** 2 / (2 * Fraction(self.tau) ** 2)
        with localcontext(Context(prec=digits + 25)):  # of an exponent below 10^20, so that exp is good to 10^-digits
            return (-(Decimal(square.numerator) / Decimal(square.denominator))).exp()

    def heights(self, n: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.exp(-0.5 * (n / self.tau) ** 2))


def sample_discrete_gaussian(tau: float, count: int, source: Keystream, threads: int = 1) -> Values:
    """`count` independent draws. tau = 0 gives zeros."""
    if not 0 <= tau <= LARGEST:
        raise PrivacyError(f"noise of {tau:g} grid steps must be between 0 and 2^40 of them")
    if tau == 0:
        return np.zeros(count, dtype=np.int64)
    return lattice.draw(DiscreteGaussian(tau), count, source, threads)
