"""Per-client convolution in Triton: the gradients by weights and bias. Layouts as in `triton_conv`.

Sums over pixels are split into parts that are written out and added in a fixed order, never by atomics: a repeated
run gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedblur.kernels.geometry import PROGRAMS, SIZES, Geometry, Tiles, tile


@triton.jit
def _tap_tile(
    x, image, top, left, known, c, channels, tap,
    height, width, KH: tl.constexpr, KW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
):  # fmt: skip
    """What one tap of the kernel sees: x at every output pixel's position moved by the tap."""
    ih, iw = top + (tap // KW) * DH, left + (tap % KW) * DW
    inside = known & (tap < KH * KW) & (ih >= 0) & (ih < height) & (iw >= 0) & (iw < width)
    at = ((image * height + ih) * width + iw) * channels
    return tl.load(x + at[:, None] + c[None, :], mask=inside[:, None] & (c < channels)[None, :], other=0.0)


@triton.jit(do_not_specialize=SIZES)
def _weight_grad_kernel(
    gy, x, parts, sums, batch, channels, outputs, splits, stride_rows,
    height, width, out_h, out_w,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TAPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """parts[split, o, k] = Σ_{m in split} gy[m, o]·x[m + k]; the splits are added afterwards, in a fixed order.

    A program takes up to three taps at once, so that gy is read a third as often.
    """
    client = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    rows = batch * out_h * out_w
    gy += client * rows * outputs
    x += client * batch * height * width * channels
    blocks = tl.cdiv(channels, BN)
    columns = tl.cdiv(KH * KW, TAPS) * blocks
    o = (tl.program_id(0) // columns) * BO + tl.arange(0, BO)
    c = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    tap = ((tl.program_id(0) % columns) // blocks) * TAPS
    acc0 = tl.zeros((BO, BN), dtype=tl.float32)
    acc1 = tl.zeros((BO, BN), dtype=tl.float32)
    acc2 = tl.zeros((BO, BN), dtype=tl.float32)
    total = tl.zeros((BO,), dtype=tl.float32)
    last = tl.minimum(rows, (split + 1) * stride_rows)
    for m0 in range(split * stride_rows, last, BK):
        m = m0 + tl.arange(0, BK)
        known = m < last
        image = m // (out_h * out_w)
        pixel = m % (out_h * out_w)
        top, left = (pixel // out_w) * SH - PH, (pixel % out_w) * SW - PW
        g = tl.load(gy + m[:, None] * outputs + o[None, :], mask=known[:, None] & (o < outputs)[None, :], other=0.0)
        total += tl.sum(g.to(tl.float32), 0)
        a = tl.trans(g)
        b = _tap_tile(x, image, top, left, known, c, channels, tap, height, width, KH, KW, DH, DW)
        acc0 = tl.dot(a, b, acc0, input_precision=PRECISION)
        if TAPS > 1:
            b = _tap_tile(x, image, top, left, known, c, channels, tap + 1, height, width, KH, KW, DH, DW)
            acc1 = tl.dot(a, b, acc1, input_precision=PRECISION)
        if TAPS > 2:
            b = _tap_tile(x, image, top, left, known, c, channels, tap + 2, height, width, KH, KW, DH, DW)
            acc2 = tl.dot(a, b, acc2, input_precision=PRECISION)
    if tl.program_id(0) % columns == 0:
        tl.store(sums + (client * splits + split) * outputs + o, total, mask=o < outputs)
    parts += (client * splits + split) * outputs * KH * KW * channels
    place = (o[:, None] * KH * KW + tap) * channels + c[None, :]
    kept = (o < outputs)[:, None] & (c < channels)[None, :]
    tl.store(parts + place, acc0, mask=kept)
    if TAPS > 1:
        tl.store(parts + place + channels, acc1, mask=kept & (tap + 1 < KH * KW))
    if TAPS > 2:
        tl.store(parts + place + 2 * channels, acc2, mask=kept & (tap + 2 < KH * KW))


@triton.jit(do_not_specialize=SIZES)
def _narrow_kernel(
    gy, x, parts, sums, batch, outputs, splits, stride_rows,
    height, width, out_h, out_w,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for inputs of few channels C: (kh, kw, c) is one axis, since a tap alone would not fill a tile."""
    client = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    rows = batch * out_h * out_w
    taps = KH * KW * C
    gy += client * rows * outputs
    x += client * batch * height * width * C
    columns = tl.cdiv(taps, BN)
    o = (tl.program_id(0) // columns) * BO + tl.arange(0, BO)
    k = (tl.program_id(0) % columns) * BN + tl.arange(0, BN)
    down, right = (k // (KW * C)) * DH, ((k // C) % KW) * DW
    acc = tl.zeros((BO, BN), dtype=tl.float32)
    total = tl.zeros((BO,), dtype=tl.float32)
    last = tl.minimum(rows, (split + 1) * stride_rows)
    for m0 in range(split * stride_rows, last, BK):
        m = m0 + tl.arange(0, BK)
        image = m // (out_h * out_w)
        pixel = m % (out_h * out_w)
        ih = ((pixel // out_w) * SH - PH)[:, None] + down[None, :]
        iw = ((pixel % out_w) * SW - PW)[:, None] + right[None, :]
        inside = (m < last)[:, None] & (k < taps)[None, :] & (ih >= 0) & (ih < height) & (iw >= 0) & (iw < width)
        b = tl.load(x + ((image[:, None] * height + ih) * width + iw) * C + (k % C)[None, :], mask=inside, other=0.0)
        known = (m < last)[:, None] & (o < outputs)[None, :]
        g = tl.load(gy + m[:, None] * outputs + o[None, :], mask=known, other=0.0)
        total += tl.sum(g.to(tl.float32), 0)
        acc = tl.dot(tl.trans(g), b, acc, input_precision=PRECISION)
    if tl.program_id(0) % columns == 0:
        tl.store(sums + (client * splits + split) * outputs + o, total, mask=o < outputs)
    parts += (client * splits + split) * outputs * taps
    tl.store(parts + o[:, None] * taps + k[None, :], acc, mask=(o < outputs)[:, None] & (k < taps)[None, :])


def weight_grad_tiles(g: Geometry) -> Tiles:
    rows = tile(g.outputs, 64)
    if g.channels < 16:
        return Tiles(rows, tile(g.kernel[0] * g.kernel[1] * g.channels, 64), 128, 4, 2)
    columns = tile(g.channels, 64)
    return Tiles(rows, columns, 64 if g.channels == 128 else 128, 4, 3 if columns <= 32 else 2)


def taps_at_once(g: Geometry) -> int:
    return 1 if g.kernel == (1, 1) else 3


def weight_grad(gy: Tensor, x: Tensor, g: Geometry) -> tuple[Tensor, Tensor]:
    """gy [clients, B, OH, OW, O], x [clients, B, H, W, C] -> gw [clients, O, KH, KW, C], gb [clients, O]."""
    out_h, out_w = g.out_size
    kh, kw = g.kernel
    bo, bn, bk, warps, stages = weight_grad_tiles(g)
    taps = taps_at_once(g)
    narrow = g.channels < 16
    columns = (
        triton.cdiv(kh * kw * g.channels, bn) if narrow else triton.cdiv(kh * kw, taps) * triton.cdiv(g.channels, bn)
    )
    programs = triton.cdiv(g.outputs, bo) * columns
    rows = g.batch * out_h * out_w
    splits = max(1, min(PROGRAMS // (programs * g.clients), triton.cdiv(rows, 8 * bk)))
    stride_rows = triton.cdiv(triton.cdiv(rows, splits), bk) * bk
    parts = gy.new_empty(g.clients, splits, g.outputs, kh, kw, g.channels, dtype=torch.float32)
    sums = gy.new_empty(g.clients, splits, g.outputs, dtype=torch.float32)
    grid = (programs, splits, g.clients)
    precision = "ieee" if gy.dtype == torch.float32 else "tf32"  # no meaning for bf16
    if narrow:
        _narrow_kernel[grid](
            gy, x, parts, sums, g.batch, g.outputs, splits, stride_rows, *g.sides, **g.constants(),
            BO=bo, BN=bn, BK=bk, C=g.channels, PRECISION=precision, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    else:
        _weight_grad_kernel[grid](
            gy, x, parts, sums, g.batch, g.channels, g.outputs, splits, stride_rows, *g.sides, **g.constants(),
            BO=bo, BN=bn, BK=bk, TAPS=taps, PRECISION=precision, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return added(parts).to(gy.dtype), added(sums).to(gy.dtype)


def added(parts: Tensor) -> Tensor:
    """The sum over the splits."""
    return parts[:, 0] if parts.shape[1] == 1 else parts.sum(1)
