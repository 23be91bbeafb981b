"""A small residual network with GroupNorm, for privacy: deep for its number of parameters.

A stem (convolution, max-pool, norm) halves the image before anything costs much. Then one residual block of two 3x3
convolutions per width, each but the first after a 2x2 average, which does not alias as a stride does. The last block is
averaged to a grid of cells and read by one dense layer. 91,206 parameters on 1x28x28 with 62 classes by default.

`front = "wavelets"` replaces the image by the moduli of a fixed bank of wavelets (`wavelets.py`): features that cost
no parameters, hence no noise.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from fedblur.errors import ConfigError
from fedblur.models.base import he_, image_shape, require_side
from fedblur.models.norms import average_to, conv, group_norm
from fedblur.models.wavelets import Wavelets
from fedblur.registry import register


@register("model", "gn_resnet")
@dataclass(frozen=True)
class GnResNet:
    """Images whose sides survive the pools: at least 8x8 with two widths and a grid of 2x2."""

    stem: int = 24  # channels of the first convolution
    widths: tuple[int, ...] = (32, 64)  # of the blocks
    kernel: int = 5  # of the stem
    cells: int = 2  # the head reads cells x cells averages of each channel
    standardise: bool = False  # weight standardisation
    front: Literal["none", "wavelets"] = "none"
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
        layers: OrderedDict[str, nn.Module] = self._stem(channels)
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

    def _stem(self, channels: int) -> OrderedDict[str, nn.Module]:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if self.front == "wavelets":  # it halves the sides itself
            layers["front"] = front = Wavelets(channels)
            layers["stem"] = conv(front.channels, self.stem, 1, self.standardise)
        else:
            layers["stem"] = conv(channels, self.stem, self.kernel, self.standardise)
            layers["pool"] = nn.MaxPool2d(2)
        layers["norm"] = group_norm(self.stem)
        layers["relu"] = nn.ReLU()
        return layers


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
