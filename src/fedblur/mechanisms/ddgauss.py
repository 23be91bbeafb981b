"""DDGauss, the distributed discrete Gaussian mechanism (Kairouz, Liu and Steinke 2021).

The sum of n discrete Gaussians is close to one discrete Gaussian of n times the variance but, unlike for continuous
ones, not equal to it: the logarithm of their probabilities differs by up to τ_n/2, where
τ_n = 10·Σ_{j<n} exp(−2π²τ²·j/(j+1)) for shares of standard deviation τ ≥ ½ steps.

    mode      noise on the sum                          accounted as
    "fast"    one discrete Gaussian, drawn once         one discrete Gaussian: exactly what is released
    "exact"   n draws, one per client, summed           that, plus what τ_n can add in every coordinate

So "fast" claims nothing about clients that add shares; its trust model names who adds the noise. For shares above five
steps τ_n is below 1e-100 and the two epsilons agree to every digit.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedblur.events import DistributedDiscreteGaussian, Event
from fedblur.mechanisms.discrete_gaussian import sample_discrete_gaussian
from fedblur.mechanisms.grid import Grid
from fedblur.mechanisms.rejection import Values
from fedblur.mechanisms.secure_sum import DiscreteMechanism
from fedblur.registry import register
from fedblur.rng import Keystream


@register("mechanism", "ddgauss")
@dataclass(frozen=True)
class DDGauss(DiscreteMechanism):
    """Discrete Gaussian noise on whole numbers modulo 2^b, as a secure sum can do it."""

    def grid_event(self, grid: Grid, dimension: int, shares: int) -> Event:
        return DistributedDiscreteGaussian(grid.noise_steps, grid.sensitivity, dimension, shares, self.bound)

    def draw(self, std: float, count: int, source: Keystream, threads: int = 1) -> Values:
        return sample_discrete_gaussian(std, count, source, threads)
