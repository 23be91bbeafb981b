"""Discrete mechanisms: whole numbers, whole noise, summed modulo 2^b, as a secure sum can do it.

    client   update → rotate → divide by γ → round within B → (add a share of the noise) → modulo 2^b
    sum      Σ modulo 2^b, the only thing that anyone sees
    server   (add the noise) → centre → times γ → rotate back

Where the noise is added is the `mode`. A mechanism is DDGauss or Skellam: a law for the noise, and the event of it.

In units of the grid's step γ, the clip norm is c = S/γ steps long and the noise on the sum has standard deviation σc.
Everything is in proportion to S, so the grid is chosen from (σ, d', pN, b) alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedblur.core.errors import ConfigError, PrivacyError, RoundAborted
from fedblur.core.lazy import torch
from fedblur.core.rng import Keystream, Rng
from fedblur.privacy.events import Event
from fedblur.privacy.mechanisms.base import Conditions, Noise, Once, Release, demand_bound
from fedblur.privacy.mechanisms.hadamard import Rotation
from fedblur.privacy.mechanisms.rounded_gaussian import Values, begin_draw

if TYPE_CHECKING:
    from torch import Tensor

    from fedblur.privacy.clipping import Bounded

_TOLD = (
    "min_cohort lets the noise tell how many clients came, so sampling amplifies nothing: sample_rate=1 would cost the "
    "same epsilon and give more signal."
)
_BROKEN, _DEGRADED = 2.0, 1.05  # inflation of the sensitivity from which a plan says so


@dataclass(frozen=True)
class Grid:
    """A grid for one noise multiplier. All lengths are in steps."""

    clip_steps: float  # c = S/γ
    noise_steps: float  # σ·c, the noise on the sum
    sensitivity: float  # B ≥ c: no rounded update is longer
    modulus: int  # 2^b

    @property
    def inflation(self) -> float:
        """B/c: how many times more noise than on real numbers the same epsilon needs."""
        return self.sensitivity / self.clip_steps

    def step(self, clip_norm: float) -> float:
        """Return the step γ."""
        return clip_norm / self.clip_steps

    def wrap(self, values: Tensor) -> Tensor:
        """Wrap whole numbers modulo 2^b, into [−2^(b−1), 2^(b−1)), int64."""
        half = self.modulus // 2
        return torch.remainder(values.long() + half, self.modulus) - half


def noise_room(bits: int, k_stddevs: float, expected_cohort: float) -> float:
    """Return the largest standard deviation of signal and noise together, in steps, that fits into 2^b.

    k standard deviations on either side of 0, less the rounding errors of n clients (at most ¼ each, as variance).
    """
    room = (2.0**bits / (2 * k_stddevs)) ** 2 - expected_cohort / 4
    return math.sqrt(room) if room > 0 else 0.0


def fit_grid(
    noise_multiplier: float,
    rotation: Rotation,
    expected_cohort: float,
    bits: int,
    k_stddevs: float,
    beta: float,
    excess: float = 1.0,
) -> Grid:
    """Return the finest grid for which the sum stays k standard deviations away from the modulus.

    The condition, with n = pN and all updates aligned, is 2^b ≥ 2k·√(ρ(nc)²/d' + n/4 + (σc)²). `excess`
    is the variance of the noise on a full cohort's sum over (σc)²: above 1 where shares are sized for fewer clients.

        c < 1                                PrivacyError: the grid is coarser than the clip norm
    """
    signal = rotation.flatness * expected_cohort**2 / rotation.padded
    clip_steps = noise_room(bits, k_stddevs, expected_cohort) / math.sqrt(signal + excess * noise_multiplier**2)
    sensitivity = norm_bound(clip_steps, rotation.padded, beta)
    if clip_steps < 1:
        raise PrivacyError(
            f"bits={bits} is broken here: rounding {rotation.padded:,} coordinates makes an update {sensitivity:.3g} "
            f"steps long, and {bits} bits have no room for more than {noise_multiplier * clip_steps:.3g} steps of "
            "noise, which hides too little; raise bits (16 suits most models) or use a smaller model"
        )
    return Grid(clip_steps, noise_multiplier * clip_steps, sensitivity, 2**bits)


def norm_bound(clip_steps: float, dimension: int, beta: float) -> float:
    """Return B, which a vector of norm at most c, rounded at random, exceeds with probability β at most."""
    certain = (clip_steps + math.sqrt(dimension)) ** 2
    if beta == 0:
        return math.sqrt(certain)
    spread = math.sqrt(2 * math.log(1 / beta)) * (clip_steps + math.sqrt(dimension) / 2)
    return math.sqrt(min(certain, clip_steps**2 + dimension / 4 + spread))


def round_within(values: Tensor, bound: float, numbers: range, rng: Rng) -> Tensor:
    """Round each row stochastically: up or down at random, and again until the norm is at most `bound`.

    Formal guarantee: every row's exact l2 norm is at most `bound` (sums of squares below 2^53 are exact, and compared
    with a whole number), whatever the values and the coins, so these coins need no secrecy. Without the condition each
    coordinate would be unbiased; with it the bias is at most of the order of β, and next to nothing where B is rarely
    exceeded. `numbers` are the rows' clients in this round: their coins do not depend on how clients are divided into
    blocks and processes.
    """
    floor = torch.floor(values)
    fraction = values - floor
    rounded = torch.empty_like(values)
    longest = float(math.floor(Fraction(bound) ** 2)) if bound < math.inf else math.inf
    rejected, attempt = torch.arange(len(values), device=values.device), 0
    while len(rejected):
        streams = [rng.child("rounding", numbers[row], attempt) for row in rejected.tolist()]
        coins = torch.stack([_public_uniform(stream, values.shape[1], values.device) for stream in streams])
        rounded[rejected] = floor[rejected] + (coins < fraction[rejected])
        rejected = rejected[rounded[rejected].square().sum(1) > longest]
        attempt += 1
    return rounded


def _public_uniform(rng: Rng, count: int, device: torch.device) -> Tensor:
    """Draw uniform numbers that need no secrecy, on the device that uses them."""
    if device.type == "cpu":
        return torch.from_numpy(np.asarray(rng.numpy().random(count)))
    generator = torch.Generator(device).manual_seed(rng.seed())
    return torch.rand(count, generator=generator, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class DiscreteMechanism(ABC):
    """Settings that all discrete mechanisms have."""

    bits: int = 16  # b: sums are modulo 2^b
    k_stddevs: float = 4.0  # k: the modulus leaves room for this many standard deviations of the sum
    beta: float = math.exp(-0.5)  # β: at most this share of roundings is drawn again
    mode: Literal["fast", "exact"] = "fast"  # one draw of noise on the sum, or one per client
    bound: Literal["tight", "general"] = "tight"  # of sampling (`renyi_discrete.py`)
    min_cohort: int | None = None  # noise is shared among so many, fewer abort the round; None: those who came

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
        """The parties that must be trusted for the guarantee to hold."""
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
        """Refuse conditions that no grid fits: an infinite clip norm, or more clients than b bits can sum."""
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
        """Return the event of a release whose noise is the sum of up to `shares` draws."""

    @abstractmethod
    def draw(self, std: float, count: int, source: Keystream, threads: int = 1) -> Values:
        """Draw noise of this standard deviation."""


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
        """Return the grid for noise of σ clip norms on the sum."""
        part, cohort, excess = self.part, self.conditions.expected_cohort, self.excess
        return fit_grid(noise_multiplier, self.rotation, cohort, bits or part.bits, part.k_stddevs, part.beta, excess)

    def event(self, noise_multiplier: float) -> Event:
        shares = 1 if self.part.mode == "fast" else self.conditions.clients + 1
        return self.part.grid_event(self.grid(noise_multiplier), self.rotation.padded, shares)

    def notes(self, noise_multiplier: float) -> tuple[str, ...]:
        """Describe the grid in figures, with a warning if it is too coarse."""
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
        enough = (bits for bits in range(self.part.bits + 1, 25) if self.grid(plain, bits).inflation < _DEGRADED)
        bits = next(enough, None)
        way_out = "use a smaller model" if bits is None else f"use {bits} bits or more"
        word = "broken here" if grid.inflation >= _BROKEN else "coarse here"
        reason = (
            f"{self.part.bits} bits are {word}: rounding {self.rotation.padded:,} coordinates lengthens an update from "
            f"S = {grid.clip_steps:.3g} steps to {grid.sensitivity:.3g}, so the same epsilon needs noise of "
            f"{noise_multiplier:.3g} S where {plain:.3g} S would do; {way_out}."
        )
        return (reason, figures, *told)

    def accumulate(self, blocks: Iterable[Bounded], release: Release, rng: Rng) -> Tensor:
        """Return the sum modulo 2^b, [d'] int64."""
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
        """Encode messages for the secure sum: rotated, rounded, with a share of the noise; [clients, d'] int64."""
        grid, rotation = self._grid_of(release), self.rotation
        signs = rotation.signs(release.round_, release.device)
        steps = rotation.forward(demand_bound(block, release), signs) / grid.step(release.clip_norm)
        whole = round_within(steps, grid.sensitivity, numbers, rng).long()
        if self.part.mode == "exact":
            whole += self._shares(numbers, grid, release, rng)
        return grid.wrap(whole)

    def draw(self, release: Release, rng: Rng) -> Noise:
        """Draw the whole noise in whole numbers; none if clients add it in shares and at least one came."""
        grid, padded = self._grid_of(release), self.rotation.padded
        if self.part.mode == "exact" and release.cohort:  # an empty cohort is noisy too
            return Once(lambda: torch.zeros(padded, dtype=torch.int64, device=release.device))
        source = rng.child("noise").keystream()
        coming = begin_draw(lambda threads: self.part.draw(grid.noise_steps, padded, source, threads), padded)
        return Once(lambda: coming().to(release.device))

    def release(self, total: Tensor, release: Release, noise: Tensor) -> Tensor:
        """Return the noisy sum, [d] float32."""
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
        """Return one share's standard deviation in steps, rounded up: shares have at least the promised variance."""
        return grid.noise_steps / math.sqrt(self.part.min_cohort or cohort) * (1 + 2.0**-50)

    def _grid_of(self, release: Release) -> Grid:
        if release.dimension != self.conditions.dimension:
            raise PrivacyError(
                f"messages of {release.dimension} values met a grid laid for {self.conditions.dimension}; plan again"
            )
        return self.grid(release.noise_multiplier)


def overflow_share(k_stddevs: float) -> float:
    """Return the chance that a normal variable is more than k standard deviations away from its mean."""
    return math.erfc(k_stddevs / math.sqrt(2))
