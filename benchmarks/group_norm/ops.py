"""The operators behind per-client GroupNorm, channels last: x [clients, B, H, W, C], weight and bias [clients, C].

Statistics are float32 whatever the values are. Under `vmap` torch keeps a group's mean and deviation in the values' own
type, and in bf16 that alone puts gradients off by two per cent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedblur.kernels.conv_ops import uses_kernels


@torch.library.custom_op("fedblur::client_group_norm", mutates_args=())
def client_group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Each client's normalised values, perhaps after a ReLU; means and reciprocal deviations [clients, B, groups]."""
    if uses_kernels(x) and covers(x.shape, groups):
        from group_norm import kernels

        return kernels.forward(x, weight, bias, groups, eps, relu)
    values = _grouped(x, groups)
    mean = values.mean((2, 4))
    rstd = (values.var((2, 4), correction=0) + eps).rsqrt()
    y = _scaled(values, mean, rstd, weight, bias).reshape(x.shape)
    return (y.relu() if relu else y).to(x.dtype), mean, rstd


@client_group_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty(x.shape[0], x.shape[1], groups, dtype=wide(x))
    return torch.empty_like(x), mean, torch.empty_like(mean)


@torch.library.custom_op("fedblur::client_group_norm_grad", mutates_args=())
def client_group_norm_grad(
    gy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by the input, and by weight and bias of each image: [clients, B, C], still to be added."""
    groups = mean.shape[2]
    if uses_kernels(x) and covers(x.shape, groups):
        from group_norm import kernels

        return kernels.gradient(gy, x, mean, rstd, weight, bias, relu)
    values, slope = _grouped(x, groups), _grouped(gy, groups)
    if relu:
        slope = torch.where(_scaled(values, mean, rstd, weight, bias) > 0, slope, 0.0)
    unit = (values - _over(mean)) * _over(rstd)
    by_weight, by_bias = (slope * unit).sum(2), slope.sum(2)  # [clients, B, groups, C / groups]
    scale = weight.to(unit.dtype).view(len(x), 1, groups, -1)
    count = values[0, 0, :, 0].numel()
    along, level = ((scale * part).sum(3) / count for part in (by_weight, by_bias))
    gx = _over(rstd) * (scale[:, :, None] * slope - _over(level) - unit * _over(along))
    return gx.reshape(x.shape).to(x.dtype), by_weight.flatten(2), by_bias.flatten(2)


@client_group_norm_grad.register_fake
def _(
    gy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    by_weight = mean.new_empty(x.shape[0], x.shape[1], x.shape[4])
    return torch.empty_like(x), by_weight, torch.empty_like(by_weight)


def wide(x: Tensor) -> torch.dtype:
    """The type of statistics: float32 for bf16."""
    return torch.promote_types(x.dtype, torch.float32)


def covers(shape: torch.Size, groups: int) -> bool:
    """Whether the kernels can take it: tiles hold whole groups, and their sides are powers of two."""
    channels = shape[4]
    return channels % groups == 0 and _power(channels // groups) and channels % tile_channels(channels, groups) == 0


def tile_channels(channels: int, groups: int) -> int:
    """Channels that a program takes: whole groups, 128 bytes of a pixel where there are as many."""
    most = max(64, channels // groups)
    return min(most, channels & -channels)  # the largest power of two that divides


def _power(number: int) -> bool:
    return number & (number - 1) == 0


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[clients, B, H, W, C] -> [clients, B, H·W, groups, C / groups], wide."""
    clients, batch, height, width, channels = x.shape
    return x.reshape(clients, batch, height * width, groups, channels // groups).to(wide(x))


def _over(statistic: Tensor) -> Tensor:
    """[clients, B, groups] beside grouped values."""
    return statistic[:, :, None, :, None]


def _scaled(values: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    scale, shift = (t.to(values.dtype).view(len(t), 1, 1, mean.shape[2], -1) for t in (weight, bias))
    return (values - _over(mean)) * _over(rstd) * scale + shift
