"""A fixed front end: moduli of Morlet wavelets and a local mean, at half the resolution (one layer of scattering).

Nothing here is trained, so nothing is clipped or noised: the filters are constants. In: [batch, C, H, W]. Out: for each
input channel one low-pass and `SCALES` x `ANGLES` moduli, [batch, C · (1 + SCALES · ANGLES), H/2, W/2].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

SCALES, ANGLES = 2, 8
_REACH = 4  # a filter is 2 · reach + 1 wide
_SMALLEST = 1e-4  # keeps the modulus smooth at 0


class Wavelets(nn.Module):
    """The front end for images of `inputs` channels."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.channels = inputs * (1 + SCALES * ANGLES)
        self.filters = nn.Parameter(_bank(), requires_grad=False)  # a constant that follows the module to its device

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        single = x.reshape(batch * channels, 1, height, width)
        # torch.convolution, not F.conv2d: one filter bank for all clients needs no per-client kernel
        waves = torch.convolution(
            single, self.filters.to(x.dtype), None, [1, 1], [_REACH] * 2, [1, 1], False, [0, 0], 1
        )
        low, real, imaginary = torch.split_with_sizes(waves, [1, SCALES * ANGLES, SCALES * ANGLES], dim=1)
        moduli = (real.square() + imaginary.square() + _SMALLEST).sqrt()
        pooled = nn.functional.avg_pool2d(torch.cat([low, moduli], dim=1), 2)
        return pooled.reshape(batch, self.channels, height // 2, width // 2)


def _bank() -> Tensor:
    """[1 + 2 · SCALES · ANGLES, 1, side, side]: a Gaussian, then real and imaginary parts of waves without a mean."""
    axis = torch.arange(-_REACH, _REACH + 1, dtype=torch.float64)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    real, imaginary = [], []
    for scale in range(SCALES):
        spread, speed = 0.8 * 2**scale, 3 * math.pi / 4 / 2**scale
        for angle in range(ANGLES):
            turn = math.pi * angle / ANGLES
            along = x * math.cos(turn) + y * math.sin(turn)
            across = -x * math.sin(turn) + y * math.cos(turn)
            hill = torch.exp(-(along**2 + (across / 2) ** 2) / (2 * spread**2))  # twice as long as wide
            hill = hill / hill.sum()
            cosine = hill * torch.cos(speed * along)
            real.append(cosine - hill * cosine.sum())
            imaginary.append(hill * torch.sin(speed * along))
    low = torch.exp(-(x**2 + y**2) / 2)
    return torch.stack([low / low.sum(), *real, *imaginary])[:, None].float()
