"""Norms and clipping of many long rows on a GPU, each in one pass over memory.

torch's own float64 norm of float32 values first writes a float64 copy of all of them. To scale a row, and to replace it
where it is not finite, are two more passes. The arithmetic is that of `privacy/clipping.py`: squares and sums in
float64, one float32 product for each value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 16384  # values of a row that one program takes
_TILE = 2048


@triton.jit(do_not_specialize=["width"])
def _squares_kernel(values, parts, width, stride, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Compute parts[row, chunk] = Σ value² in float64."""
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    total = tl.zeros((TILE,), dtype=tl.float64)
    for first in range(chunk * CHUNK, chunk * CHUNK + CHUNK, TILE):
        at = first + tl.arange(0, TILE)
        value = tl.load(values + row * stride + at, mask=at < width, other=0.0).to(tl.float64)
        total += value * value
    tl.store(parts + row * tl.num_programs(0) + chunk, tl.sum(total, 0))


@triton.jit(do_not_specialize=["width"])
def _scale_kernel(values, factors, usable, scaled, width, stride, TILE: tl.constexpr):
    """Multiply a row by its factor, or write zeros where the row is not usable, whatever it contains."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(values + row * stride + at, mask=at < width, other=0.0) * tl.load(factors + row)
    tl.store(scaled + row * width + at, tl.where(tl.load(usable + row), value, 0.0), mask=at < width)


def row_norms(values: Tensor) -> Tensor:
    """Return the l2 norms of the rows of [rows, width], float64."""
    rows, width = values.shape
    parts = values.new_empty(rows, triton.cdiv(width, _CHUNK), dtype=torch.float64)
    if parts.numel():
        _squares_kernel[parts.shape[1], rows](values, parts, width, values.stride(0), CHUNK=_CHUNK, TILE=_TILE)
    return parts.sum(1).sqrt()


def scaled_rows(values: Tensor, factors: Tensor, usable: Tensor) -> Tensor:
    """Return values · factors[:, None] where `usable`, else 0."""
    rows, width = values.shape
    scaled = values.new_empty(rows, width)
    if scaled.numel():
        grid = (triton.cdiv(width, _TILE), rows)
        _scale_kernel[grid](values, factors, usable, scaled, width, values.stride(0), TILE=_TILE)
    return scaled
