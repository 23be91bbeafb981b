"""The Gaussian mechanism on whole numbers: noise of standard deviation σS on every coordinate (invariant 2).

    clients' messages → towards zero onto a public grid → exact sum of whole numbers → + round(N(0, (σS/γ)²)) → × γ

For a whole x, x + round(g) = round(x + g): what is released is a rounded Gaussian mechanism, so its event and epsilon
are the Gaussian's. No float leaves before the noise is in. docs/exact-noise.md has the proof.

The grid's step γ is a power of two, chosen from public constants alone: S, σ and d. So v/γ is exact in floating point,
rounding it towards zero is exact, and no coordinate grows: ‖trunc(v/γ)‖·γ ≤ ‖v‖ ≤ bound, in real arithmetic. A block's
sum stays below 2^53 steps, so float64 adds it without rounding; blocks are added as int64. So the sum is the same for
every order of clients, block, worker and rank. Should a sum leave int64, it wraps: that is a function of the exact sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedblur.core.errors import PrivacyError
from fedblur.core.lazy import torch
from fedblur.core.registry import register
from fedblur.core.rng import Rng
from fedblur.privacy import events
from fedblur.privacy.mechanisms import rounded_gaussian
from fedblur.privacy.mechanisms.base import Conditions, Noise, Once, Release, demand_bound

if TYPE_CHECKING:
    from torch import Tensor

    from fedblur.privacy.clipping import Bounded


_FINE = 20  # bits that an even update's coordinates, S/√d, have on the grid: rounding costs a share of 2^-20 of them
_SMALL, _LARGE = 20, 32  # bits of the noise's standard deviation on the grid: at least, at most
_STEPS = 2.0**41  # the longest message, in steps, so that
_ROWS = 2**11  # this many of them add up to less than 2^53
_RANGE = 120  # γ stays within 2^±120: float32 holds every v/γ
_CACHED = 2**15  # coordinates that are summed at once


@dataclass(frozen=True)
class FixedPoint:
    """A grid of multiples of `step`."""

    step: float  # γ, a power of two

    @classmethod
    def of(cls, release: Release) -> FixedPoint:
        """Choose the grid of a round, fine against both one client's typical coordinate and the noise.

        clip_norm = inf                      refused: there is no grid for messages without a bound
        """
        if not 0 < release.clip_norm < math.inf:
            raise PrivacyError(f"clip_norm={release.clip_norm} must be above 0 and finite: it sets the grid")
        exponent = _floor_log2(release.clip_norm / math.sqrt(release.dimension)) - _FINE
        if release.noise_std > 0:
            noise = _floor_log2(release.noise_std)
            exponent = max(min(exponent, noise - _SMALL), noise - _LARGE)
        step = math.ldexp(1.0, exponent)
        if release.clip_norm > _STEPS * step:
            raise PrivacyError(
                f"a message of {release.dimension:,} coordinates needs more than 2^41 grid steps to its clip norm "
                f"at noise_std={release.noise_std:g}; use more noise or a smaller model"
            )
        if abs(exponent) > _RANGE:
            raise PrivacyError(
                f"clip_norm={release.clip_norm:g} needs a grid of step 2^{exponent}, which float32 cannot hold; "
                "scale the loss so that updates are nearer to 1"
            )
        return cls(step)

    def scale(self, noise_std: float) -> float:
        """Return the noise's standard deviation in steps: at least the exact quotient."""
        return noise_std / self.step * (1 + 2.0**-50)  # σ·S was rounded, by 2^-53

    def add_rows(self, total: Tensor, values: Tensor) -> None:
        """Add all rows, [rows, d] float, to the whole numbers of `total`, [d] int64."""
        width = _CACHED if total.device.type == "cpu" else len(total)  # on a CPU, what fits into a cache
        for some in torch.split(values, _ROWS):
            for part, rows in zip(torch.split(total, width), torch.split(some, width, dim=1), strict=True):
                whole = (rows * (1 / self.step)).trunc_()  # towards zero: no norm grows
                part += whole.sum(0, dtype=torch.float64).long()

    def values(self, whole: Tensor) -> Tensor:
        """Return what the whole numbers stand for, float32. Post-processing: use it on noisy sums only."""
        return (whole.double() * self.step).float()


def _floor_log2(value: float) -> int:
    """Return ⌊log₂ value⌋ without a logarithm: the same on every machine, so all parties have one grid."""
    return math.frexp(value)[1] - 1


@register("mechanism", "gaussian")
@dataclass(frozen=True)
class Gaussian:
    """Gaussian noise on the sum, added by the server in whole numbers."""

    @property
    def trust(self) -> str:
        """The parties that must be trusted for the guarantee to hold."""
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
        """Return the exact sum, [d] int64; without a clip norm there is no privacy and no grid, and it is float64."""
        if math.isinf(release.clip_norm):
            plain = torch.zeros(release.dimension, dtype=torch.float64, device=release.device)
            for block in blocks:
                plain += demand_bound(block, release).sum(0, dtype=torch.float64)
            return plain
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
        """Return the noisy sum, [d] float32. Without a clip norm, and so without a claim, floats are released."""
        if math.isinf(release.clip_norm) and not release.noise_std:
            return total.float()
        for name, part in (("sum", total), ("noise", noise)):
            if part.dtype != torch.int64 or part.shape != (release.dimension,):
                raise PrivacyError(
                    f"the {name} must be {release.dimension} whole numbers, not {part.dtype} of shape {[*part.shape]}"
                )
        return FixedPoint.of(release).values(total + noise)
