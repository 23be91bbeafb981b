"""An experiment, not part of the library: uncompiled local steps recorded as one CUDA graph.

    python benchmarks/recorded.py [--models cnn resnet18_users] [--repeats 3]

Compiling pays from 2000 steps on (half a minute for CNN-B, 200 s for ResNet-18). Below that a step is thousands of
operators that Python launches one by one: in Table 2's short ResNet-18 rows a GPU was busy 45 % of the time (one H200,
16 November 2026: 6.6 s a round of 300 clients for DP-FedAvg, 17 s for BLUR + LUS). A recording needs no compiler. The
script times a round with and without, lists the kernels, and says how far the sums are apart. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
from functools import lru_cache
from typing import Any

import gpu

from fedblur import client
from fedblur.capturing import Captured

plainly = client.many_clients


@lru_cache(maxsize=8)
def recorded(program: client.LocalProgram, compiled: bool = False, traced: bool = False) -> client.Steps:
    steps = plainly(program, compiled, traced)
    return steps if compiled else steps._replace(train=Captured(steps.train, resident=(2, 3)))


def rounds(key: str, repeats: int, methods: tuple[Any, ...]) -> None:
    gpu.METHODS = methods
    for chosen in (plainly, recorded):
        client.many_clients = chosen  # type: ignore[assignment]
        print(f"{[type(method).__name__ for method in methods]}, {chosen.__name__}", flush=True)
        gpu.measure(key, ["half"], repeats, profile=chosen is recorded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet18_users"], choices=[*gpu.TASKS])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    both = gpu.METHODS
    for key in options.models:
        for methods in ((), both):
            rounds(key, options.repeats, methods)


if __name__ == "__main__":
    main()
