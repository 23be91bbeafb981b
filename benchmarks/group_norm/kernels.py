"""GroupNorm of each client's images in Triton, channels last: forward with ReLU, and its gradients.

A program takes one image's channels of some whole groups. It reads them twice, for the sums and for the result; the
second time they should still be in the second-level cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from group_norm.ops import tile_channels

LARGE = 2**15  # values of a program's part of an image


class Tiles(NamedTuple):
    """Values of a tile and warps of a program, for large images and for others (benchmarks/tune_norm.py)."""

    values: int
    warps: int


FORWARD = {True: Tiles(8192, 16), False: Tiles(4096, 8)}
GRADIENT = {True: Tiles(8192, 16), False: Tiles(4096, 8)}


@triton.jit
def _by_group(channel, KEEP: tl.constexpr, EACH: tl.constexpr):
    """Sums of each group, one value a channel again: [C] -> [C]."""
    groups = tl.sum(tl.reshape(channel, (KEEP // EACH, EACH)), 1)
    return tl.reshape(tl.broadcast_to(groups[:, None], (KEEP // EACH, EACH)), (KEEP,))


@triton.jit
def _forward_kernel(
    x, weight, bias, y, mean, rstd, batch, pixels, channels, eps,
    EACH: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """y = (x − mean)·rstd·weight + bias. Sums are taken of differences from the first pixel, which cancel less."""
    image = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * KEEP + tl.arange(0, KEEP)
    row = tl.arange(0, ROWS)
    x += image * pixels * channels
    y += image * pixels * channels
    base = tl.load(x + c).to(tl.float32)
    first = tl.zeros((ROWS, KEEP), dtype=tl.float32)
    second = tl.zeros((ROWS, KEEP), dtype=tl.float32)
    for start in range(0, pixels, ROWS):
        inside = (start + row < pixels)[:, None]
        value = tl.load(x + (start + row)[:, None] * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - base[None, :], 0.0)
        first += value
        second += value * value
    count = pixels * EACH
    moved, squares = tl.sum(first, 0), tl.sum(second, 0)
    average = _by_group(base * pixels + moved, KEEP, EACH) / count
    off = base - average
    spread = _by_group(squares + 2 * off * moved + off * off * pixels, KEEP, EACH) / count
    scale = 1 / tl.sqrt(tl.maximum(spread, 0.0) + eps)
    place, leads = image * (channels // EACH) + c // EACH, c % EACH == 0
    tl.store(mean + place, average, mask=leads)
    tl.store(rstd + place, scale, mask=leads)
    client = image // batch
    scale *= tl.load(weight + client * channels + c).to(tl.float32)
    shift = tl.load(bias + client * channels + c).to(tl.float32)
    for start in range(0, pixels, ROWS):
        inside = (start + row < pixels)[:, None]
        at = (start + row)[:, None] * channels + c[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        value = (value - average[None, :]) * scale[None, :] + shift[None, :]
        if RELU:
            value = tl.where(value <= 0, 0.0, value)  # NaN stays
        tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_kernel(
    gy, x, mean, rstd, weight, bias, gx, by_weight, by_bias, batch, pixels, channels,
    EACH: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """gx = rstd·(weight·gy − mean of weight·gy − unit·mean of weight·gy·unit), unit = (x − mean)·rstd."""
    image = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * KEEP + tl.arange(0, KEEP)
    row = tl.arange(0, ROWS)
    gy += image * pixels * channels
    x += image * pixels * channels
    gx += image * pixels * channels
    client = image // batch
    place = image * (channels // EACH) + c // EACH
    average, scale = tl.load(mean + place), tl.load(rstd + place)
    factor = tl.load(weight + client * channels + c).to(tl.float32)
    shift = tl.load(bias + client * channels + c).to(tl.float32)
    plain = tl.zeros((ROWS, KEEP), dtype=tl.float32)
    along = tl.zeros((ROWS, KEEP), dtype=tl.float32)
    for start in range(0, pixels, ROWS):
        inside = (start + row < pixels)[:, None]
        at = (start + row)[:, None] * channels + c[None, :]
        unit = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - average[None, :]) * scale[None, :]
        slope = tl.load(gy + at, mask=inside, other=0.0).to(tl.float32)  # zero where there is no pixel
        if RELU:
            slope = tl.where(unit * factor[None, :] + shift[None, :] > 0, slope, 0.0)
        plain += slope
        along += slope * unit
    to_bias, to_weight = tl.sum(plain, 0), tl.sum(along, 0)
    tl.store(by_bias + image * channels + c, to_bias)
    tl.store(by_weight + image * channels + c, to_weight)
    count = pixels * EACH
    level = _by_group(to_bias * factor, KEEP, EACH) / count
    tilt = _by_group(to_weight * factor, KEEP, EACH) / count
    for start in range(0, pixels, ROWS):
        inside = (start + row < pixels)[:, None]
        at = (start + row)[:, None] * channels + c[None, :]
        unit = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - average[None, :]) * scale[None, :]
        slope = tl.load(gy + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            slope = tl.where(unit * factor[None, :] + shift[None, :] > 0, slope, 0.0)
        value = scale[None, :] * (slope * factor[None, :] - level[None, :] - unit * tilt[None, :])
        tl.store(gx + at, value.to(gx.dtype.element_ty), mask=inside)


def _cut(x: Tensor, groups: int, tiles: dict[bool, Tiles]) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, and what the kernels are specialised to."""
    clients, batch, height, width, channels = x.shape
    keep, pixels = tile_channels(channels, groups), height * width
    values, warps = tiles[keep * pixels >= LARGE]
    rows = max(1, min(values // keep, triton.next_power_of_2(pixels)))
    sizes = {"EACH": channels // groups, "KEEP": keep, "ROWS": rows, "num_warps": warps}
    return (clients * batch, channels // keep), sizes


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `ops.client_group_norm`."""
    clients, batch, height, width, channels = x.shape
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    y, mean = torch.empty_like(x), x.new_empty(clients, batch, groups, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    grid, sizes = _cut(x, groups, FORWARD)
    _forward_kernel[grid](x, weight, bias, y, mean, rstd, batch, height * width, channels, eps, RELU=relu, **sizes)
    return y, mean, rstd


def gradient(
    gy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `ops.client_group_norm_grad`."""
    clients, batch, height, width, channels = x.shape
    gy, x, weight, bias = gy.contiguous(), x.contiguous(), weight.contiguous(), bias.contiguous()
    gx, by_weight = torch.empty_like(x), mean.new_empty(clients, batch, channels)
    by_bias = torch.empty_like(by_weight)
    grid, sizes = _cut(x, mean.shape[2], GRADIENT)
    _gradient_kernel[grid](
        gy, x, mean, rstd, weight, bias, gx, by_weight, by_bias, batch, height * width, channels, RELU=relu, **sizes
    )
    return gx, by_weight, by_bias
