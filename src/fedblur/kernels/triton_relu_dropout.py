"""ReLU and seeded dropout on a convolution's output: the hash for the convolution's own kernel, and the gradient.

The masks are those of `fedblur.dropout`, hashed from (key, element). A value passes if it was kept and was positive,
that is if the output is not zero, so the gradient needs the output alone; on the way it goes back from channels first
to channels last. Left to the compiler, these steps write out the hashes and read memory across the grain: they took a
fifth of CNN-B's round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedblur.kernels.geometry import tile


@triton.jit
def hash32(value):
    value = (value ^ (value >> 16)) * 0x85EBCA6B
    value = (value ^ (value >> 13)) * 0xC2B2AE35
    return value ^ (value >> 16)


@triton.jit
def relu_dropout(value, key, element, threshold, scale):
    """Of a tile of values; `element` is their place among all of a client's."""
    kept = (hash32(key.to(tl.uint32) + element.to(tl.uint32)) & 0x7FFFFFFF) >= threshold.to(tl.uint32)
    return tl.where((value <= 0) | (kept == 0), 0.0, value * scale)


@triton.jit
def _grad_kernel(
    gy, y, gx, scale, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
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


def _cut(pixels: int, channels: int) -> tuple[int, int, int]:
    bp, bc = tile(pixels, 128), tile(channels, 64)
    return bp, bc, triton.cdiv(pixels, bp) * triton.cdiv(channels, bc)


def grad(gy: Tensor, y: Tensor, scale: float) -> Tensor:
    """gy and y [clients, B, C, H, W] -> gx [clients, B, H, W, C]."""
    clients, batch, channels, height, width = gy.shape
    gx = torch.empty(clients, batch, height, width, channels, dtype=gy.dtype, device=gy.device)
    bp, bc, tiles = _cut(height * width, channels)
    grid = (tiles * clients * batch,)  # only the first dimension takes more than 65,535: 1024 clients of 64 images
    _grad_kernel[grid](gy, y, gx, scale, PIXELS=height * width, CHANNELS=channels, BP=bp, BC=bc)
    return gx
