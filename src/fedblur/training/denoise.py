"""Stage 6, denoise: what the server makes of the noisy mean before its step. Post-processing, free of privacy cost.

In: the noisy sum over the constant pN, [d], and the known standard deviation of its noise. Out: the same, with less
noise or less signal. Only released values and public constants are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.module_function import Layout


class Denoise(Protocol):
    """A part of kind "denoise"."""

    def clean(self, mean: Tensor, noise_std: float, layout: Layout) -> Tensor:
        """Return the mean update [d] that the server's optimiser sees."""


@register("denoise", "threshold")
@dataclass(frozen=True)
class Threshold:
    """Soft threshold: every coordinate moves towards 0 by `strength` standard deviations of the noise."""

    strength: float = 0.5  # 0: no change

    def __post_init__(self) -> None:
        _demand_strength(self.strength)

    def clean(self, mean: Tensor, noise_std: float, layout: Layout) -> Tensor:
        return mean.sign() * (mean.abs() - self.strength * noise_std).clamp(min=0)


@register("denoise", "shrink")
@dataclass(frozen=True)
class Shrink:
    """James-Stein's factor for each tensor: max(0, 1 − strength·n·noise_std²/‖G‖²), n values in the tensor.

    A tensor whose update is all noise stands still; one that is all signal moves as it would.
    """

    strength: float = 0.9  # 0: no change

    def __post_init__(self) -> None:
        _demand_strength(self.strength)

    def clean(self, mean: Tensor, noise_std: float, layout: Layout) -> Tensor:
        shrunk = []
        for part in torch.split_with_sizes(mean, layout.sizes):
            expected = self.strength * part.numel() * noise_std**2
            shrunk.append(part * (1 - expected / part.square().sum().clamp(min=1e-30)).clamp(min=0))
        return torch.cat(shrunk)


@register("denoise", "laplacian")
@dataclass(frozen=True)
class Laplacian:
    """Laplacian smoothing (Wang et al. 2019): (I − strength·L)⁻¹ G along the flat vector, a circle for L."""

    strength: float = 0.5  # 0: no change

    def __post_init__(self) -> None:
        _demand_strength(self.strength)

    def clean(self, mean: Tensor, noise_std: float, layout: Layout) -> Tensor:
        turns = torch.fft.rfftfreq(len(mean), device=mean.device, dtype=mean.dtype)
        damping = 1 + 2 * self.strength * (1 - torch.cos(2 * math.pi * turns))
        smooth: Tensor = torch.fft.irfft(torch.fft.rfft(mean) / damping, n=len(mean))
        return smooth


def _demand_strength(strength: float) -> None:
    if not 0 <= strength < math.inf:
        raise ConfigError(f"denoise.strength={strength} must be 0 or more and finite")
