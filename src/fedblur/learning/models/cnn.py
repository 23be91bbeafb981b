"""The two-layer CNNs of the federated EMNIST literature, about one million parameters. Unpadded convolutions.

Variant "a" (Reddi et al., "conv-dropout"): conv 32, conv 64, pool, dense 128, head.
Variant "b" (the DDGauss "1M" model):       conv 32, pool, conv 64, dense 128, head. This is "about 1.0M".
`second_pool` adds a pool after variant b's second convolution: 315,722 parameters on 3x32x32 with 10 classes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from torch import nn

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.models.base import glorot_, image_shape, require_side


@register("model", "cnn")
@dataclass(frozen=True)
class Cnn:
    """Images of at least 8x8 (variant b), 6x6 (variant a) or 10x10 (variant b with a second pool)."""

    variant: Literal["a", "b"] = "b"  # which of the two published shapes
    dropout: bool = True  # 0.25 before and 0.5 after the dense layer, as published
    second_pool: bool = False  # pool after both convolutions; variant b only

    def __post_init__(self) -> None:
        if self.variant not in ("a", "b"):
            raise ConfigError(f'model.cnn.variant={self.variant!r} must be "a" or "b"')
        if self.second_pool and self.variant == "a":
            raise ConfigError(
                'model.cnn.second_pool=true needs variant "b": "a" already pools after its second convolution'
            )

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("cnn", shape)
        require_side("cnn", shape, next(side for side in range(4, 100) if self._side(side) >= 1))
        # ReLU and max-pool commute; pooling first leaves a quarter of the values for the ReLU.
        layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=nn.Conv2d(channels, 32, 3))
        if self.variant == "b":
            layers["pool1"] = nn.MaxPool2d(2)
        layers["relu1"] = nn.ReLU()
        layers["conv2"] = nn.Conv2d(32, 64, 3)
        if self.variant == "a" or self.second_pool:
            layers["pool2"] = nn.MaxPool2d(2)
        layers["relu2"] = nn.ReLU()
        if self.dropout:
            layers["dropout1"] = nn.Dropout(0.25)
        layers["flatten"] = nn.Flatten()
        layers["dense"] = nn.Linear(64 * self._side(height) * self._side(width), 128)
        layers["relu3"] = nn.ReLU()
        if self.dropout:
            layers["dropout2"] = nn.Dropout(0.5)
        layers["head"] = nn.Linear(128, classes)
        module = nn.Sequential(layers)
        glorot_(module)
        return module

    def _side(self, side: int) -> int:
        """Return what is left of an image's side after the convolutions and pools."""
        if self.variant == "a":
            return (side - 4) // 2
        left = (side - 2) // 2 - 2
        return left // 2 if self.second_pool else left
