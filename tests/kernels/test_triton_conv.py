"""The Triton kernels against float64, on random shapes, strides and paddings; skipped by name where there is no GPU."""

import random

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu


def cases(count: int) -> list[tuple]:
    dice = random.Random(0)
    chosen = []
    for _ in range(count):
        kernel = dice.choice([(3, 3), (1, 1), (5, 3), (7, 7)])
        chosen.append(
            (
                dice.randint(1, 5), dice.randint(1, 9),
                dice.choice([1, 3, 16, 20, 64, 130]), dice.choice([5, 16, 33, 64, 200]),
                dice.randint(14, 33), dice.randint(15, 33), kernel,
                dice.choice([(1, 1), (2, 2), (2, 1)]), dice.choice([(0, 0), (1, 1), (2, 0)]),
                dice.choice([(1, 1), (1, 2)]),
            )
        )  # fmt: skip
    return chosen


def errors(case: tuple, device: torch.device, dtype: torch.dtype) -> list[float]:
    """Relative errors of forward, input gradient and weight gradient."""
    from fedblur.kernels import triton_conv

    clients, batch, channels, outputs, height, width, kernel, stride, padding, dilation = case
    g = triton_conv.Geometry(clients, batch, channels, height, width, outputs, kernel, stride, padding, dilation)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(clients, batch, channels, height, width, generator=generator).to(device, dtype)
    w = torch.randn(clients, outputs, channels, *kernel, generator=generator).to(device, dtype)
    bias = torch.randn(clients, outputs, generator=generator).to(device, dtype)
    xd, wd = x.double().requires_grad_(), w.double().requires_grad_()
    y = torch.stack(
        [F.conv2d(a, b, c, stride, padding, dilation) for a, b, c in zip(xd, wd, bias.double(), strict=True)]
    )
    gy = torch.randn(y.shape, generator=generator).to(device, dtype)
    (y * gy.double()).sum().backward()

    def last(t):
        return t.permute(0, 1, 3, 4, 2).contiguous()

    results = (
        triton_conv.forward(last(x), last(w), bias, g),
        triton_conv.input_grad(last(gy), last(w), g),
        triton_conv.weight_grad(last(gy), last(x), g),
    )
    expected = (y.detach(), xd.grad, wd.grad)
    return [
        float((got.permute(0, 1, 4, 2, 3).double() - want).norm() / want.norm())
        for got, want in zip(results, expected, strict=True)
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernels need a CUDA device")
@pytest.mark.parametrize("case", cases(30), ids=str)
def test_triton_conv__agrees_with_float64(case: tuple) -> None:
    assert max(errors(case, torch.device("cuda"), torch.bfloat16)) < 3e-3  # bf16 has 8 bits


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernels need a CUDA device")
def test_triton_conv__a_repeated_weight_gradient_has_the_same_bits() -> None:
    from fedblur.kernels import triton_conv

    g = triton_conv.Geometry(4, 64, 1, 28, 28, 32, (3, 3), (1, 1), (0, 0), (1, 1))
    x = torch.randn(4, 64, 28, 28, 1, device="cuda").bfloat16()
    gy = torch.randn(4, 64, 26, 26, 32, device="cuda").bfloat16()
    assert torch.equal(triton_conv.weight_grad(gy, x, g), triton_conv.weight_grad(gy, x, g))
