"""Per-client convolution as implicit GEMM in Triton: forward, input gradient, weight gradient.

Every client has its own weights, so this is a batch of small convolutions, for which cuDNN's grouped kernels reach a
few per cent of the chip. Layout is channels last: x [clients, batch, H, W, C], w [clients, O, KH, KW, C], y [clients,
batch, OH, OW, O]. bf16 (or float32) in, float32 accumulation. Sums over pixels are split into parts that are written
out and added, never by atomics: a repeated run gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 4 * 132  # enough to fill an H100 or H200 a few times over


@dataclass(frozen=True)
class Geometry:
    """The numbers of a convolution; square strides, paddings and dilations are not assumed."""

    clients: int
    batch: int
    channels: int  # C
    height: int
    width: int
    outputs: int  # O
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def out_size(self) -> tuple[int, int]:
        sides = zip((self.height, self.width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        rows, columns = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)
        return rows, columns

    def constants(self) -> dict[str, int]:
        (kh, kw), (sh, sw), (ph, pw), (dh, dw) = self.kernel, self.stride, self.padding, self.dilation
        return {"KH": kh, "KW": kw, "SH": sh, "SW": sw, "PH": ph, "PW": pw, "DH": dh, "DW": dw}


@triton.jit
def _forward_kernel(
    x, w, bias, y, batch, height, width, channels, out_h, out_w, outputs,
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


@triton.jit
def _input_grad_kernel(
    gy, w, gx, batch, height, width, channels, out_h, out_w, outputs,
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


@triton.jit
def _weight_grad_kernel(
    gy, x, parts, batch, height, width, channels, out_h, out_w, outputs, splits, stride_rows,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FLAT: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """parts[split, o, k] = Σ_{m in split} gy[m, o]·x[m + k]; the splits are added afterwards, in a fixed order."""
    client = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    rows = batch * out_h * out_w
    taps = KH * KW * channels
    gy += client * rows * outputs
    x += client * batch * height * width * channels
    parts += (client * splits + split) * outputs * taps
    columns = tl.cdiv(KH * KW * C, BN) if FLAT else KH * KW * tl.cdiv(channels, BN)
    o = (tl.program_id(0) // columns) * BO + tl.arange(0, BO)
    tile = tl.program_id(0) % columns
    if FLAT:
        k = tile * BN + tl.arange(0, BN)
        within = k < taps
        tap, c = k // C, k % C
        down, right = (tap // KW) * DH, (tap % KW) * DW
    else:
        blocks = tl.cdiv(channels, BN)
        c = (tile % blocks) * BN + tl.arange(0, BN)
        within = c < channels
        k = (tile // blocks) * channels + c
        down = ((tile // blocks) // KW) * DH + tl.zeros((BN,), dtype=tl.int32)
        right = ((tile // blocks) % KW) * DW + tl.zeros((BN,), dtype=tl.int32)
    acc = tl.zeros((BO, BN), dtype=tl.float32)
    last = tl.minimum(rows, (split + 1) * stride_rows)
    for m0 in range(split * stride_rows, last, BK):
        m = m0 + tl.arange(0, BK)
        image = m // (out_h * out_w)
        pixel = m % (out_h * out_w)
        ih = ((pixel // out_w) * SH - PH)[:, None] + down[None, :]
        iw = ((pixel % out_w) * SW - PW)[:, None] + right[None, :]
        inside = (m < last)[:, None] & within[None, :] & (ih >= 0) & (ih < height) & (iw >= 0) & (iw < width)
        at = ((image[:, None] * height + ih) * width + iw) * channels + c[None, :]
        b = tl.load(x + at, mask=inside, other=0.0)
        a = tl.load(
            gy + m[:, None] * outputs + o[None, :], mask=(m < last)[:, None] & (o < outputs)[None, :], other=0.0
        )
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
    tl.store(parts + o[:, None] * taps + k[None, :], acc, mask=(o < outputs)[:, None] & within[None, :])


def _tile(size: int, most: int) -> int:
    """A power of two that covers `size`, between 16 (the least a tensor core takes) and `most`."""
    return min(most, max(16, triton.next_power_of_2(size)))


def _depth(channels: int) -> int:
    """Shallow tiles keep more of them in flight; deep ones pay only where there are many channels."""
    return _tile(channels, 32 if channels <= 64 else 64)


def _precision(tensor: Tensor) -> str:
    return "ieee" if tensor.dtype == torch.float32 else "tf32"  # no meaning for bf16


class Tiles(NamedTuple):
    """How a kernel is cut: a tile's rows, columns and depth, warps, loads in flight (benchmarks/tune_kernels.py)."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def forward_tiles(g: Geometry) -> Tiles:
    columns = _tile(g.outputs, 128)
    depth = _tile(g.channels * g.kernel[0] * g.kernel[1], 32) if g.channels < 16 else _depth(g.channels)
    return Tiles(128, columns, depth, 8 if columns >= 128 else 4, 2 if depth <= 32 else 3)


def input_grad_tiles(g: Geometry) -> Tiles:
    columns = _tile(g.channels, 128)
    depth = _depth(g.outputs)
    return Tiles(128, columns, depth, 8 if columns >= 128 else 4, 2 if depth <= 32 else 3)


def weight_grad_tiles(g: Geometry) -> Tiles:
    rows = _tile(g.outputs, 128)
    flat = g.channels < 16
    columns = _tile(g.kernel[0] * g.kernel[1] * g.channels, 64) if flat else _tile(g.channels, 128)
    large = rows * columns >= 128 * 128
    return Tiles(rows, columns, 64 if large else 128, 8 if large else 4, 2 if flat else 3)


def forward(x: Tensor, w: Tensor, bias: Tensor | None, g: Geometry) -> Tensor:
    """x [clients, B, H, W, C], w [clients, O, KH, KW, C], bias [clients, O] -> y [clients, B, OH, OW, O]."""
    out_h, out_w = g.out_size
    y = x.new_empty(g.clients, g.batch, out_h, out_w, g.outputs)
    bm, bn, bk, warps, stages = forward_tiles(g)
    grid = (triton.cdiv(g.batch * out_h * out_w, bm), triton.cdiv(g.outputs, bn), g.clients)
    _forward_kernel[grid](
        x, w, w if bias is None else bias, y, g.batch, g.height, g.width, g.channels, out_h, out_w, g.outputs,
        **g.constants(),
        BM=bm, BN=bn, BK=bk, FLAT=g.channels < 16, C=g.channels, PRECISION=_precision(x), BIAS=bias is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def input_grad(gy: Tensor, w: Tensor, g: Geometry) -> Tensor:
    """gy [clients, B, OH, OW, O] -> gx [clients, B, H, W, C]."""
    out_h, out_w = g.out_size
    gx = gy.new_empty(g.clients, g.batch, g.height, g.width, g.channels)
    bm, bn, bk, warps, stages = input_grad_tiles(g)
    grid = (triton.cdiv(g.batch * g.height * g.width, bm), triton.cdiv(g.channels, bn), g.clients)
    _input_grad_kernel[grid](
        gy, w, gx, g.batch, g.height, g.width, g.channels, out_h, out_w, g.outputs, **g.constants(),
        BM=bm, BN=bn, BK=bk, PRECISION=_precision(gy), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return gx


def weight_grad(gy: Tensor, x: Tensor, g: Geometry) -> Tensor:
    """gy [clients, B, OH, OW, O], x [clients, B, H, W, C] -> gw [clients, O, KH, KW, C]."""
    out_h, out_w = g.out_size
    kh, kw = g.kernel
    flat = g.channels < 16
    bo, bn, bk, warps, stages = weight_grad_tiles(g)
    columns = triton.cdiv(kh * kw * g.channels, bn) if flat else kh * kw * triton.cdiv(g.channels, bn)
    tiles = triton.cdiv(g.outputs, bo) * columns
    rows = g.batch * out_h * out_w
    splits = max(1, min(_PROGRAMS // (tiles * g.clients), triton.cdiv(rows, 8 * bk)))
    stride_rows = triton.cdiv(triton.cdiv(rows, splits), bk) * bk
    parts = gy.new_empty(g.clients, splits, g.outputs, kh, kw, g.channels, dtype=torch.float32)
    _weight_grad_kernel[(tiles, splits, g.clients)](
        gy, x, parts, g.batch, g.height, g.width, g.channels, out_h, out_w, g.outputs, splits, stride_rows,
        **g.constants(), BO=bo, BN=bn, BK=bk, FLAT=flat, C=g.channels, PRECISION=_precision(gy),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return (parts[:, 0] if splits == 1 else parts.sum(1)).to(gy.dtype)
