"""What every model part offers, and how its initial weights follow from a seed.

Contract: `build(shape, classes)` gives a plain nn.Module that maps [batch, *shape] to logits [batch,
classes], has no buffers, and works under `torch.func.vmap(torch.func.grad(...))`. A shape that does not fit
is a ModelError.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import nn

from fedblur.errors import ModelError


class Model(Protocol):
    """A part of kind "model": a frozen dataclass whose fields are the architecture's settings."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module: ...


def make_model(part: Model, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """The module with the initial weights of this seed. The global random state is left as it was."""
    # Weights are made on the CPU, from its generator alone: the same on every machine.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return part.build(shape, classes)


def flat_size(shape: tuple[int, ...]) -> int:
    """The number of values in one sample, for models that flatten it."""
    if not shape or min(shape) < 1:
        raise ModelError(f"shape={tuple(shape)} holds no features; a sample needs at least one value")
    return math.prod(shape)


def image_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(channels, height, width) of one sample, for models that convolve."""
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
    """Glorot's uniform weights and zero biases for every convolution and dense layer."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def he_(module: nn.Module) -> None:
    """He's initial weights for the convolutions and Glorot's for the head; norms start as the identity."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
