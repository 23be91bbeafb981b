"""The Triton kernels against float64 without pytest, for a GPU machine that has none: prints the worst errors."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    from tests.kernels.test_triton_conv import cases, errors

    worst = [0.0, 0.0, 0.0]
    for case in cases(30):
        worst = [max(a, b) for a, b in zip(worst, errors(case, torch.device("cuda"), torch.bfloat16), strict=True)]
    print("worst relative error (forward, input gradient, weight gradient):", [f"{value:.1e}" for value in worst])
    if max(worst) > 3e-3:
        sys.exit("the kernels do not agree with float64")


if __name__ == "__main__":
    main()
