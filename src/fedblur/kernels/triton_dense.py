"""A large dense layer's weight gradient and the local update that it is for, in one kernel.

Apart, the product writes a gradient (bf16) that the update reads again: for CNN-B 0.5 GB a step, where the update
itself moves 1.4 GB. One kernel multiplies a tile, updates Δ, and writes Δ, the next step's bf16 weights and the squares
for ‖Δ‖; the gradient is never rounded to bf16.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from fedblur.kernels import dense_ops

PROGRAMS, WARPS = 1, 8  # programs to a multiprocessor, warps to a program: benchmarks/tune_dense.py times others
STAGES = (3, 2, 1)  # clients whose loads a program has under way: the first that a GPU can hold


@triton.jit
def _update_kernel(
    slope, x, delta, decay, start, new, half, parts,
    clients, outputs, inputs, slope_client, slope_row, slope_sample, each,
    SAMPLES: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """new = (1 − decay)·delta + slope·x, half = start + new in bf16, parts[client, tile] = Σ new².

    A program takes one tile of `each` clients: the start, the same for all, is then read once. Otherwise that is a
    third of what the caches deliver, and they are what bounds this kernel.
    """
    tile, band, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, column = band * ROWS + tl.arange(0, ROWS), tile * COLUMNS + tl.arange(0, COLUMNS)
    sample = tl.arange(0, BATCH)
    at, inside = row[:, None] * inputs + column[None, :], (row < outputs)[:, None] & (column < inputs)[None, :]
    base = tl.load(start + at, mask=inside, other=0.0)
    for i in tl.range(0, tl.minimum(each, clients - group * each), num_stages=STAGES):
        client = group.to(tl.int64) * each + i
        weights = client * outputs * inputs
        update = tl.load(delta + weights + at, mask=inside, other=0.0)
        gradient = tl.load(
            slope + client * slope_client + row[:, None] * slope_row + sample[None, :] * slope_sample,
            mask=(row < outputs)[:, None] & (sample < SAMPLES)[None, :], other=0.0,
        )  # fmt: skip
        value = tl.load(
            x + client * SAMPLES * inputs + sample[:, None] * inputs + column[None, :],
            mask=(sample < SAMPLES)[:, None] & (column < inputs)[None, :], other=0.0,
        )  # fmt: skip
        update = tl.dot(gradient, value, update - tl.load(decay + client) * update)
        tl.store(new + weights + at, update, mask=inside)
        tl.store(half + weights + at, (base + update).to(tl.bfloat16), mask=inside)
        place = (client * tl.num_programs(1) + band) * tl.num_programs(0) + tile
        tl.store(parts + place, tl.sum(tl.sum(update * update, 1), 0))


def update(
    slope: Tensor, x: Tensor, delta: Tensor, decay: Tensor, start: Tensor, tile: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """As `dense_ops.client_dense_update`, by tiles of so many outputs and inputs."""
    clients, outputs, inputs = delta.shape
    samples = x.shape[1]
    x, delta, start = x.contiguous(), delta.contiguous(), start.contiguous()
    new, half = torch.empty_like(delta), torch.empty_like(delta, dtype=torch.bfloat16)
    parts = delta.new_empty(clients, triton.cdiv(outputs, tile[0]), triton.cdiv(inputs, tile[1]))
    each = _clients_each(delta, parts[0].numel())
    under_way = stages(slope, x, tile)
    assert under_way is not None  # `dense_ops.covers` asks first
    grid = (parts.shape[2], parts.shape[1], triton.cdiv(clients, each))
    _update_kernel[grid](
        slope, x, delta, decay, start, new, half, parts, clients, outputs, inputs, *slope.stride(), each,
        **_constants(samples, tile[0], tile[1], under_way),
    )  # fmt: skip
    return new, half, parts


def stages(slope: Tensor, x: Tensor, tile: list[int]) -> int | None:
    """How many clients' loads a program can have under way on this GPU; None where not one fits."""
    return _stages(slope.shape[2], slope.shape[1], x.shape[2], slope.stride(), (tile[0], tile[1]))


@cache
def _stages(samples: int, outputs: int, inputs: int, strides: tuple[int, ...], tile: tuple[int, int]) -> int | None:
    """By compiling it: what the compiler needs for loads differs from GPU to GPU, and no formula of ours was right."""
    half, full = torch.bfloat16, torch.float32
    has = driver.active.utils.get_device_properties(driver.active.get_current_device())["max_shared_mem"]
    for count in STAGES:
        with suppress(Exception):  # a compiler that fails on it: Triton 3.6 does for a B200
            kernel = _update_kernel.warmup(
                half, half, full, full, full, full, half, full, 2, outputs, inputs, *strides, 2,
                grid=(1, 1, 1), **_constants(samples, *tile, count),
            )  # fmt: skip
            if kernel.metadata.shared <= has:
                return count
    return None


def _constants(samples: int, rows: int, columns: int, count: int) -> dict[str, Any]:
    sizes = {"SAMPLES": samples, "BATCH": dense_ops.padded(samples), "ROWS": rows, "COLUMNS": columns}
    return {**sizes, "STAGES": count, "num_warps": WARPS}


def _clients_each(delta: Tensor, tiles: int) -> int:
    """How many clients a program takes: as many as leave each multiprocessor its programs."""
    programs = PROGRAMS * torch.cuda.get_device_properties(delta.device).multi_processor_count
    return triton.cdiv(len(delta), max(1, round(programs / tiles)))
