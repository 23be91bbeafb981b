"""The Skellam mechanism (Agarwal, Kairouz and Liu 2021): noise is the difference of two Poisson variables.

The sum of n Skellam variables is exactly a Skellam variable of the summed variance, so the modes "fast" (one draw on
the sum) and "exact" (one per client) release the same law and have the same event.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedblur.events import Event
from fedblur.events import Skellam as SkellamEvent
from fedblur.mechanisms.grid import Grid
from fedblur.mechanisms.poisson import sample_skellam
from fedblur.mechanisms.rejection import Values
from fedblur.mechanisms.secure_sum import DiscreteMechanism
from fedblur.registry import register
from fedblur.rng import Keystream


@register("mechanism", "skellam")
@dataclass(frozen=True)
class Skellam(DiscreteMechanism):
    """Skellam noise on whole numbers modulo 2^b: its shares add up exactly."""

    def grid_event(self, grid: Grid, dimension: int, shares: int) -> Event:
        return SkellamEvent(grid.noise_steps, grid.sensitivity, dimension, self.bound)

    def draw(self, std: float, count: int, source: Keystream, threads: int = 1) -> Values:
        # std² was rounded, by 2^-53
        return sample_skellam(std**2 * (1 + 2.0**-50), count, source, threads)
