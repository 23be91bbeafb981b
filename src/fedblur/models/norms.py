"""What the small GroupNorm networks share: groups, convolutions with standardised weights, pooling to a grid."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_SMALLEST = 1e-5


def group_norm(width: int, largest: int = 8) -> nn.GroupNorm:
    """At most `largest` groups of at least 4 channels each where the width allows: 16 -> 4, 32 -> 8, 64 -> 8."""
    return nn.GroupNorm(math.gcd(width, min(largest, max(1, width // 4))), width)


class StandardisedConv2d(nn.Conv2d):
    """A convolution whose filters are used with mean 0 and norm √2 (weight standardisation, Qiao et al. 2019).

    Noise along a filter's mean or length then changes nothing, and filters never grow out of a learning rate.
    """

    def forward(self, input: Tensor) -> Tensor:
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        square = centred.square().sum((1, 2, 3), keepdim=True)
        unit = centred * torch.rsqrt(square + _SMALLEST)
        return nn.functional.conv2d(input, math.sqrt(2) * unit, self.bias, self.stride, self.padding)


def conv(inputs: int, outputs: int, kernel: int = 3, standardise: bool = False, bias: bool = False) -> nn.Conv2d:
    """A padded convolution, by default without the bias that a norm behind it would take out again."""
    kind = StandardisedConv2d if standardise else nn.Conv2d
    return kind(inputs, outputs, kernel, padding=kernel // 2, bias=bias)


def average_to(cells: int, height: int, width: int) -> nn.Module:
    """Averages to cells x cells. Fixed windows: AdaptiveAvgPool2d's gradient is not deterministic on CUDA."""
    stride = (height // cells, width // cells)
    kernel = (height - (cells - 1) * stride[0], width - (cells - 1) * stride[1])
    return nn.AvgPool2d(kernel, stride)
