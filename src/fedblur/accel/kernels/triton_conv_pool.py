"""Per-client convolution, 2x2 max-pool and ReLU in one kernel: the image before the pool is never written.

That image is the largest tensor of a small CNN's step: four times the pool's output, written once and read three times.
The forward kernel stores, beside each value, which of its four candidates won (4: ReLU zeroed it). Both gradients read
only that byte and the pooled gradient. Stride and dilation are 1; layouts as in `triton_conv`.

Inputs of few channels (a first layer) take the patch route: the 2x2 windows of a k x k kernel lie in one patch of
(k+1) x (k+1) pixels, which is loaded once and multiplied by four shifted copies of the filters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedblur.accel.kernels.geometry import MAX_PATCH, Geometry, reciprocals
from fedblur.accel.kernels.triton_common import PROGRAMS, SIZES, Tiles, coordinates, finished, tile, within

REPEAT = 8  # tiles of rows that a program of the patch route takes, one after another


@triton.jit
def _compete(acc, best, winner, number: tl.constexpr):
    """Return the larger of two candidates and its number; the first one keeps ties, and nan wins as in torch."""
    better = (acc > best) | (acc != acc)
    return tl.where(better, acc, best), tl.where(better, number, winner)


@triton.jit
def _store(y, where, best, winner, shift, target, kept, RELU: tl.constexpr):
    """Store the winners' values, with bias and ReLU, and their numbers."""
    best += shift[None, :]
    if RELU:
        winner = tl.where(best > 0, winner, 4)
        best = tl.where(best <= 0, 0.0, best)
    tl.store(y + target, best.to(y.dtype.element_ty), mask=kept)
    tl.store(where + target, winner.to(tl.uint8), mask=kept)


@triton.jit(do_not_specialize=SIZES)
def _patch_forward_kernel(
    x, w, bias, y, where, batch, outputs,
    height, width, out_h, out_w, by_image, by_row,
    KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    PADDED: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, REPEAT: tl.constexpr,
):  # fmt: skip
    """Compute y[m, o] = max over the window of m, by patches, for REPEAT tiles of rows with the same filters."""
    client = tl.program_id(2).to(tl.int64)
    rows = batch * out_h * out_w
    x += client * batch * height * width * C
    w += client * outputs * KH * KW * C
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    r, s, c = k // ((KW + 1) * C), (k // C) % (KW + 1), k % C
    filters = ()
    for j in tl.static_range(4):
        kh, kw = r - j // 2, s - j % 2
        fits = (kh >= 0) & (kh < KH) & (kw >= 0) & (kw < KW)
        place = n[None, :] * (KH * KW * C) + ((kh * KW + kw) * C + c)[:, None]
        b = tl.load(w + place, mask=fits[:, None] & (n < outputs)[None, :], other=0.0)
        filters = filters + (b,)  # type: ignore[assignment]  # noqa: RUF005 (no unpacking in Triton)
    shift = tl.zeros((BN,), dtype=tl.float32)
    if BIAS:
        shift += tl.load(bias + client * outputs + n, mask=n < outputs, other=0.0).to(tl.float32)
    for tile_number in range(0, REPEAT):
        m = (tl.program_id(0) * REPEAT + tile_number) * BM + tl.arange(0, BM)
        image, top, left = coordinates(m, out_h, out_w, by_image, by_row)
        top, left = top * 2 - PH, left * 2 - PW
        inside = (m < rows)[:, None] & (r <= KH)[None, :]
        if PADDED:
            inside = inside & within(top[:, None] + r[None, :], height) & within(left[:, None] + s[None, :], width)
        corner = (image * height + top) * width + left
        a = tl.load(x + corner[:, None] * C + ((r * width + s) * C + c)[None, :], mask=inside, other=0.0)
        best, winner = tl.full((BM, BN), float("-inf"), dtype=tl.float32), tl.zeros((BM, BN), dtype=tl.int32)
        for j in tl.static_range(4):
            best, winner = _compete(tl.dot(a, filters[j]), best, winner, j)
        target = (client * rows + m)[:, None] * outputs + n[None, :]
        _store(y, where, best, winner, shift, target, (m < rows)[:, None] & (n < outputs)[None, :], RELU)


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    x, w, bias, y, where, batch, outputs,
    height, width, out_h, out_w, by_image, by_row,
    KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    PADDED: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Compute y[m, o] = max over the window of m; m counts pooled pixels."""
    client = tl.program_id(2).to(tl.int64)
    rows = batch * out_h * out_w
    taps = KH * KW * C
    x += client * batch * height * width * C
    w += client * outputs * taps
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    image, top, left = coordinates(m, out_h, out_w, by_image, by_row)
    top, left = top * 2 - PH, left * 2 - PW
    corner = (image * height + top) * width + left
    best, winner = tl.full((BM, BN), float("-inf"), dtype=tl.float32), tl.zeros((BM, BN), dtype=tl.int32)
    BLOCKS: tl.constexpr = (C + BK - 1) // BK
    for j in tl.static_range(4):
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for step in range(0, KH * KW * BLOCKS):  # one loop: see `triton_conv`
            tap = step // BLOCKS
            c = (step % BLOCKS) * BK + tl.arange(0, BK)
            down, right = j // 2 + tap // KW, j % 2 + tap % KW
            inside = m < rows
            if PADDED:
                inside = inside & within(top + down, height) & within(left + right, width)
            at = (corner + down * width + right) * C
            a = tl.load(x + at[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0)
            place = n[None, :] * taps + tap * C + c[:, None]
            b = tl.load(w + place, mask=(c < C)[:, None] & (n < outputs)[None, :], other=0.0)
            acc = tl.dot(a, b, acc)
        best, winner = _compete(acc, best, winner, j)
    shift = tl.zeros((BN,), dtype=tl.float32)
    if BIAS:
        shift += tl.load(bias + client * outputs + n, mask=n < outputs, other=0.0).to(tl.float32)
    target = (client * rows + m)[:, None] * outputs + n[None, :]
    _store(y, where, best, winner, shift, target, (m < rows)[:, None] & (n < outputs)[None, :], RELU)


@triton.jit(do_not_specialize=SIZES)
def _input_grad_kernel(
    gy, where, w, gx, batch, channels,
    height, width, out_h, out_w, by_image, by_row,
    KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Compute gx[pixel, c] = Σ_{tap, o} of the pooled gradients whose winner the tap reaches, times w[o, tap, c]."""
    client = tl.program_id(2).to(tl.int64)
    rows = batch * height * width
    taps = KH * KW * channels
    gy += client * batch * out_h * out_w * OUT
    where += client * batch * out_h * out_w * OUT
    w += client * OUT * taps
    gx += client * rows * channels
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    image, row, column = coordinates(m, height, width, by_image, by_row)
    row, column = row + PH, column + PW
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    BLOCKS: tl.constexpr = (OUT + BK - 1) // BK
    for step in range(0, KH * KW * BLOCKS):  # one loop: see `triton_conv`
        tap = step // BLOCKS
        o = (step % BLOCKS) * BK + tl.arange(0, BK)
        up, over = row - tap // KW, column - tap % KW
        number = (up & 1) * 2 + (over & 1)
        hit = (m < rows) & within(up, 2 * out_h) & within(over, 2 * out_w)
        at = ((image * out_h + (up >> 1)) * out_w + (over >> 1)) * OUT
        inside = hit[:, None] & (o < OUT)[None, :]
        won = tl.load(where + at[:, None] + o[None, :], mask=inside, other=4).to(tl.int32) == number[:, None]
        a = tl.load(gy + at[:, None] + o[None, :], mask=inside, other=0.0)
        a = tl.where(won, a, tl.zeros_like(a))
        place = o[:, None] * taps + tap * channels + c[None, :]
        b = tl.load(w + place, mask=(o < OUT)[:, None] & (c < channels)[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
    target = m.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(gx + target, acc.to(gx.dtype.element_ty), mask=(m < rows)[:, None] & (c < channels)[None, :])


@triton.jit
def _of_winner(g, won, number: tl.constexpr):
    """Return the gradients whose winner was this member of the window, transposed to [o, m] for a product."""
    return tl.trans(tl.where(won == number, g, tl.zeros_like(g)))


@triton.jit(do_not_specialize=SIZES)
def _weight_grad_kernel(
    gy, where, x, parts, sums, batch, outputs, splits, stride_rows, wide,
    height, width, out_h, out_w, by_image, by_row,
    KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PATCH: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Compute parts[split, j, o, k] = Σ_m [winner = j]·gy[m, o]·x[m + k], k in the patch.

    Without PATCH, j and k are merged.
    """
    client = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    columns = tl.cdiv(wide, BN)
    rows = batch * out_h * out_w
    gy += client * rows * outputs
    where += client * rows * outputs
    x += client * batch * height * width * C
    o = (tl.program_id(0) // columns) * BO + tl.arange(0, BO)
    k = (tl.program_id(0) % columns) * BN + tl.arange(0, BN)
    c = k % C
    across = KW + 1 if PATCH else KW
    r, s = k // (across * C), (k // C) % across
    zero = tl.zeros((BO, BN), dtype=tl.float32)
    acc0, acc1, acc2, acc3 = zero, zero, zero, zero
    total = tl.zeros((BO,), dtype=tl.float32)
    last = tl.minimum(rows, (split + 1) * stride_rows)
    for m0 in range(split * stride_rows, last, BK):
        m = m0 + tl.arange(0, BK)
        known = (m < last)[:, None] & (o < outputs)[None, :]
        g = tl.load(gy + m[:, None] * outputs + o[None, :], mask=known, other=0.0)
        won = tl.load(where + m[:, None] * outputs + o[None, :], mask=known, other=4).to(tl.int32)
        total += tl.sum(tl.where(won < 4, g, tl.zeros_like(g)).to(tl.float32), 0)
        image, row, column = coordinates(m, out_h, out_w, by_image, by_row)
        ih, iw = (row * 2 - PH)[:, None] + r[None, :], (column * 2 - PW)[:, None] + s[None, :]
        real = (m < last)[:, None] & (k < wide)[None, :]
        corner = (image * height + row * 2 - PH) * width + column * 2 - PW
        at = corner[:, None] * C + ((r * width + s) * C + c)[None, :]
        if PATCH:
            inside = real & within(ih, height) & within(iw, width) if PADDED else real
            b = tl.load(x + at, mask=inside, other=0.0)
            acc0 = tl.dot(_of_winner(g, won, 0), b, acc0)
            acc1 = tl.dot(_of_winner(g, won, 1), b, acc1)
            acc2 = tl.dot(_of_winner(g, won, 2), b, acc2)
            acc3 = tl.dot(_of_winner(g, won, 3), b, acc3)
        else:
            for j in tl.static_range(4):
                inside = real & within(ih + j // 2, height) & within(iw + j % 2, width) if PADDED else real
                b = tl.load(x + at + ((j // 2) * width + j % 2) * C, mask=inside, other=0.0)
                acc0 = tl.dot(_of_winner(g, won, j), b, acc0)
    if tl.program_id(0) % columns == 0:
        tl.store(sums + (client * splits + split) * outputs + o, total, mask=o < outputs)
    place = o[:, None] * wide + k[None, :]
    kept = (o < outputs)[:, None] & (k < wide)[None, :]
    parts += (client * splits + split) * (4 if PATCH else 1) * outputs * wide
    tl.store(parts + place, acc0, mask=kept)
    if PATCH:
        tl.store(parts + outputs * wide + place, acc1, mask=kept)
        tl.store(parts + 2 * outputs * wide + place, acc2, mask=kept)
        tl.store(parts + 3 * outputs * wide + place, acc3, mask=kept)


def forward_tiles(g: Geometry) -> Tiles:
    if g.channels < 16:
        return Tiles(64, tile(g.outputs, 64), tile(g.pool_patch, MAX_PATCH), 2, 1)
    return Tiles(128, tile(g.outputs, 64), tile(g.channels, 32), 8, 2)


def input_grad_tiles(g: Geometry) -> Tiles:
    return Tiles(128, tile(g.channels, 128), tile(g.outputs, 32), 4, 2)


def weight_grad_tiles(g: Geometry) -> Tiles:
    if g.channels < 16:
        return Tiles(tile(g.outputs, 32), tile(g.pool_patch, MAX_PATCH), 32, 1, 2)
    return Tiles(tile(g.outputs, 64), 64, 32, 8, 3)


def forward(x: Tensor, w: Tensor, bias: Tensor | None, g: Geometry, relu: bool) -> tuple[Tensor, Tensor]:
    """Return y and the winners: x [clients, B, H, W, C], w [clients, O, KH, KW, C] -> [clients, B, OH/2, OW/2, O]."""
    out_h, out_w = g.pooled_size
    y = x.new_empty(g.clients, g.batch, out_h, out_w, g.outputs)
    where = torch.empty_like(y, dtype=torch.uint8)
    bm, bn, bk, warps, stages = forward_tiles(g)
    tiles = triton.cdiv(g.batch * out_h * out_w, bm)
    kernel, repeated, more = _forward_kernel, 1, {}
    if g.channels < 16:
        kernel, repeated, more = _patch_forward_kernel, REPEAT, {"REPEAT": REPEAT}
    kernel[triton.cdiv(tiles, repeated), triton.cdiv(g.outputs, bn), g.clients](
        x, w, w if bias is None else bias, y, where,
        g.batch, g.outputs, g.height, g.width, out_h, out_w, *reciprocals(out_h, out_w),
        KH=g.kernel[0], KW=g.kernel[1], PH=g.padding[0], PW=g.padding[1], BM=bm, BN=bn, BK=bk,
        C=g.channels, PADDED=g.padded, BIAS=bias is not None, RELU=relu, num_warps=warps, num_stages=stages, **more,
    )  # fmt: skip
    return y, where


def input_grad(gy: Tensor, where: Tensor, w: Tensor, g: Geometry) -> Tensor:
    """Return the gradient by the input, [clients, B, H, W, C]."""
    out_h, out_w = g.pooled_size
    gx = gy.new_empty(g.clients, g.batch, g.height, g.width, g.channels)
    bm, bn, bk, warps, stages = input_grad_tiles(g)
    grid = (triton.cdiv(g.batch * g.height * g.width, bm), triton.cdiv(g.channels, bn), g.clients)
    _input_grad_kernel[grid](
        gy, where, w, gx, g.batch, g.channels, g.height, g.width, out_h, out_w, *reciprocals(g.height, g.width),
        KH=g.kernel[0], KW=g.kernel[1], PH=g.padding[0], PW=g.padding[1], BM=bm, BN=bn, BK=bk, OUT=g.outputs,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return gx


def weight_grad(gy: Tensor, where: Tensor, x: Tensor, g: Geometry) -> tuple[Tensor, Tensor]:
    """Return the gradients by the weights [clients, O, KH, KW, C] and by the bias [clients, O]."""
    out_h, out_w = g.pooled_size
    kh, kw = g.kernel
    patch = g.channels < 16
    wide = g.pool_patch if patch else kh * kw * g.channels
    bo, bn, bk, warps, stages = weight_grad_tiles(g)
    tiles = triton.cdiv(g.outputs, bo) * triton.cdiv(wide, bn)
    rows = g.batch * out_h * out_w
    splits = max(1, min(2 * PROGRAMS // (tiles * g.clients), triton.cdiv(rows, 4 * bk)))
    stride_rows = triton.cdiv(triton.cdiv(rows, splits), bk) * bk
    parts = gy.new_empty(g.clients, splits, 4 if patch else 1, g.outputs, wide, dtype=torch.float32)
    sums = gy.new_empty(g.clients, splits, g.outputs, dtype=torch.float32)
    _weight_grad_kernel[(tiles, splits, g.clients)](
        gy, where, x, parts, sums, g.batch, g.outputs, splits, stride_rows, wide,
        g.height, g.width, out_h, out_w, *reciprocals(out_h, out_w),
        KW=kw, PH=g.padding[0], PW=g.padding[1], BO=bo, BN=bn, BK=bk,
        PATCH=patch, C=g.channels, PADDED=g.padded, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return finished(parts, sums, g, patch, gy.dtype)
