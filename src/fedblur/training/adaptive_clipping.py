"""Adaptive clipping (Andrew et al. 2021): the clip norm follows a quantile of the clients' norms, privately.

    b_i = 1[‖Δ_i‖ ≤ C_t];   b̃ = (Σ (b_i − ½) + N(0, σ_b²))/(pN) + ½;   C_{t+1} = C_t·exp(−η_C·(b̃ − q))

The noisy bit count is part of the round's one release. A vector of sensitivity C with the multiplier z_Δ and bits of
sensitivity ½ with the noise σ_b are together one Gaussian with the multiplier z, where z⁻² = z_Δ⁻² + (2σ_b)⁻². So the
event in the ledger is what it is without adaptive clipping; the vector pays with slightly more noise, z_Δ > z.

C_t is computed from released values alone, so it is public. It is what round t uses for the clip, the noise and BLUR.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.training.server import ServerState

_BUFFER = "clipping.norm"
_FAR = 700.0  # an exponent that is within a float; what comes of it is bounded below
_REACH = 1e6  # C_t stays within this factor of its start: if all updates are zero, it must not run out of float32


@register("clipping", "adaptive")
@dataclass(frozen=True)
class Adaptive:
    """Start at clip_norm and move towards a quantile of the update norms."""

    quantile: float = 0.5  # q: the share of updates that should stay below S
    rate: float = 0.2  # η_C: how fast S follows
    bit_noise: float | None = None  # σ_b: noise on the count of updates below S; None: pN/20

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise ConfigError(f"clipping.quantile={self.quantile} must be in (0, 1)")
        if not 0 < self.rate < math.inf:
            raise ConfigError(f"clipping.rate={self.rate} must be above 0 and finite")
        if self.bit_noise is not None and not 0 < self.bit_noise < math.inf:
            raise ConfigError(f"clipping.bit_noise={self.bit_noise} must be above 0 and finite")

    def bit_std(self, expected_cohort: float) -> float:
        """Return σ_b, the noise on the count of bits."""
        return expected_cohort / 20 if self.bit_noise is None else self.bit_noise

    def vector_multiplier(self, noise_multiplier: float, expected_cohort: float) -> float:
        """Return z_Δ = (z⁻² − (2σ_b)⁻²)^(−½), the vector's noise in units of C: the joint release has multiplier z.

        z = 0 gives 0 (no noise at all); z ≥ 2σ_b is a ConfigError, since the bits alone would cost more than z.
        """
        bit_std = self.bit_std(expected_cohort)
        if noise_multiplier >= 2 * bit_std:
            raise ConfigError(
                f"clipping.bit_noise={bit_std:g} is too little for noise_multiplier={noise_multiplier:.4g}: it must be "
                f"above {noise_multiplier / 2:.4g}; set clipping.bit_noise or raise sample_rate (the default is pN/20)"
            )
        return noise_multiplier / math.sqrt(1 - (noise_multiplier / (2 * bit_std)) ** 2)

    def bit_weight(self, clip_norm: float, noise_multiplier: float, expected_cohort: float) -> float:
        """Return c = z_Δ·C/σ_b: the noise z_Δ·C of a coordinate ± c/2, as of all coordinates, is σ_b in units of c."""
        if noise_multiplier == 0:
            return clip_norm  # without noise any weight will do
        return self.vector_multiplier(noise_multiplier, expected_cohort) * clip_norm / self.bit_std(expected_cohort)

    def clip_norm(self, state: ServerState, start: float) -> float:
        """Return C_t of the round that this state is about to do."""
        return float(state.buffers[_BUFFER]) if _BUFFER in state.buffers else start

    def largest(self, start: float) -> float:
        """Return the largest C_t that it can reach."""
        return start * _REACH

    def update(self, state: ServerState, bits: float, expected_cohort: float, start: float) -> ServerState:
        """Return the state with C_{t+1}, from the noisy Σ (b − ½) over the constant pN."""
        share = bits / expected_cohort + 0.5  # b̃
        moved = self.clip_norm(state, start) * math.exp(min(-self.rate * (share - self.quantile), _FAR))
        bounded = min(max(moved, start / _REACH), self.largest(start))
        tensor = torch.tensor(bounded, dtype=torch.float64, device=state.theta.device)
        return replace(state, buffers={**state.buffers, _BUFFER: tensor})
