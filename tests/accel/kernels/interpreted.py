"""The Triton kernels in Triton's interpreter, which needs no GPU.

    TRITON_INTERPRET=1 python -m tests.accel.kernels.interpreted [PART …]

It runs what the kernels say (places, masks, sums) on a CPU; what a compiler makes of them only a GPU can tell. Prints
the worst relative errors from float64 as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.accel.kernels import test_dense_update, test_triton_conv

CPU, FLOAT = torch.device("cpu"), torch.float32
BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
CONVOLUTIONS = [  # clients, batch, channels, outputs, height, width, kernel, stride, padding, dilation
    (2, 1, 1, 32, 28, 28, (3, 3), (1, 1), (0, 0), (1, 1)),
    (2, 2, 32, 64, 7, 7, (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 2, 16, 16, 17, 23, (1, 1), (2, 1), (2, 0), (1, 1)),
    (2, 1, 3, 16, 31, 29, (5, 3), (1, 1), (0, 1), (1, 2)),
    (1, 1, 20, 33, 14, 15, (3, 3), (2, 2), (2, 2), (1, 1)),
]
POOLED = [  # clients, batch, channels, outputs, height, width, kernel, padding, relu
    (2, 1, 1, 32, 28, 28, (3, 3), (0, 0), True),
    (2, 1, 32, 64, 14, 14, (3, 3), (1, 1), False),
    (1, 2, 2, 5, 20, 20, (2, 3), (1, 1), False),
    (1, 1, 20, 70, 12, 8, (3, 3), (0, 0), False),
]


def convolutions() -> float:
    return max(max(test_triton_conv.errors(case, CPU, FLOAT)) for case in CONVOLUTIONS)


def pooled() -> float:
    return max(max(test_triton_conv.pool_errors(case, CPU, FLOAT)) for case in POOLED)


def relu_and_dropout() -> float:
    return test_triton_conv.dropout_difference(CPU, FLOAT)


def dense_update() -> float:
    """Of Δ and Σ Δ²; the weights are rounded to bf16, which the interpreter does its own way."""
    from fedblur.accel.kernels import triton_dense

    triton_dense._clients_each = lambda delta, tiles: 4
    triton_dense.stages = lambda slope, x, tile: 3
    test_dense_update.client_dense_update = triton_dense.update
    found = [test_dense_update.errors(shape, CPU, FLOAT) for shape in test_dense_update.SHAPES[2:]]
    return max(max(new, squares) for new, _, squares in found)


PARTS: dict[str, Callable[[], Any]] = {
    function.__name__: function for function in (convolutions, pooled, relu_and_dropout, dense_update)
}

if __name__ == "__main__":
    print(json.dumps({name: PARTS[name]() for name in sys.argv[1:] or PARTS}))
