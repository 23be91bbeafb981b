"""The Triton kernels against float64 without pytest, for a GPU machine that has none: prints the worst errors."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    from tests.kernels.test_triton_conv import cases, dropout_difference, errors, pool_cases, pool_errors

    cuda, half = torch.device("cuda"), torch.bfloat16
    plain = [max(each) for each in zip(*(errors(case, cuda, half) for case in cases(20)), strict=True)]
    pooled = [max(each) for each in zip(*(pool_errors(case, cuda, half) for case in pool_cases(14)), strict=True)]
    dropped = dropout_difference((3, 4, 70, 11, 13), cuda, half)
    names = "forward, gradients by input, weights and bias"
    print(f"worst relative error of convolutions ({names}):", [f"{value:.1e}" for value in plain])
    print(f"worst relative error of pooled convolutions ({names}):", [f"{value:.1e}" for value in pooled])
    print(f"ReLU + dropout: {dropped:.1e}")
    # A near tie in a pooling window that rounding decides the other way moves a whole gradient.
    if max(*plain, pooled[0], dropped) > 3e-3 or max(pooled) > 3e-2:
        sys.exit("the kernels do not agree with float64")


if __name__ == "__main__":
    main()
