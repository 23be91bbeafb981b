"""A large dense layer's weight gradient and the local update that uses it, in one kernel.

In two kernels, the product writes a gradient (bf16) that the update reads again: 0.5 GB a step for CNN-B, where the
update itself moves 1.4 GB. This kernel multiplies a tile, updates Δ, and writes Δ, the next step's bf16 weights and the
squares for ‖Δ‖. The gradient is never rounded to bf16.
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

from fedblur.accel.kernels import operators
from fedblur.accel.kernels.triton_common import tile as power_of_two

PROGRAMS, WARPS = 1, 8  # programs to a multiprocessor, warps to a program: benchmarks/tune_dense.py times others
STAGES = (3, 2, 1)  # clients whose loads a program has in flight: the first that a GPU can hold


@triton.jit
def _update_kernel(
    slope, x, delta, decay, start, new, half, parts,
    clients, outputs, inputs, slope_client, slope_row, slope_sample, each,
    SAMPLES: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute new = (1 − decay)·delta + slope·x, half = start + new in bf16, parts[client, tile] = Σ new².

    A program takes one tile of `each` clients, so that the start, the same for all, is read once. Otherwise it would be
    a third of what the caches deliver, and they bound this kernel.
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
    """Return the results of `operators.client_dense_update`, computed by tiles of so many outputs and inputs."""
    clients, outputs, inputs = delta.shape
    samples = x.shape[1]
    x, delta, start = x.contiguous(), delta.contiguous(), start.contiguous()
    new, half = torch.empty_like(delta), torch.empty_like(delta, dtype=torch.bfloat16)
    parts = delta.new_empty(clients, triton.cdiv(outputs, tile[0]), triton.cdiv(inputs, tile[1]))
    each = _clients_each(delta, parts[0].numel())
    in_flight = stages(slope, x, tile)
    assert in_flight is not None  # `operators.covers` asks first
    grid = (parts.shape[2], parts.shape[1], triton.cdiv(clients, each))
    _update_kernel[grid](
        slope, x, delta, decay, start, new, half, parts, clients, outputs, inputs, *slope.stride(), each,
        **_constants(samples, tile[0], tile[1], in_flight),
    )  # fmt: skip
    return new, half, parts


def stages(slope: Tensor, x: Tensor, tile: list[int]) -> int | None:
    """Return how many clients' loads a program can have in flight on this GPU, or None where not one fits."""
    return _stages(slope.shape[2], slope.shape[1], x.shape[2], slope.stride(), (tile[0], tile[1]))


@cache
def _stages(samples: int, outputs: int, inputs: int, strides: tuple[int, ...], tile: tuple[int, int]) -> int | None:
    """Compile the kernel to find out: what loads need differs from GPU to GPU, and no formula of ours was right."""
    half, full = torch.bfloat16, torch.float32
    has = driver.active.utils.get_device_properties(driver.active.get_current_device())["max_shared_mem"]
    for count in STAGES:
        with suppress(Exception):  # the compiler may fail: Triton 3.6 does for a B200
            kernel = _update_kernel.warmup(
                half, half, full, full, full, full, half, full, 2, outputs, inputs, *strides, 2,
                grid=(1, 1, 1), **_constants(samples, *tile, count),
            )  # fmt: skip
            if kernel.metadata.shared <= has:
                return count
    return None


def _constants(samples: int, rows: int, columns: int, count: int) -> dict[str, Any]:
    sizes = {
        "SAMPLES": samples,
        "BATCH": power_of_two(samples, operators.MOST_SAMPLES),
        "ROWS": rows,
        "COLUMNS": columns,
    }
    return {**sizes, "STAGES": count, "num_warps": WARPS}


def _clients_each(delta: Tensor, tiles: int) -> int:
    """Return how many clients a program takes: as many as leave each multiprocessor its programs."""
    programs = PROGRAMS * torch.cuda.get_device_properties(delta.device).multi_processor_count
    return triton.cdiv(len(delta), max(1, round(programs / tiles)))
