"""Discrete mechanisms: whole numbers, whole noise, summed modulo 2^b, as a secure sum can do it.

    client   update → rotate → divide by γ → round within B → (add a share of the noise) → modulo 2^b
    sum      Σ modulo 2^b, the only thing that anyone sees
    server   (add the noise) → centre → times γ → rotate back

Where the noise is added is the `mode`. A mechanism is DDGauss or Skellam: a law for the noise, and the event of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedblur.clipping import Bounded
from fedblur.errors import ConfigError, PrivacyError, RoundAborted
from fedblur.events import Event
from fedblur.mechanisms import rejection
from fedblur.mechanisms.base import Conditions, Noise, Once, Release, demand_bound
from fedblur.mechanisms.grid import Grid, fit_grid, noise_room, round_within
from fedblur.mechanisms.hadamard import Rotation
from fedblur.mechanisms.rejection import Values
from fedblur.rng import Keystream, Rng

_TOLD = (
    "min_cohort lets the noise tell how many clients came, so sampling amplifies nothing: sample_rate=1 would cost the "
    "same epsilon and give more signal."
)
_BROKEN, _DEGRADED = 2.0, 1.05  # inflation of the sensitivity from which a plan says so


@dataclass(frozen=True)
class DiscreteMechanism(ABC):
    """Settings that all discrete mechanisms have."""

    bits: int = 16  # b: sums are modulo 2^b
    k_stddevs: float = 4.0  # k: the modulus leaves room for this many standard deviations of the sum
    beta: float = math.exp(-0.5)  # β: at most this share of roundings is drawn again
    mode: Literal["fast", "exact"] = "fast"  # one draw of noise on the sum, or one per client
    bound: Literal["tight", "general"] = "tight"  # of sampling (`renyi_discrete.py`)
    min_cohort: int | None = (
        None  # shares are sized for so many clients, fewer abort the round; None: for those who came
    )

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 24:
            raise ConfigError(f"mechanism.bits={self.bits} must be between 2 and 24")
        if not 0 < self.k_stddevs < math.inf:
            raise ConfigError(f"mechanism.k_stddevs={self.k_stddevs} must be above 0")
        if not 0 <= self.beta < 1:
            raise ConfigError(f"mechanism.beta={self.beta} must be in [0, 1)")
        if self.min_cohort is not None and (self.mode == "fast" or self.min_cohort < 1):
            raise ConfigError(
                f'mechanism.min_cohort={self.min_cohort} must be 1 or more, and needs mechanism.mode = "exact": '
                "it sizes clients' shares"
            )

    @property
    def trust(self) -> str:
        """Who must be trusted for the guarantee to hold."""
        if self.mode == "fast":
            return f"an ideal secure sum modulo 2^{self.bits} that adds the noise itself, in one draw (simulated)"
        least = (
            "the cohort that takes part"
            if self.min_cohort is None
            else f"{self.min_cohort} clients, the fewest accepted"
        )
        shares = f"each with its share of the noise, sized for {least}"
        return f"an ideal secure sum modulo 2^{self.bits} of clients' messages, {shares} (simulated)"

    def bind(self, conditions: Conditions) -> SecureSum:
        """Refuses conditions that no grid fits: an infinite clip norm, or more clients than b bits can sum."""
        name = getattr(self, "part_name", type(self).__name__)
        if not math.isfinite(conditions.clip_norm):
            raise ConfigError(f'clip_norm=inf leaves {name} no grid to round to; set mechanism = "gaussian"')
        if not noise_room(self.bits, self.k_stddevs, conditions.expected_cohort):
            raise PrivacyError(
                f"mechanism.bits={self.bits} cannot hold the rounding errors of {conditions.expected_cohort:g} clients "
                "a round; raise it (16 suits most models)"
            )
        return SecureSum(self, conditions)

    @abstractmethod
    def grid_event(self, grid: Grid, dimension: int, shares: int) -> Event:
        """What a release costs whose noise is the sum of up to `shares` draws."""

    @abstractmethod
    def draw(self, std: float, count: int, source: Keystream, threads: int = 1) -> Values:
        """Noise of this standard deviation."""


@dataclass(frozen=True)
class SecureSum:
    """A discrete mechanism under the conditions of a run.

    Shares (mode "exact") are sized for the cohort that takes part, which the secure sum knows and nobody else learns:
    n shares of variance (σc)²/n each. Sized for pN, a small cohort would have too little noise. Fewer shares than they
    were sized for abort the round (invariant 8). Events count N + 1 shares, the most that any neighbour can have.

    Real clients must add their share before anyone knows who will drop out. With `min_cohort` = m shares have variance
    (σc)²/m: m of them are enough, more are more noise than was promised, and fewer than m clients abort the round. So
    the noise tells how many came, and sampling amplifies nothing (`PoissonSampler.seen`).
    """

    part: DiscreteMechanism
    conditions: Conditions

    @property
    def trust(self) -> str:
        return self.part.trust

    @property
    def shows_cohort(self) -> bool:
        """With `min_cohort` more clients are more noise, which a million coordinates show; and few abort the round."""
        return self.part.min_cohort is not None

    @property
    def excess(self) -> float:
        """Shares of the noise are sized for `min_cohort` clients, and more come."""
        cohort = self.conditions.expected_cohort
        return max(1.0, cohort / (self.part.min_cohort or cohort))

    @property
    def rotation(self) -> Rotation:
        return Rotation(self.conditions.dimension)

    def grid(self, noise_multiplier: float, bits: int | None = None) -> Grid:
        """The grid for noise of σ clip norms on the sum."""
        part, cohort, excess = self.part, self.conditions.expected_cohort, self.excess
        return fit_grid(noise_multiplier, self.rotation, cohort, bits or part.bits, part.k_stddevs, part.beta, excess)

    def event(self, noise_multiplier: float) -> Event:
        shares = 1 if self.part.mode == "fast" else self.conditions.clients + 1
        return self.part.grid_event(self.grid(noise_multiplier), self.rotation.padded, shares)

    def notes(self, noise_multiplier: float) -> tuple[str, ...]:
        """The grid in figures, and a word where it is too coarse."""
        grid, here = self.grid(noise_multiplier), self.conditions
        share = self._share_std(grid, here.expected_cohort)
        figures = (
            f"{self.part.bits} bits: {self.rotation.padded:,} coordinates are sent, steps of "
            f"{grid.step(here.clip_norm):.3g}; S = {grid.clip_steps:.4g} steps, a client's share of the noise "
            f"{share:.4g}; rounding makes the sensitivity {grid.inflation:.4g} S; if all updates align, a coordinate "
            f"wraps around with a chance of {overflow_share(self.part.k_stddevs):.2g}."
        )
        told = (_TOLD,) if self.shows_cohort and here.expected_cohort < here.clients else ()
        if grid.inflation < _DEGRADED:
            return (figures, *told)
        plain = noise_multiplier / grid.inflation
        word = "broken here" if grid.inflation >= _BROKEN else "coarse here"
        reason = (
            f"{self.part.bits} bits are {word}: rounding {self.rotation.padded:,} coordinates lengthens an update from "
            f"S = {grid.clip_steps:.3g} steps to {grid.sensitivity:.3g}, so the same epsilon needs noise of "
            f"{noise_multiplier:.3g} S where {plain:.3g} S would do; {self._way_out(plain)}."
        )
        return (reason, figures, *told)

    def _way_out(self, plain: float) -> str:
        for bits in range(self.part.bits + 1, 25):
            if self.grid(plain, bits).inflation < _DEGRADED:
                return f"use {bits} bits or more"
        return "use a smaller model"

    def accumulate(self, blocks: Iterable[Bounded], release: Release, rng: Rng) -> Tensor:
        """The sum modulo 2^b, [d'] int64."""
        grid, least = self._grid_of(release), self.part.min_cohort
        if least is not None and release.cohort < least:
            raise RoundAborted(
                f"{release.cohort} clients of the {least} that noise shares are sized for; round aborted"
            )
        total = torch.zeros(self.rotation.padded, dtype=torch.int64, device=release.device)
        sent = 0
        for block in blocks:
            whole = self.encode(block, release.next_numbers(sent, len(block.value)), release, rng)
            total = grid.wrap(total + whole.sum(0))
            sent += len(whole)
        if self.part.mode == "exact" and sent < len(release.numbers):  # invariant 8: too few shares is too little noise
            raise PrivacyError(
                f"{sent} noise shares arrived of the {len(release.numbers)} that they were sized for; round aborted"
            )
        return total

    def encode(self, block: Bounded, numbers: range, release: Release, rng: Rng) -> Tensor:
        """What clients give to the secure sum: rotated, rounded, with their share of the noise; [clients, d'] int64."""
        grid, rotation = self._grid_of(release), self.rotation
        signs = rotation.signs(release.round_, release.device)
        steps = rotation.forward(demand_bound(block, release), signs) / grid.step(release.clip_norm)
        whole = round_within(steps, grid.sensitivity, numbers, rng).long()
        if self.part.mode == "exact":
            whole += self._shares(numbers, grid, release, rng)
        return grid.wrap(whole)

    def draw(self, release: Release, rng: Rng) -> Noise:
        """Of the whole noise, in whole numbers; none where clients add it in shares and at least one came."""
        grid, padded = self._grid_of(release), self.rotation.padded
        if self.part.mode == "exact" and release.cohort:  # an empty cohort is noisy too
            return Once(lambda: torch.zeros(padded, dtype=torch.int64, device=release.device))
        source = rng.child("noise").keystream()
        coming = rejection.begin(lambda threads: self.part.draw(grid.noise_steps, padded, source, threads), padded)
        return Once(lambda: coming().to(release.device))

    def release(self, total: Tensor, release: Release, noise: Tensor) -> Tensor:
        """The noisy sum, [d] float32."""
        grid, rotation = self._grid_of(release), self.rotation
        values = grid.wrap(total + noise).double() * grid.step(release.clip_norm)
        signs = rotation.signs(release.round_, release.device)
        return rotation.inverse(values[None], signs)[0].float()

    def _shares(self, numbers: range, grid: Grid, release: Release, rng: Rng) -> Tensor:
        std = self._share_std(grid, release.cohort)
        sources = [rng.child("share", number).keystream() for number in numbers]
        shares = [torch.from_numpy(self.part.draw(std, self.rotation.padded, source)) for source in sources]
        return torch.stack(shares).to(release.device)

    def _share_std(self, grid: Grid, cohort: float) -> float:
        """Of one client's share, in steps; rounded up, so that as many shares have at least the promised variance."""
        return grid.noise_steps / math.sqrt(self.part.min_cohort or cohort) * (1 + 2.0**-50)

    def _grid_of(self, release: Release) -> Grid:
        if release.dimension != self.conditions.dimension:
            raise PrivacyError(
                f"messages of {release.dimension} values met a grid laid for {self.conditions.dimension}; plan again"
            )
        return self.grid(release.noise_multiplier)


def overflow_share(k_stddevs: float) -> float:
    """The chance that a normal variable is more than k standard deviations away from its mean."""
    return math.erfc(k_stddevs / math.sqrt(2))
