"""The interface of a model part, its initial weights from a seed, and what models share.

Contract: `build(shape, classes)` gives a plain nn.Module that maps [batch, *shape] to logits [batch,
classes], whose buffers are constants, and that works under `torch.func.vmap(torch.func.grad(...))`. A shape that
does not fit is a ModelError.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from fedblur.core.errors import ModelError

_SMALLEST = 1e-5


class Model(Protocol):
    """A part of kind "model": a frozen dataclass whose fields are the architecture's settings."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module: ...


def make_model(part: Model, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """Build the module with the initial weights of this seed. The global random state is left as it was."""
    # Weights are made on the CPU, from its generator alone: the same on every machine.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return part.build(shape, classes)


def flat_size(shape: tuple[int, ...]) -> int:
    """Return the number of values in one sample, for models that flatten it."""
    if not shape or min(shape) < 1:
        raise ModelError(f"shape={tuple(shape)} holds no features; a sample needs at least one value")
    return math.prod(shape)


def image_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (channels, height, width) of one sample, for models that convolve."""
    if len(shape) != 3 or min(shape) < 1:
        raise ModelError(
            f"shape={tuple(shape)} does not fit model {name!r}, which reads (channels, height, width); "
            'use "logistic" or "mlp" for samples that are not images'
        )
    return shape[0], shape[1], shape[2]


def require_side(name: str, shape: tuple[int, ...], smallest: int) -> None:
    """Refuse images so small that pooling and unpadded convolutions leave nothing of them."""
    if min(shape[1:]) < smallest:
        raise ModelError(
            f"shape={tuple(shape)} is too small for model {name!r}: its feature map would vanish; "
            f"height and width must be at least {smallest}"
        )


def glorot_(module: nn.Module) -> None:
    """Set Glorot's uniform weights and zero biases for every convolution and dense layer."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def he_(module: nn.Module) -> None:
    """Set He's initial weights for the convolutions and Glorot's for the head; norms start as the identity."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


def group_norm(width: int, largest: int = 8) -> nn.GroupNorm:
    """Return a norm of at most `largest` groups, of at least 4 channels if it can: 16 -> 4, 32 -> 8, 64 -> 8."""
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


def conv(inputs: int, outputs: int, kernel: int = 3, standardise: bool = False, stride: int = 1) -> nn.Conv2d:
    """Return a padded convolution without a bias: the norm that follows has an offset of its own."""
    kind = StandardisedConv2d if standardise else nn.Conv2d
    return kind(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def average_to(cells: int, height: int, width: int) -> nn.Module:
    """Average to cells x cells. Fixed windows: AdaptiveAvgPool2d's gradient is not deterministic on CUDA."""
    stride = (height // cells, width // cells)
    kernel = (height - (cells - 1) * stride[0], width - (cells - 1) * stride[1])
    return nn.AvgPool2d(kernel, stride)
