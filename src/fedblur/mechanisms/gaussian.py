"""The Gaussian mechanism on whole numbers: noise of standard deviation σS on every coordinate (invariant 2).

    clients' messages → towards zero onto a public grid → exact sum of whole numbers → + round(N(0, (σS/γ)²)) → × γ

For a whole x, x + round(g) = round(x + g): what is released is a rounded Gaussian mechanism, so its event and epsilon
are the Gaussian's. No float leaves before the noise is in. docs/exact-noise.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedblur import events
from fedblur.clipping import Bounded
from fedblur.errors import PrivacyError
from fedblur.mechanisms import rounded_gaussian
from fedblur.mechanisms.base import Conditions, Noise, Once, Release, demand_bound
from fedblur.mechanisms.fixed_point import FixedPoint
from fedblur.registry import register
from fedblur.rng import Rng


@register("mechanism", "gaussian")
@dataclass(frozen=True)
class Gaussian:
    """Gaussian noise on the sum, added by the server in whole numbers."""

    @property
    def trust(self) -> str:
        """Who must be trusted for the guarantee to hold."""
        return "a server that sees each clipped update and adds the noise"

    @property
    def shows_cohort(self) -> bool:
        return False  # the noise on the sum is the same for every cohort

    @property
    def excess(self) -> float:
        return 1.0

    def bind(self, conditions: Conditions) -> Gaussian:
        return self

    def event(self, noise_multiplier: float) -> events.Event:
        return events.Gaussian(noise_multiplier)

    def notes(self, noise_multiplier: float) -> tuple[str, ...]:
        return ()

    def draw(self, release: Release, rng: Rng) -> Noise:
        if release.noise_std == 0:
            return Once(lambda: torch.zeros(release.dimension, dtype=torch.int64, device=release.device))
        scale = FixedPoint.of(release).scale(release.noise_std)
        coming = rounded_gaussian.begin(scale, release.dimension, rng.child("noise").keystream())
        return Once(lambda: coming().to(release.device))

    def accumulate(self, blocks: Iterable[Bounded], release: Release, rng: Rng) -> Tensor:
        """The exact sum, [d] int64; without a clip norm there is no privacy and no grid, and it is float64."""
        if math.isinf(release.clip_norm):
            return _plain_sum(blocks, release)
        grid = FixedPoint.of(release)
        total = torch.zeros(release.dimension, dtype=torch.int64, device=release.device)
        sent = 0
        for block in blocks:
            values = demand_bound(block, release)
            release.next_numbers(sent, len(values))  # refuses more clients than were announced: sums would not fit
            grid.add_rows(total, values)
            sent += len(values)
        return total

    def release(self, total: Tensor, release: Release, noise: Tensor) -> Tensor:
        """The noisy sum, [d] float32. Floats are released only where there is no clip norm, and so no claim."""
        if math.isinf(release.clip_norm) and not release.noise_std:
            return total.float()
        for name, part in (("sum", total), ("noise", noise)):
            if part.dtype != torch.int64 or part.shape != (release.dimension,):
                raise PrivacyError(
                    f"the {name} must be {release.dimension} whole numbers, not {part.dtype} of shape {[*part.shape]}"
                )
        return FixedPoint.of(release).values(total + noise)


def _plain_sum(blocks: Iterable[Bounded], release: Release) -> Tensor:
    total = torch.zeros(release.dimension, dtype=torch.float64, device=release.device)
    for block in blocks:
        total += demand_bound(block, release).sum(0, dtype=torch.float64)
    return total
