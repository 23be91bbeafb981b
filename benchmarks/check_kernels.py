"""The Triton kernels against float64 without pytest, for a GPU machine that has none: prints the worst errors.

    python benchmarks/check_kernels.py [--processes 8]

Compiling takes most of the time, so the cases are shared out among processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

Errors = list[list[float]]


def check(part: int, processes: int) -> tuple[Errors, Errors, float]:
    from tests.accel.kernels.test_triton_conv import cases, dropout_difference, errors, pool_cases, pool_errors

    cuda, half = torch.device("cuda"), torch.bfloat16
    plain = [errors(case, cuda, half) for case in cases(60)[part::processes]]
    pooled = [pool_errors(case, cuda, half) for case in pool_cases(30)[part::processes]]
    return plain, pooled, dropout_difference(cuda, half)


def worst(rows: Errors) -> list[float]:
    return [max(column) for column in zip(*rows, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    count = parser.parse_args().processes
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        shares = pool.starmap(check, [(part, count) for part in range(count)])
    plain = worst([row for share in shares for row in share[0]])
    pooled = worst([row for share in shares for row in share[1]])
    dropped = max(share[2] for share in shares)
    names = "forward, gradients by input, weights and bias"
    print(f"86 convolutions, worst relative error ({names}):", [f"{value:.1e}" for value in plain])
    print(f"36 pooled convolutions ({names}):", [f"{value:.1e}" for value in pooled])
    print(f"convolution + ReLU + dropout: {dropped:.1e}")
    from tests.accel.kernels.test_dense_update import SHAPES
    from tests.accel.kernels.test_dense_update import errors as dense_errors
    from tests.privacy.test_clip_on_device import clip_faults

    dense = worst([dense_errors(shape, torch.device("cuda"), torch.bfloat16) for shape in SHAPES])
    print("dense updates (Δ, bf16 weights, Σ Δ²):", [f"{value:.1e}" for value in dense])

    faults = clip_faults(torch.device("cuda"))
    print("clip:", faults or "every row within S in float64, short rows unchanged bit for bit, bad rows zero")
    # A near tie in a pooling window that rounding decides the other way moves a whole gradient.
    if max(*plain, pooled[0], dropped) > 3e-3 or max(pooled) > 3e-2 or max(dense) > 4e-3 or faults:
        sys.exit("the kernels do not agree with float64")


if __name__ == "__main__":
    main()
