"""From real updates to whole numbers modulo 2^b: how fine the grid is, and rounding that keeps a norm bound.

In units of the grid's step γ, the clip norm is c = S/γ steps long and the noise on the sum has standard deviation σc.
Everything is in proportion to S, so the grid is chosen from (σ, d', pN, b) alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from fedblur.errors import PrivacyError
from fedblur.mechanisms.hadamard import Rotation
from fedblur.rng import Rng


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
        """γ."""
        return clip_norm / self.clip_steps

    def wrap(self, values: Tensor) -> Tensor:
        """Whole numbers modulo 2^b, into [−2^(b−1), 2^(b−1)), int64."""
        half = self.modulus // 2
        return torch.remainder(values.long() + half, self.modulus) - half


def noise_room(bits: int, k_stddevs: float, expected_cohort: float) -> float:
    """The largest standard deviation, in steps, of signal and noise together that 2^b leaves room for.

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
    """The finest grid for which the sum stays k standard deviations away from the modulus.

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
    """B: a vector of norm at most c, rounded at random, exceeds it with probability β at most."""
    certain = (clip_steps + math.sqrt(dimension)) ** 2
    if beta == 0:
        return math.sqrt(certain)
    spread = math.sqrt(2 * math.log(1 / beta)) * (clip_steps + math.sqrt(dimension) / 2)
    return math.sqrt(min(certain, clip_steps**2 + dimension / 4 + spread))


def round_within(values: Tensor, bound: float, numbers: range, rng: Rng) -> Tensor:
    """Conditional stochastic rounding of each row: up or down at random, again until the norm is at most `bound`.

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
    """Uniform numbers that need no secrecy, made where they are used."""
    if device.type == "cpu":
        return torch.from_numpy(np.asarray(rng.numpy().random(count)))
    generator = torch.Generator(device).manual_seed(rng.seed())
    return torch.rand(count, generator=generator, dtype=torch.float64, device=device)
