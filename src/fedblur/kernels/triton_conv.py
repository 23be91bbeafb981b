"""Per-client convolution as implicit GEMM in Triton: forward and input gradient (`triton_weight_grad` has the rest).

Every client has its own weights, so this is a batch of small convolutions, for which cuDNN's grouped kernels reach a
few per cent of the chip. Layout is channels last: x [clients, batch, H, W, C], w [clients, O, KH, KW, C], y [clients,
batch, OH, OW, O]. bf16 (or float32) in, float32 accumulation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedblur.kernels.geometry import SIZES, Geometry, Tiles, reciprocals, tile
from fedblur.kernels.triton_places import coordinates, within
from fedblur.kernels.triton_relu_dropout import relu_dropout


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    x, w, bias, y, keys, threshold, scale, batch, outputs,
    height, width, out_h, out_w, by_image, by_row,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FLAT: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """y[m, o] = b[o] + Σ_k x[m + k]·w[o, k]; FLAT walks (kh, kw, c) as one axis, for inputs of few channels."""
    client = tl.program_id(2).to(tl.int64)
    rows = batch * out_h * out_w
    taps = KH * KW * C
    x += client * batch * height * width * C
    w += client * outputs * taps
    y += client * rows * outputs
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    image, row, column = coordinates(m, out_h, out_w, by_image, by_row)
    top, left = row * SH - PH, column * SW - PW
    corner = (image * height + top) * width + left
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    # One loop, not one over taps and one over channels: Triton loads ahead only within the innermost.
    DEPTH: tl.constexpr = KH * KW * C if FLAT else C
    BLOCKS: tl.constexpr = (DEPTH + BK - 1) // BK
    for step in range(0, BLOCKS if FLAT else KH * KW * BLOCKS):
        tap = step // BLOCKS
        k = (step % BLOCKS) * BK + tl.arange(0, BK)
        if FLAT:
            down, right = ((k // (KW * C)) * DH)[None, :], (((k // C) % KW) * DW)[None, :]
            at = (corner[:, None] + down * width + right) * C + (k % C)[None, :]
            inside = (m < rows)[:, None] & (k < DEPTH)[None, :]
            if PADDED:
                inside = inside & within(top[:, None] + down, height) & within(left[:, None] + right, width)
        else:
            down, right = (tap // KW) * DH, (tap % KW) * DW
            at = ((corner + down * width + right) * C)[:, None] + k[None, :]
            seen = m < rows
            if PADDED:
                seen = seen & within(top + down, height) & within(left + right, width)
            inside = seen[:, None] & (k < DEPTH)[None, :]
        a = tl.load(x + at, mask=inside, other=0.0)
        place = n[None, :] * taps + tap * C + k[:, None]
        b = tl.load(w + place, mask=(k < DEPTH)[:, None] & (n < outputs)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + client * outputs + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    if DROPOUT:  # then the output is channels first, for the dense layer that follows
        target = (image * outputs)[:, None] * (out_h * out_w) + n[None, :] * (out_h * out_w)
        target += (row * out_w + column)[:, None]
        acc = relu_dropout(acc, tl.load(keys + client), target, threshold, scale)
    else:
        target = m[:, None] * outputs + n[None, :]
    tl.store(y + target, acc.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (n < outputs)[None, :])


@triton.jit(do_not_specialize=SIZES)
def _input_grad_kernel(
    gy, w, gx, batch, channels,
    height, width, out_h, out_w, by_image, by_row,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gx[pixel, c] = Σ_{tap, o} gy[pixel reached by tap, o]·w[o, tap, c]."""
    client = tl.program_id(2).to(tl.int64)
    rows = batch * height * width
    taps = KH * KW * channels
    gy += client * batch * out_h * out_w * OUT
    w += client * OUT * taps
    gx += client * rows * channels
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    image, row, column = coordinates(m, height, width, by_image, by_row)
    row, column = row + PH, column + PW
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    UNIT: tl.constexpr = SH == 1 and SW == 1
    if UNIT:  # one bit for each row and column of the kernel that hits the image, and one place for all taps
        down, right = tl.zeros_like(m), tl.zeros_like(m)
        for k in tl.static_range(KH):
            down |= ((m < rows) & within(row - k * DH, out_h)).to(tl.int32) << k
        for k in tl.static_range(KW):
            right |= within(column - k * DW, out_w).to(tl.int32) << k
        corner = (image * out_h + row) * out_w + column
    BLOCKS: tl.constexpr = (OUT + BK - 1) // BK
    for step in range(0, KH * KW * BLOCKS):  # one loop: see the forward kernel
        tap = step // BLOCKS
        o = (step % BLOCKS) * BK + tl.arange(0, BK)
        kh, kw = tap // KW, tap % KW
        if UNIT:
            hit = ((down >> kh) & (right >> kw) & 1) == 1
            at = (corner - kh * DH * out_w - kw * DW) * OUT
        else:
            up, over = row - kh * DH, column - kw * DW
            oh, ow = up // SH, over // SW
            hit = (m < rows) & within(oh, out_h) & within(ow, out_w) & (oh * SH == up) & (ow * SW == over)
            at = ((image * out_h + oh) * out_w + ow) * OUT
        a = tl.load(gy + at[:, None] + o[None, :], mask=hit[:, None] & (o < OUT)[None, :], other=0.0)
        place = o[:, None] * taps + tap * channels + c[None, :]
        b = tl.load(w + place, mask=(o < OUT)[:, None] & (c < channels)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    target = m[:, None] * channels + c[None, :]
    tl.store(gx + target, acc.to(gx.dtype.element_ty), mask=(m < rows)[:, None] & (c < channels)[None, :])


def _precision(tensor: Tensor) -> str:
    return "ieee" if tensor.dtype == torch.float32 else "tf32"  # no meaning for bf16


def forward_tiles(g: Geometry) -> Tiles:
    columns = tile(g.outputs, 128)
    if g.channels < 16:
        return Tiles(128, columns, tile(g.channels * g.kernel[0] * g.kernel[1], 32), 4, 1)
    if g.channels <= 32:
        return Tiles(128, columns, 32, 4, 4)
    return Tiles(*_rows_and_warps(g, columns), 3)


def input_grad_tiles(g: Geometry) -> Tiles:
    columns = tile(g.channels, 128)
    if columns <= 32 and g.outputs <= 64:
        return Tiles(128, columns, tile(g.outputs, 64), 4, 2)
    if g.outputs <= 32:
        return Tiles(128, columns, tile(g.outputs, 32), 4, 3)
    return Tiles(*_rows_and_warps(g, columns), 3)


def _rows_and_warps(g: Geometry, columns: int) -> tuple[int, int, int, int]:
    """Small images have few rows for each client: smaller tiles keep the chip busy."""
    small = g.batch * g.height * g.width <= 1024
    return (64, columns, 64, 4) if small else (128, columns, 64, 8)


class Dropout(NamedTuple):
    """ReLU and dropout by the convolution's own kernel."""

    keys: Tensor  # [clients] int32
    threshold: int
    scale: float


def forward(x: Tensor, w: Tensor, bias: Tensor | None, g: Geometry, dropout: Dropout | None = None) -> Tensor:
    """x [clients, B, H, W, C], w [clients, O, KH, KW, C], bias [clients, O] -> y [clients, B, OH, OW, O].

    With dropout y is [clients, B, O, OH, OW]: those who ask for it want to flatten it.
    """
    out_h, out_w = g.out_size
    sizes = (out_h, out_w, g.outputs) if dropout is None else (g.outputs, out_h, out_w)
    y = x.new_empty(g.clients, g.batch, *sizes)
    bm, bn, bk, warps, stages = forward_tiles(g)
    grid = (triton.cdiv(g.batch * out_h * out_w, bm), triton.cdiv(g.outputs, bn), g.clients)
    _forward_kernel[grid](
        x, w, w if bias is None else bias, y, *(dropout or Dropout(w, 0, 1.0)), g.batch, g.outputs,
        *g.sides, *reciprocals(*g.out_size), **g.constants(), BM=bm, BN=bn, BK=bk,
        FLAT=g.channels < 16, C=g.channels, PADDED=g.padded, PRECISION=_precision(x), BIAS=bias is not None,
        DROPOUT=dropout is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def input_grad(gy: Tensor, w: Tensor, g: Geometry) -> Tensor:
    """gy [clients, B, OH, OW, O] -> gx [clients, B, H, W, C]."""
    gx = gy.new_empty(g.clients, g.batch, g.height, g.width, g.channels)
    bm, bn, bk, warps, stages = input_grad_tiles(g)
    grid = (triton.cdiv(g.batch * g.height * g.width, bm), triton.cdiv(g.channels, bn), g.clients)
    _input_grad_kernel[grid](
        gy, w, gx, g.batch, g.channels, *g.sides, *reciprocals(g.height, g.width), **g.constants(),
        BM=bm, BN=bn, BK=bk, OUT=g.outputs, PRECISION=_precision(gy), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return gx
