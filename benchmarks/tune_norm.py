"""GroupNorm by `group_norm`'s kernels: against float64, tile by tile, and a round with and without them.

    python benchmarks/tune_norm.py [--models resnet18 gn_cnn] [--repeats 5] [--quick] [--profile]

`--quick` leaves the tiles out. No GPU has run this yet.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu
import torch
from group_norm import kernels
from group_norm.kernels import FORWARD, GRADIENT, Tiles
from group_norm.layers import WithGroupNorm
from tune_dense import median_milliseconds

from fedblur import client, functional
from fedblur.kernels.layers import PerClientLayers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the tests' cases

# clients, batch, height, width, channels, groups: ResNet-18's four stages, GN-CNN's first two
_SHAPES = [
    (30, 50, 32, 32, 64, 32), (30, 50, 16, 16, 128, 32), (30, 50, 8, 8, 256, 32), (30, 50, 4, 4, 512, 32),
    (136, 64, 28, 28, 16, 4), (136, 64, 14, 14, 32, 8),
]  # fmt: skip
_TILES = [Tiles(values, warps) for values, warps in itertools.product((2048, 4096, 8192, 16384), (4, 8, 16, 32))]


def check() -> None:
    from tests.test_group_norm import SHAPES, kernel_errors

    errors = [kernel_errors(shape, relu) for shape in SHAPES for relu in (False, True)]
    worst = [f"{max(column):.1e}" for column in zip(*errors, strict=True)]
    print("worst relative errors of y and the gradients by x, weight and bias:", worst, flush=True)


def search() -> None:
    """The fastest tiles for each shape; a copy of as many bytes is what could be reached."""
    for shape in _SHAPES:
        search_one(*shape)


def search_one(clients: int, batch: int, height: int, width: int, channels: int, groups: int) -> None:
    shape = clients, batch, height, width, channels
    x, gy = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    weight, bias = (torch.randn(clients, channels, device="cuda").bfloat16() for _ in range(2))
    _, mean, rstd = kernels.forward(x, weight, bias, groups, 1e-5, True)
    calls: list[tuple[str, dict[bool, Tiles], Callable[[], Any]]] = [
        ("forward", FORWARD, lambda: kernels.forward(x, weight, bias, groups, 1e-5, True)),
        ("gradient", GRADIENT, lambda: kernels.gradient(gy, x, mean, rstd, weight, bias, True)),
    ]
    copy = median_milliseconds(lambda: x.clone())
    for name, table, call in calls:
        kept, now = dict(table), median_milliseconds(call)
        times = sorted((_with(table, tiles, call), tiles) for tiles in _TILES)
        table.update(kept)
        found = ", ".join(f"{t.values}/{t.warps}: {ms:.3f}" for ms, t in times[:6])
        print(f"{shape} {name}: now {now:.3f} ms, a copy of x {copy:.3f}; {found}", flush=True)


def _with(table: dict[bool, Tiles], tiles: Tiles, call: Callable[[], Any]) -> float:
    table.update(dict.fromkeys(table, tiles))
    return median_milliseconds(call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18", "gn_cnn"], choices=[*gpu.TASKS])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--profile", action="store_true", help="list the kernels that take the time")
    options = parser.parse_args()
    check()
    if not options.quick:
        search()
    for key in options.models:
        for layers in (WithGroupNorm, PerClientLayers):
            print(f"{layers.__name__}:", flush=True)
            functional.PerClientLayers = layers  # type: ignore[misc]
            client._compiled_steps.cache_clear()
            client._compiled_score.cache_clear()
            client.many_clients.cache_clear()
            gpu.measure(key, ["compiled"], options.repeats, options.profile)


if __name__ == "__main__":
    main()
