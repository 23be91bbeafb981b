"""A convolution's gradients through a 2x2 max-pool on one core: our kernel (`kernels/pooled.c`) and torch's, in turn.

    PYTHONPATH=src python benchmarks/pooled.py [--repeats 15]

Both get the same images after a ReLU, channels last, and the same gradient behind the pool and a ReLU. Prints a table
of medians in milliseconds, and how far each is from float64.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.accel.kernels.cpu_layers import SingleClientLayers
from fedblur.accel.kernels.native import library

SHAPES = [(26, 32, 64), (14, 32, 64), (34, 16, 32), (34, 64, 64), (18, 64, 128), (10, 128, 256), (6, 256, 256)]
BATCH = 64


def given(side: int, inputs: int, filters: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, inputs, side, side, generator=generator).relu()
    w = torch.randn(filters, inputs, 3, 3, generator=generator) / (3 * inputs**0.5)
    return [t.contiguous(memory_format=torch.channels_last).requires_grad_() for t in (x, w)]


def slope_of(output: Tensor) -> Tensor:
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return slope.contiguous(memory_format=torch.channels_last)


def passes(x: Tensor, w: Tensor) -> tuple[list[Tensor], float]:
    """The gradients, and the seconds of pool, ReLU and gradients; the convolution itself is the same for both."""
    y = F.conv2d(x, w)
    began = time.perf_counter()
    output = torch.relu(F.max_pool2d(y, 2))
    taken = time.perf_counter() - began
    slope = slope_of(output.detach())
    began = time.perf_counter()
    found = torch.autograd.grad(output, (x, w), slope)
    return list(found), taken + time.perf_counter() - began


def ours(x: Tensor, w: Tensor) -> tuple[list[Tensor], float]:
    with SingleClientLayers():
        return passes(x, w)


def measure(ways: list[Callable[..., tuple[list[Tensor], float]]], tensors: list[Tensor], repeats: int) -> list[float]:
    """Medians in milliseconds, the ways in turn, after two rounds to warm up."""
    turns = [[way(*tensors)[1] for way in ways] for _ in range(repeats + 2)][2:]
    return [1e3 * sorted(column)[repeats // 2] for column in zip(*turns, strict=True)]


def off(way: Callable[..., tuple[list[Tensor], float]], tensors: list[Tensor]) -> float:
    """The larger of both gradients' relative l2 differences from float64."""
    expected, _ = passes(*(t.detach().double().requires_grad_() for t in tensors))
    found, _ = way(*tensors)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    if library("pooled", KH=3, KW=3, CIN=32) is None:
        raise SystemExit("no C compiler here, or not Linux on x86-64: both ways would be torch's")
    torch.set_num_threads(1)
    print("| image | channels | ours, ms | torch, ms | ratio | ours off | torch off |\n|---|---|---|---|---|---|---|")
    for side, inputs, filters in SHAPES:
        tensors = given(side, inputs, filters)
        mine, torchs = measure([ours, passes], tensors, repeats)
        errors = f"{off(ours, tensors):.1e} | {off(passes, tensors):.1e}"
        shape = f"{side}×{side} | {inputs} → {filters}"
        print(f"| {shape} | {mine:.1f} | {torchs:.1f} | {torchs / mine:.1f} | {errors} |", flush=True)


if __name__ == "__main__":
    main()
