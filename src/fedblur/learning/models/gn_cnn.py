"""A small CNN with GroupNorm, for privacy: the noise grows with the square root of the number of parameters.

Blocks of conv 3x3 (padded), GroupNorm, ReLU, max-pool; the last block is averaged to 2x2 (or to one value)
and read by one dense layer. 39,454 parameters on 1x28x28 with 62 classes; 98,826 on 3x32x32 with 10.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import nn

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.models.base import average_to, glorot_, group_norm, image_shape, require_side


@register("model", "gn_cnn")
@dataclass(frozen=True)
class GnCnn:
    """Images whose sides survive the pools: at least 8x8 with three widths and pooling "grid"."""

    widths: tuple[int, ...] | None = None  # None: 16-32-64, or 32-64-128 for colour images
    pooling: Literal["grid", "global"] = "grid"  # what the head reads: 2x2 averages of each channel, or one
    pool_first: bool = False  # max-pool before the norm: a quarter of the values to normalise

    def __post_init__(self) -> None:
        if self.widths is not None and (not self.widths or min(self.widths) < 1):
            raise ConfigError(f"model.gn_cnn.widths={list(self.widths)} must be widths of 1 or more, like [16, 32, 64]")
        if self.pooling not in ("grid", "global"):
            raise ConfigError(f'model.gn_cnn.pooling={self.pooling!r} must be "grid" or "global"')

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("gn_cnn", shape)
        widths = self.widths or ((32, 64, 128) if channels >= 3 else (16, 32, 64))
        cells = 2 if self.pooling == "grid" else 1
        shrink = 2 ** (len(widths) - 1)  # every block but the last halves the sides
        require_side("gn_cnn", shape, cells * shrink)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for index, (inputs, outputs) in enumerate(pairwise((channels, *widths)), start=1):
            layers[f"conv{index}"] = nn.Conv2d(inputs, outputs, 3, padding=1)
            middle: dict[str, nn.Module] = {f"norm{index}": group_norm(outputs)}
            if index < len(widths):
                pool: dict[str, nn.Module] = {f"pool{index}": nn.MaxPool2d(2)}
                middle = pool | middle if self.pool_first else middle | pool
            layers.update(middle)
            layers[f"relu{index}"] = nn.ReLU()
        layers["average"] = average_to(cells, height // shrink, width // shrink)
        layers["flatten"] = nn.Flatten()
        layers["head"] = nn.Linear(widths[-1] * cells * cells, classes)
        module = nn.Sequential(layers)
        glorot_(module)
        return module
