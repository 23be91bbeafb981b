"""A small residual network with GroupNorm, for privacy: deep for its number of parameters.

A stem (convolution, max-pool, norm) halves the image before anything costs much. Then one residual block of two 3x3
convolutions per width, each but the first after a 2x2 average, which does not alias as a stride does. The last block is
averaged to a grid of cells and read by one dense layer. 91,206 parameters on 1x28x28 with 62 classes by default.

`front = "wavelets"` replaces the image by the moduli of a fixed bank of Morlet wavelets and a local mean (one layer of
scattering): features that cost no parameters, hence no noise.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.models.base import average_to, conv, group_norm, he_, image_shape, require_side

SCALES, ANGLES = 2, 8  # of the wavelets
_REACH = 4  # a filter is 2 · reach + 1 wide
_SMALLEST = 1e-4  # keeps the modulus smooth at 0


@register("model", "gn_resnet")
@dataclass(frozen=True)
class GnResNet:
    """Images whose sides survive the pools: at least 8x8 with two widths and a grid of 2x2."""

    stem: int = 24  # channels of the first convolution
    widths: tuple[int, ...] = (32, 64)  # channels of the residual blocks
    kernel: int = 5  # side of the first convolution's filters
    cells: int = 2  # the head reads cells x cells averages of each channel
    standardise: bool = False  # weight standardisation
    front: Literal["none", "wavelets"] = "none"  # fixed filters before the stem
    head_scale: float = 1.0  # logits = head_scale · head(features): which share of an update is the head's

    def __post_init__(self) -> None:
        if min(self.stem, *self.widths, self.cells) < 1 or not self.widths:
            raise ConfigError(
                f"model.gn_resnet: stem={self.stem}, widths={list(self.widths)}, cells={self.cells} must be 1 or more"
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"model.gn_resnet.kernel={self.kernel} must be odd")
        if not 0 < self.head_scale < float("inf"):
            raise ConfigError(f"model.gn_resnet.head_scale={self.head_scale} must be above 0 and finite")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("gn_resnet", shape)
        shrink = 2 ** len(self.widths)  # the stem and every block but the first halve the sides
        require_side("gn_resnet", shape, self.cells * shrink)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if self.front == "wavelets":  # it halves the sides itself
            layers["front"] = front = Wavelets(channels)
            layers["stem"] = conv(front.channels, self.stem, 1, self.standardise)
        else:
            layers["stem"] = conv(channels, self.stem, self.kernel, self.standardise)
            layers["pool"] = nn.MaxPool2d(2)
        layers["norm"] = group_norm(self.stem)
        layers["relu"] = nn.ReLU()
        for index, (inputs, outputs) in enumerate(pairwise((self.stem, *self.widths)), start=1):
            layers[f"block{index}"] = Residual(inputs, outputs, shrink=index > 1, standardise=self.standardise)
        layers["average"] = average_to(self.cells, height // shrink, width // shrink)
        layers["flatten"] = nn.Flatten()
        layers["head"] = nn.Linear(self.widths[-1] * self.cells**2, classes)
        if self.head_scale != 1:
            layers["scale"] = Scale(self.head_scale)
        module = nn.Sequential(layers)
        he_(module)
        return module


class Residual(nn.Module):
    """Two 3x3 convolutions around a shortcut, which is projected (1x1) where the width changes."""

    def __init__(self, inputs: int, outputs: int, shrink: bool, standardise: bool) -> None:
        super().__init__()
        self.pool: nn.Module = nn.AvgPool2d(2) if shrink else nn.Identity()
        self.conv1 = conv(inputs, outputs, 3, standardise)
        self.norm1 = group_norm(outputs)
        self.conv2 = conv(outputs, outputs, 3, standardise)
        self.norm2 = group_norm(outputs)
        self.shortcut: nn.Module = nn.Identity() if inputs == outputs else conv(inputs, outputs, 1, standardise)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(x)
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class Scale(nn.Module):
    """Logits times a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


class Wavelets(nn.Module):
    """Fixed filters, at half the resolution: for each input channel one low-pass and `SCALES` x `ANGLES` moduli.

    [batch, C, H, W] -> [batch, C · (1 + SCALES · ANGLES), H/2, W/2]. Constants: nothing is clipped or noised.
    """

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
    """Return [1 + 2 · SCALES · ANGLES, 1, side, side]: a Gaussian, then real and imaginary parts of zero-mean waves."""
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
