"""The last step of a weight gradient: the parts of its sum are added, in a fixed order, by one small kernel.

Done by torch's operations it is eight launches of a few microseconds each, for every local step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedblur.kernels.geometry import Geometry

_BLOCK = 256


@triton.jit
def _finish_kernel(
    parts, sums, gw, gb, splits, outputs, size, wide,
    KW: tl.constexpr, ROW: tl.constexpr, C: tl.constexpr, PATCH: tl.constexpr, BLOCK: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """gw[o, kh, kw, c] = Σ of the splits; with PATCH also of the four members' shifted views of the patch."""
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
    """From [clients, splits, ..] to gw [clients, O, KH, KW, C] and gb [clients, O]."""
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
