"""Helpers of the convolution kernels: tiles, a row's coordinates, ReLU with dropout, the end of a weight gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedblur.accel.kernels.geometry import SHIFT, Geometry

PROGRAMS = 4 * 132  # enough to fill an H100 or H200 a few times over
# Triton must not specialise these: with constant sides, Triton 3.6 compiled wrong addresses for some strides and
# paddings (even out_w, stride 2, padding 2: every value wrong), although its interpreter is right.
SIZES = ("batch", "height", "width", "out_h", "out_w", "stride_rows", "by_image", "by_row")
_SHIFT = tl.constexpr(SHIFT)
_BLOCK = 256


class Tiles(NamedTuple):
    """The cut of a kernel: a tile's rows, columns and depth, warps, loads in flight (benchmarks/tune_kernels.py)."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile(size: int, most: int) -> int:
    """Return a power of two that covers `size`, between 16 (the least a tensor core takes) and `most`."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


# A row of an implicit GEMM is a pixel; rows count the pixels of all images of a client. To turn a row into coordinates
# takes two divisions by numbers that the compiler does not know. Each is tens of instructions, in loops that otherwise
# multiply matrices: a third of their time.


@triton.jit
def divided(m, reciprocal):
    """Return m // divisor, as a product with the reciprocal from `geometry.reciprocals`."""
    return ((m.to(tl.int64) * reciprocal) >> _SHIFT).to(tl.int32)


@triton.jit
def coordinates(m, height, width, by_image, by_row):
    """Return (image, row, column) of pixel m."""
    image = divided(m, by_image)
    pixel = m - image * (height * width)
    row = divided(pixel, by_row)
    return image, row, pixel - row * width


@triton.jit
def within(place, size):
    """Return 0 <= place < size, by one comparison."""
    return place.to(tl.uint32) < size.to(tl.uint32)


@triton.jit
def _finish_kernel(
    parts, sums, gw, gb, splits, outputs, size, wide,
    KW: tl.constexpr, ROW: tl.constexpr, C: tl.constexpr, PATCH: tl.constexpr, BLOCK: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Compute gw[o, kh, kw, c] = Σ of the splits; with PATCH, also of the four members' shifted views of the patch."""
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o, k = place // size, place % size
    known = place < outputs * size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(0, splits):
        at = client * splits + split
        if PATCH:
            corner = o * wide + (k // (KW * C)) * ROW + k % (KW * C)
            for j in tl.static_range(4):
                shifted = (at * 4 + j) * outputs * wide + corner + (j // 2) * ROW + (j % 2) * C
                total += tl.load(parts + shifted, mask=known, other=0.0)
        else:
            total += tl.load(parts + at * outputs * wide + place, mask=known, other=0.0)
    tl.store(gw + client * outputs * size + place, total.to(gw.dtype.element_ty), mask=known)
    if tl.program_id(0) == 0:
        n = tl.arange(0, BO)
        added = tl.zeros((BO,), dtype=tl.float32)
        for split in range(0, splits):
            added += tl.load(sums + (client * splits + split) * outputs + n, mask=n < outputs, other=0.0)
        tl.store(gb + client * outputs + n, added.to(gb.dtype.element_ty), mask=n < outputs)


def finished(parts: Tensor, sums: Tensor, g: Geometry, patch: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return gw [clients, O, KH, KW, C] and gb [clients, O], adding the parts [clients, splits, ..] in a fixed order.

    torch's operations would take eight launches of a few microseconds each, in every local step.
    """
    kh, kw = g.kernel
    gw = parts.new_empty(g.clients, g.outputs, kh, kw, g.channels, dtype=dtype)
    gb = parts.new_empty(g.clients, g.outputs, dtype=dtype)
    size = kh * kw * g.channels
    _finish_kernel[triton.cdiv(g.outputs * size, _BLOCK), g.clients](
        parts, sums, gw, gb, parts.shape[1], g.outputs, size, g.pool_patch if patch else size,
        KW=kw, ROW=(kw + 1) * g.channels, C=g.channels, PATCH=patch, BLOCK=_BLOCK,
        BO=triton.next_power_of_2(g.outputs),
    )  # fmt: skip
    return gw, gb


# Dropout masks are those of `core/hashing.py`, hashed from (key, element). A value passes if it was kept and was
# positive, that is if the output is not zero, so the gradient needs the output alone. On the way it goes back from
# channels first to channels last. Left to the compiler, these steps write out the hashes and read memory across the
# grain: they took a fifth of CNN-B's round.


@triton.jit
def hash32(value):
    """Return the hash of `core.hashing.hash32`."""
    value = (value ^ (value >> 16)) * 0x85EBCA6B
    value = (value ^ (value >> 13)) * 0xC2B2AE35
    return value ^ (value >> 16)


@triton.jit
def relu_dropout(value, key, element, threshold, scale):
    """Return ReLU and dropout of a tile of values; `element` is their index among all of a client's."""
    kept = (hash32(key.to(tl.uint32) + element.to(tl.uint32)) & 0x7FFFFFFF) >= threshold.to(tl.uint32)
    return tl.where((value <= 0) | (kept == 0), 0.0, value * scale)


@triton.jit
def _relu_dropout_grad_kernel(
    gy, y, gx, scale, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute gx[pixel, c] = scale·gy[c, pixel] where y[c, pixel] > 0, else 0."""
    TILES: tl.constexpr = tl.cdiv(PIXELS, BP) * tl.cdiv(CHANNELS, BC)
    piece = tl.program_id(0) % TILES
    p = (piece % tl.cdiv(PIXELS, BP)) * BP + tl.arange(0, BP)
    c = (piece // tl.cdiv(PIXELS, BP)) * BC + tl.arange(0, BC)
    real = (p < PIXELS)[:, None] & (c < CHANNELS)[None, :]
    start = (tl.program_id(0) // TILES).to(tl.int64) * (PIXELS * CHANNELS)
    at = start + c[None, :] * PIXELS + p[:, None]
    passed = tl.load(y + at, mask=real, other=0.0) > 0
    value = tl.load(gy + at, mask=real, other=0.0).to(tl.float32) * scale
    value = tl.where(passed, value, 0.0)
    tl.store(gx + start + p[:, None] * CHANNELS + c[None, :], value.to(gx.dtype.element_ty), mask=real)


def relu_dropout_grad(gy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Return the gradient before ReLU and dropout: gy and y [clients, B, C, H, W] -> gx [clients, B, H, W, C]."""
    clients, batch, channels, height, width = gy.shape
    gx = torch.empty(clients, batch, height, width, channels, dtype=gy.dtype, device=gy.device)
    bp, bc = tile(height * width, 128), tile(channels, 64)
    tiles = triton.cdiv(height * width, bp) * triton.cdiv(channels, bc)
    grid = (tiles * clients * batch,)  # only the first dimension takes more than 65,535: 1024 clients of 64 images
    _relu_dropout_grad_kernel[grid](gy, y, gx, scale, PIXELS=height * width, CHANNELS=channels, BP=bp, BC=bc)
    return gx
