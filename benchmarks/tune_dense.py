"""Times tiles of the dense update's kernel, then a round with and without it: where `triton_dense`'s constants are.

    python benchmarks/tune_dense.py [--models cnn] [--repeats 15] [--quick] [--ways compiled pfl loop]

`--quick` leaves the search out; `--ways` are those of `gpu.py` that are timed beside the kernel.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from typing import Any

import gpu
import torch
from triton.testing import do_bench_cudagraph

from fedblur.accel import compile as compiling
from fedblur.accel.kernels import operators, triton_dense
from fedblur.accel.kernels.dense_update import fuse_updates
from fedblur.engines import local

_SHAPES = [([64, 128], 8), ([128, 64], 8), ([64, 64], 4), ([32, 128], 4), ([64, 128], 4), ([32, 256], 8)]  # tile, warps
_LOOPS = [(1, 3), (2, 3), (4, 3), (8, 3), (16, 3), (1, 4), (1, 2)]  # programs to a multiprocessor, loads ahead


def search() -> None:
    """The fastest for CNN-B's dense layer, put into place."""
    clients, batch, outputs, inputs = 136, 64, 128, 7744
    slope = torch.randn(clients, batch, outputs, device="cuda").bfloat16().transpose(1, 2)
    x = torch.randn(clients, batch, inputs, device="cuda").bfloat16()
    delta, start = torch.randn(clients, outputs, inputs).cuda(), torch.randn(outputs, inputs).cuda()
    decay = torch.rand(clients, device="cuda")
    best = math.inf, operators.TILE, (triton_dense.PROGRAMS, triton_dense.STAGES[0], triton_dense.WARPS)
    for (tile, warps), (programs, stages) in itertools.product(_SHAPES, _LOOPS):
        _set(programs, stages, warps)
        took = median_milliseconds(lambda tile=tile: triton_dense.update(slope, x, delta, decay, start, tile))
        print(f"tile {tile}, {programs} programs each, {stages} stages, {warps} warps: {took:.3f} ms", flush=True)
        best = min(best, (took, tile, (programs, stages, warps)))
    operators.TILE[:] = best[1]
    _set(*best[2])
    product = torch.empty(clients, outputs, inputs, device="cuda", dtype=torch.bfloat16)
    alone = median_milliseconds(lambda: torch.bmm(slope, x, out=product))
    print(f"best: {best}; the product alone: {alone:.3f} ms", flush=True)


def _set(programs: int, stages: int, warps: int) -> None:
    triton_dense.PROGRAMS, triton_dense.STAGES, triton_dense.WARPS = programs, (stages,), warps
    triton_dense._stages.cache_clear()


def median_milliseconds(run: Callable[[], Any]) -> float:
    try:
        return float(do_bench_cudagraph(run, rep=10))
    except Exception as error:  # tiles that need more than a multiprocessor has
        print(f"{type(error).__name__}: ", end="")
        return math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["cnn"], choices=[*gpu.TASKS])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ways", nargs="+", default=["compiled"])
    options = parser.parse_args()
    if not options.quick:
        search()
    for key in options.models:
        for fused in (True, False):
            print("one kernel:" if fused else "product and update apart:", flush=True)
            compiling.fuse_updates = fuse_updates if fused else lambda graph: 0
            local._compiled_steps.cache_clear()
            local.steps_for.cache_clear()
            gpu.measure(key, options.ways if fused else ["compiled"], options.repeats, profile=True)


if __name__ == "__main__":
    main()
