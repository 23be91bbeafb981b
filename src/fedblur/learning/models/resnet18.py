"""ResNet-18 with GroupNorm (32 groups) and the CIFAR stem (3x3, stride 1, no max-pool). No dropout.

11,173,962 parameters on 3x32x32 with 10 classes; 11,199,486 on 1x28x28 with 62. 62 trainable tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from fedblur.core.registry import register
from fedblur.learning.models.base import conv, he_, image_shape

GROUPS = 32


@register("model", "resnet18")
@dataclass(frozen=True)
class ResNet18:
    """Fits images of any size: every convolution is padded."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, _, _ = image_shape("resnet18", shape)
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            stem=conv(channels, 64), norm=nn.GroupNorm(GROUPS, 64), relu=nn.ReLU()
        )
        for index, (inputs, outputs) in enumerate(pairwise((64, 64, 128, 256, 512)), start=1):
            layers[f"stage{index}"] = nn.Sequential(
                Block(inputs, outputs, stride=1 if inputs == outputs else 2),
                Block(outputs, outputs, stride=1),
            )
        layers["average"] = GlobalAverage()
        layers["head"] = nn.Linear(512, classes)
        module = nn.Sequential(layers)
        he_(module)
        return module


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut, which is projected (1x1) where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, outputs, stride=stride)
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = conv(outputs, outputs)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride=stride), nn.GroupNorm(GROUPS, outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class GlobalAverage(nn.Module):
    """[batch, channels, height, width] -> [batch, channels]"""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(-2, -1))
