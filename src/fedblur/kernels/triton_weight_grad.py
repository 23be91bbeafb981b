"""Per-client convolution in Triton: the gradients by weights and bias. Layouts as in `triton_conv`.

Sums over pixels are split into parts that are written out and added in a fixed order, never by atomics: a repeated
run gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedblur.kernels.geometry import PROGRAMS, SIZES, Geometry, Tiles, reciprocals, tile
from fedblur.kernels.triton_parts import finished
from fedblur.kernels.triton_places import coordinates, within


@triton.jit
def _tap_tile(
    x, corner, top, left, known, c, tap, height, width,
    KH: tl.constexpr, KW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """What one tap of the kernel sees: x at every output pixel's position moved by the tap."""
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
    """parts[split, o, k] = Σ_{m in split} gy[m, o]·x[m + k]; the splits are added afterwards, in a fixed order.

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
    # The bias's gradient, too, is a product: to add up g, all threads would fetch it from shared memory.
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
    kept = gy.dtype if splits == 1 else torch.float32  # parts that are still to be added
    parts = gy.new_empty(g.clients, splits, g.outputs, kh, kw, g.channels, dtype=kept)
    sums = gy.new_empty(g.clients, splits, g.outputs, dtype=kept)
    grid = (programs, splits, g.clients)
    precision = "ieee" if gy.dtype == torch.float32 else "tf32"  # no meaning for bf16
    if narrow:
        _narrow_kernel[grid](
            gy, x, parts, sums, g.batch, g.outputs, splits, stride_rows, *g.sides, *reciprocals(out_h, out_w),
            **g.constants(), BO=bo, BN=bn, BK=bk, C=g.channels, PADDED=g.padded, PRECISION=precision,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    else:
        _weight_grad_kernel[grid](
            gy, x, parts, sums, g.batch, g.outputs, splits, stride_rows, *g.sides, *reciprocals(out_h, out_w),
            **g.constants(), BO=bo, BN=bn, BK=bk, TAPS=taps, C=g.channels, PADDED=g.padded, PRECISION=precision,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    if splits == 1:
        return parts[:, 0], sums[:, 0]
    return finished(parts, sums, g, False, gy.dtype)
