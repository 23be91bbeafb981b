"""Per-client convolution as implicit GEMM in Triton: forward and input gradient (`triton_weight_grad` has the rest).

Every client has its own weights, so this is a batch of small convolutions, for which cuDNN's grouped kernels reach a
few per cent of the chip. Layout is channels last: x [clients, batch, H, W, C], w [clients, O, KH, KW, C], y [clients,
batch, OH, OW, O]. bf16 (or float32) in, float32 accumulation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedblur.kernels.geometry import SIZES, Geometry, Tiles, tile


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    x, w, bias, y, batch, channels, outputs,
    height, width, out_h, out_w,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FLAT: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """y[m, o] = b[o] + Σ_k x[m + k]·w[o, k]; FLAT walks (kh, kw, c) as one axis, for inputs of few channels."""
    client = tl.program_id(2).to(tl.int64)
    rows = batch * out_h * out_w
    taps = KH * KW * channels
    x += client * batch * height * width * channels
    w += client * outputs * taps
    y += client * rows * outputs
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    image = m // (out_h * out_w)
    pixel = m % (out_h * out_w)
    top = (pixel // out_w) * SH - PH
    left = (pixel % out_w) * SW - PW
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if FLAT:
        for k0 in range(0, KH * KW * C, BK):
            k = k0 + tl.arange(0, BK)
            ih = top[:, None] + (k // (KW * C))[None, :] * DH
            iw = left[:, None] + ((k // C) % KW)[None, :] * DW
            inside = (m < rows)[:, None] & (k < taps)[None, :] & (ih >= 0) & (ih < height) & (iw >= 0) & (iw < width)
            at = ((image[:, None] * height + ih) * width + iw) * C + (k % C)[None, :]
            a = tl.load(x + at, mask=inside, other=0.0)
            b = tl.load(
                w + n[None, :] * taps + k[:, None], mask=(k < taps)[:, None] & (n < outputs)[None, :], other=0.0
            )
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        for tap in range(0, KH * KW):
            ih = top + (tap // KW) * DH
            iw = left + (tap % KW) * DW
            inside = (m < rows) & (ih >= 0) & (ih < height) & (iw >= 0) & (iw < width)
            at = ((image * height + ih) * width + iw) * channels
            for c0 in range(0, channels, BK):
                c = c0 + tl.arange(0, BK)
                a = tl.load(x + at[:, None] + c[None, :], mask=inside[:, None] & (c < channels)[None, :], other=0.0)
                place = n[None, :] * taps + tap * channels + c[:, None]
                b = tl.load(w + place, mask=(c < channels)[:, None] & (n < outputs)[None, :], other=0.0)
                acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + client * outputs + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    target = m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(y + target, acc.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (n < outputs)[None, :])


@triton.jit(do_not_specialize=SIZES)
def _input_grad_kernel(
    gy, w, gx, batch, channels, outputs,
    height, width, out_h, out_w,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """gx[pixel, c] = Σ_{tap, o} gy[pixel reached by tap, o]·w[o, tap, c]."""
    client = tl.program_id(2).to(tl.int64)
    rows = batch * height * width
    taps = KH * KW * channels
    gy += client * batch * out_h * out_w * outputs
    w += client * outputs * taps
    gx += client * rows * channels
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    image = m // (height * width)
    pixel = m % (height * width)
    row, column = pixel // width + PH, pixel % width + PW
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for tap in range(0, KH * KW):
        up = row - (tap // KW) * DH
        over = column - (tap % KW) * DW
        oh, ow = up // SH, over // SW
        hit = (m < rows) & (up >= 0) & (over >= 0) & (oh < out_h) & (ow < out_w)
        hit = hit & (oh * SH == up) & (ow * SW == over)
        at = ((image * out_h + oh) * out_w + ow) * outputs
        for o0 in range(0, outputs, BK):
            o = o0 + tl.arange(0, BK)
            a = tl.load(gy + at[:, None] + o[None, :], mask=hit[:, None] & (o < outputs)[None, :], other=0.0)
            place = o[:, None] * taps + tap * channels + c[None, :]
            b = tl.load(w + place, mask=(o < outputs)[:, None] & (c < channels)[None, :], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    target = m.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(gx + target, acc.to(gx.dtype.element_ty), mask=(m < rows)[:, None] & (c < channels)[None, :])


def _precision(tensor: Tensor) -> str:
    return "ieee" if tensor.dtype == torch.float32 else "tf32"  # no meaning for bf16


def forward_tiles(g: Geometry) -> Tiles:
    columns = tile(g.outputs, 128)
    if g.channels < 16:
        return Tiles(128, columns, tile(g.channels * g.kernel[0] * g.kernel[1], 32), 4, 1)
    if g.channels <= 64:
        return Tiles(128, columns, 32, 8, 1) if g.channels <= 32 else Tiles(128, columns, 32, 4, 2)
    return Tiles(*_rows_and_warps(g, columns), 3)


def input_grad_tiles(g: Geometry) -> Tiles:
    columns = tile(g.channels, 128)
    if g.outputs <= 64:
        return Tiles(128, columns, tile(g.outputs, 32), 4, 2)
    if g.outputs <= 128:
        return Tiles(128, columns, 32, 4, 3)
    return Tiles(*_rows_and_warps(g, columns), 3)


def _rows_and_warps(g: Geometry, columns: int) -> tuple[int, int, int, int]:
    """Small images have few rows for each client: smaller tiles keep the chip busy."""
    small = g.batch * g.height * g.width <= 1024
    return (64, columns, 64, 4) if small else (128, columns, 64, 8 if columns >= 128 else 4)


def forward(x: Tensor, w: Tensor, bias: Tensor | None, g: Geometry) -> Tensor:
    """x [clients, B, H, W, C], w [clients, O, KH, KW, C], bias [clients, O] -> y [clients, B, OH, OW, O]."""
    out_h, out_w = g.out_size
    y = x.new_empty(g.clients, g.batch, out_h, out_w, g.outputs)
    bm, bn, bk, warps, stages = forward_tiles(g)
    grid = (triton.cdiv(g.batch * out_h * out_w, bm), triton.cdiv(g.outputs, bn), g.clients)
    _forward_kernel[grid](
        x, w, w if bias is None else bias, y, g.batch, g.channels, g.outputs,
        *g.sides, **g.constants(),
        BM=bm, BN=bn, BK=bk, FLAT=g.channels < 16, C=g.channels, PRECISION=_precision(x), BIAS=bias is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def input_grad(gy: Tensor, w: Tensor, g: Geometry) -> Tensor:
    """gy [clients, B, OH, OW, O] -> gx [clients, B, H, W, C]."""
    gx = gy.new_empty(g.clients, g.batch, g.height, g.width, g.channels)
    bm, bn, bk, warps, stages = input_grad_tiles(g)
    grid = (triton.cdiv(g.batch * g.height * g.width, bm), triton.cdiv(g.channels, bn), g.clients)
    _input_grad_kernel[grid](
        gy, w, gx, g.batch, g.channels, g.outputs, *g.sides, **g.constants(),
        BM=bm, BN=bn, BK=bk, PRECISION=_precision(gy), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return gx
