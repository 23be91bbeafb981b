"""Per-client convolution as implicit GEMM in Triton: forward, and the gradients by input, weights and bias.

Every client has its own weights, so this is a batch of small convolutions, for which cuDNN's grouped kernels reach a
few per cent of the chip. Layout is channels last: x [clients, batch, H, W, C], w [clients, O, KH, KW, C], y [clients,
batch, OH, OW, O]. bf16 (or float32) in, float32 accumulation. A weight gradient's sums over pixels are split into parts
that are written out and added in a fixed order, never by atomics: a repeated run gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedblur.accel.kernels.geometry import Geometry, reciprocals
from fedblur.accel.kernels.triton_common import (
    PROGRAMS,
    SIZES,
    Tiles,
    coordinates,
    finished,
    relu_dropout,
    tile,
    within,
)


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    x, w, bias, y, keys, threshold, scale, batch, outputs,
    height, width, out_h, out_w, by_image, by_row,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FLAT: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """Compute y[m, o] = b[o] + Σ_k x[m + k]·w[o, k]. FLAT makes (kh, kw, c) one axis, for inputs of few channels."""
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
    if DROPOUT:  # the output is then channels first, for the dense layer that follows
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
    """Compute gx[pixel, c] = Σ_{tap, o} gy[pixel reached by tap, o]·w[o, tap, c]."""
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
    if UNIT:  # one bit for each row and column of the kernel inside the image, and one corner for all taps
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


@triton.jit
def _tap_tile(
    x, corner, top, left, known, c, tap, height, width,
    KH: tl.constexpr, KW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Return what one tap of the kernel sees: x at every output pixel's position, shifted by the tap."""
    down, right = (tap // KW) * DH, (tap % KW) * DW
    inside = known & (tap < KH * KW)
    if PADDED:
        inside = inside & within(top + down, height) & within(left + right, width)
    at = (corner + down * width + right) * C
    return tl.load(x + at[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0)


@triton.jit(do_not_specialize=SIZES)
def _weight_grad_kernel(
    gy, x, parts, sums, batch, outputs, splits, stride_rows,
    height, width, out_h, out_w, by_image, by_row,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TAPS: tl.constexpr,
    C: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute parts[split, o, k] = Σ_{m in split} gy[m, o]·x[m + k]; the splits are added afterwards.

    A program takes TAPS taps at once, so that gy is read less often.
    """
    client = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    rows = batch * out_h * out_w
    gy += client * rows * outputs
    x += client * batch * height * width * C
    blocks = tl.cdiv(C, BN)
    columns = tl.cdiv(KH * KW, TAPS) * blocks
    o = (tl.program_id(0) // columns) * BO + tl.arange(0, BO)
    c = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    tap = ((tl.program_id(0) % columns) // blocks) * TAPS
    accs = ()
    for _ in tl.static_range(TAPS):
        accs = accs + (tl.zeros((BO, BN), dtype=tl.float32),)  # type: ignore[assignment]  # noqa: RUF005 (no unpacking in Triton)
    # The bias's gradient is a product too: to sum g, all threads would fetch it from shared memory.
    total = tl.zeros((BO, 16), dtype=tl.float32)
    ones = tl.full((BK, 16), 1.0, dtype=gy.dtype.element_ty)
    last = tl.minimum(rows, (split + 1) * stride_rows)
    for m0 in range(split * stride_rows, last, BK):
        m = m0 + tl.arange(0, BK)
        known = m < last
        image, row, column = coordinates(m, out_h, out_w, by_image, by_row)
        top, left = row * SH - PH, column * SW - PW
        corner = (image * height + top) * width + left
        g = tl.load(gy + m[:, None] * outputs + o[None, :], mask=known[:, None] & (o < outputs)[None, :], other=0.0)
        a = tl.trans(g)
        total = tl.dot(a, ones, total, input_precision=PRECISION)
        grown = ()
        for j in tl.static_range(TAPS):
            b = _tap_tile(x, corner, top, left, known, c, tap + j, height, width, KH, KW, DH, DW, C, PADDED)
            grown = grown + (tl.dot(a, b, accs[j], input_precision=PRECISION),)  # type: ignore[assignment]  # noqa: RUF005
        accs = grown
    if tl.program_id(0) % columns == 0:
        tl.store(
            sums + (client * splits + split) * outputs + o, tl.max(total, 1), mask=o < outputs
        )  # all columns alike
    parts += (client * splits + split) * outputs * KH * KW * C
    place = (o[:, None] * KH * KW + tap) * C + c[None, :]
    kept = (o < outputs)[:, None] & (c < C)[None, :]
    for j in tl.static_range(TAPS):
        tl.store(parts + place + j * C, accs[j], mask=kept & (tap + j < KH * KW))


@triton.jit(do_not_specialize=SIZES)
def _narrow_kernel(
    gy, x, parts, sums, batch, outputs, splits, stride_rows,
    height, width, out_h, out_w, by_image, by_row,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    C: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the same for inputs of few channels C: (kh, kw, c) is one axis, as a tap alone would not fill a tile."""
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
        image, row, column = coordinates(m, out_h, out_w, by_image, by_row)
        ih = (row * SH - PH)[:, None] + down[None, :]
        iw = (column * SW - PW)[:, None] + right[None, :]
        inside = (m < last)[:, None] & (k < taps)[None, :]
        if PADDED:
            inside = inside & within(ih, height) & within(iw, width)
        b = tl.load(x + ((image[:, None] * height + ih) * width + iw) * C + (k % C)[None, :], mask=inside, other=0.0)
        known = (m < last)[:, None] & (o < outputs)[None, :]
        g = tl.load(gy + m[:, None] * outputs + o[None, :], mask=known, other=0.0)
        total += tl.sum(g.to(tl.float32), 0)
        acc = tl.dot(tl.trans(g), b, acc, input_precision=PRECISION)
    if tl.program_id(0) % columns == 0:
        tl.store(sums + (client * splits + split) * outputs + o, total, mask=o < outputs)
    parts += (client * splits + split) * outputs * taps
    tl.store(parts + o[:, None] * taps + k[None, :], acc, mask=(o < outputs)[:, None] & (k < taps)[None, :])


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
    """Return smaller tiles for small images: they have few rows for each client, and small tiles keep the chip busy."""
    small = g.batch * g.height * g.width <= 1024
    return (64, columns, 64, 4) if small else (128, columns, 64, 8)


def weight_grad_tiles(g: Geometry) -> Tiles:
    rows = tile(g.outputs, 64)
    if g.channels < 16:
        return Tiles(rows, tile(g.kernel[0] * g.kernel[1] * g.channels, 64), 128, 4, 2)
    columns = tile(g.channels, 64)
    if columns <= 32:
        return Tiles(rows, columns, 32, 4, 4)
    if g.outputs <= 64:
        return Tiles(rows, columns, 64, 4, 3)
    return Tiles(128, columns, 64, 8, 3) if g.outputs <= 128 else Tiles(128, columns, 32, 4, 3)


class Dropout(NamedTuple):
    """The settings of ReLU and dropout in the convolution's own kernel."""

    keys: Tensor  # [clients] int32
    threshold: int
    scale: float


def forward(x: Tensor, w: Tensor, bias: Tensor | None, g: Geometry, dropout: Dropout | None = None) -> Tensor:
    """Return x [clients, B, H, W, C] * w [clients, O, KH, KW, C] + bias [clients, O]: y [clients, B, OH, OW, O].

    With dropout y is [clients, B, O, OH, OW], because a flattening follows.
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
    """Return the gradient by the input: gy [clients, B, OH, OW, O] -> gx [clients, B, H, W, C]."""
    gx = gy.new_empty(g.clients, g.batch, g.height, g.width, g.channels)
    bm, bn, bk, warps, stages = input_grad_tiles(g)
    grid = (triton.cdiv(g.batch * g.height * g.width, bm), triton.cdiv(g.channels, bn), g.clients)
    _input_grad_kernel[grid](
        gy, w, gx, g.batch, g.channels, *g.sides, *reciprocals(g.height, g.width), **g.constants(),
        BM=bm, BN=bn, BK=bk, OUT=g.outputs, PRECISION=_precision(gy), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return gx


def weight_grad(gy: Tensor, x: Tensor, g: Geometry) -> tuple[Tensor, Tensor]:
    """Return the gradients by weights and bias.

    gy [clients, B, OH, OW, O], x [clients, B, H, W, C] -> gw [clients, O, KH, KW, C], gb [clients, O].
    """
    out_h, out_w = g.out_size
    kh, kw = g.kernel
    bo, bn, bk, warps, stages = weight_grad_tiles(g)
    taps = 1 if g.kernel == (1, 1) else 3  # at once
    narrow = g.channels < 16
    columns = (
        triton.cdiv(kh * kw * g.channels, bn) if narrow else triton.cdiv(kh * kw, taps) * triton.cdiv(g.channels, bn)
    )
    programs = triton.cdiv(g.outputs, bo) * columns
    rows = g.batch * out_h * out_w
    splits = max(1, min(PROGRAMS // (programs * g.clients), triton.cdiv(rows, 8 * bk)))
    stride_rows = triton.cdiv(triton.cdiv(rows, splits), bk) * bk
    kept = gy.dtype if splits == 1 else torch.float32  # parts that are still to be added
    parts = gy.new_empty(g.clients, splits, g.outputs, kh, kw, g.channels, dtype=kept)
    sums = gy.new_empty(g.clients, splits, g.outputs, dtype=kept)
    grid = (programs, splits, g.clients)
    kernel, more = (_narrow_kernel, {}) if narrow else (_weight_grad_kernel, {"TAPS": taps})
    kernel[grid](
        gy, x, parts, sums, g.batch, g.outputs, splits, stride_rows, *g.sides, *reciprocals(out_h, out_w),
        **g.constants(), BO=bo, BN=bn, BK=bk, C=g.channels, PADDED=g.padded, PRECISION=_precision(gy),
        num_warps=warps, num_stages=stages, **more,
    )  # fmt: skip
    if splits == 1:
        return parts[:, 0], sums[:, 0]
    return finished(parts, sums, g, False, gy.dtype)
