"""The Triton kernels against float64, on random shapes, strides and paddings; skipped by name where there is no GPU."""

import random

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu


def model_cases() -> list[tuple]:
    """The convolutions of our own models: channels, outputs, side, kernel, stride, padding."""
    shapes = [
        (1, 32, 28, 3, 1, 0), (32, 64, 13, 3, 1, 0), (32, 64, 26, 3, 1, 0), (3, 32, 32, 3, 1, 0), (32, 64, 15, 3, 1, 0),
        (1, 16, 28, 3, 1, 1), (16, 32, 14, 3, 1, 1), (32, 64, 7, 3, 1, 1), (32, 64, 14, 3, 1, 1), (64, 96, 7, 3, 1, 1),
        (1, 24, 28, 5, 2, 2), (24, 32, 14, 3, 2, 1), (24, 32, 28, 3, 2, 1), (32, 64, 16, 3, 2, 1), (64, 64, 8, 3, 1, 1),
        (3, 64, 32, 3, 1, 1), (64, 64, 32, 3, 1, 1), (64, 128, 32, 3, 2, 1), (128, 128, 16, 3, 1, 1),
        (128, 256, 16, 3, 2, 1), (256, 256, 8, 3, 1, 1), (256, 512, 8, 3, 2, 1), (512, 512, 4, 3, 1, 1),
        (64, 128, 32, 1, 2, 0), (128, 256, 16, 1, 2, 0), (256, 512, 8, 1, 2, 0),
    ]  # fmt: skip
    return [(2, 20, c, o, side, side, (k, k), (s, s), (p, p), (1, 1)) for c, o, side, k, s, p in shapes]


def cases(count: int) -> list[tuple]:
    dice = random.Random(0)
    chosen = model_cases()
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


def last(t: torch.Tensor) -> torch.Tensor:
    return t.permute(0, 1, 3, 4, 2).contiguous()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def errors(case: tuple, device: torch.device, dtype: torch.dtype) -> list[float]:
    """Relative errors of forward, input gradient, weight gradient and bias gradient."""
    from fedblur.accel.kernels import triton_conv
    from fedblur.accel.kernels.geometry import Geometry

    clients, batch, channels, outputs, height, width, kernel, stride, padding, dilation = case
    g = Geometry(clients, batch, channels, height, width, outputs, kernel, stride, padding, dilation)
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

    gw, gb = triton_conv.weight_grad(last(gy), last(x), g)
    results = (triton_conv.forward(last(x), last(w), bias, g), triton_conv.input_grad(last(gy), last(w), g), gw)
    expected = (y.detach(), xd.grad, wd.grad)
    found = [relative(got.permute(0, 1, 4, 2, 3), want) for got, want in zip(results, expected, strict=True)]
    return [*found, relative(gb, gy.double().sum((1, 3, 4)))]


def pool_cases(count: int) -> list[tuple]:
    dice = random.Random(1)
    chosen = [
        (2, 20, 1, 32, 28, 28, (3, 3), (0, 0), True), (2, 20, 32, 64, 26, 26, (3, 3), (0, 0), True),
        (2, 20, 3, 32, 32, 32, (3, 3), (0, 0), True), (2, 20, 1, 32, 28, 28, (3, 3), (1, 1), False),
        (2, 20, 32, 64, 14, 14, (3, 3), (1, 1), False), (2, 20, 64, 96, 8, 8, (3, 3), (1, 1), False),
    ]  # fmt: skip
    for _ in range(count):
        channels = dice.choice([1, 2, 3, 16, 20, 64])
        kernel = (3, 3) if channels == 3 else dice.choice([(3, 3), (1, 1), (2, 3)])
        sides = dice.randint(7, 20), dice.randint(8, 20)
        chosen.append(
            (dice.randint(1, 4), dice.randint(1, 9), channels, dice.choice([5, 16, 33, 64, 70]), *sides, kernel,
             dice.choice([(0, 0), (1, 1), (1, 0)]), dice.choice([True, False]))
        )  # fmt: skip
    return chosen


def pool_errors(case: tuple, device: torch.device, dtype: torch.dtype) -> list[float]:
    """Relative errors of a pooled convolution: forward, and the gradients by input, weights and bias."""
    from fedblur.accel.kernels import triton_conv_pool
    from fedblur.accel.kernels.geometry import Geometry

    clients, batch, channels, outputs, height, width, kernel, padding, relu = case
    g = Geometry(clients, batch, channels, height, width, outputs, kernel, (1, 1), padding, (1, 1))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(clients, batch, channels, height, width, generator=generator).to(device, dtype)
    w = torch.randn(clients, outputs, channels, *kernel, generator=generator).to(device, dtype)
    bias = torch.randn(clients, outputs, generator=generator).to(device, dtype)
    leaves = [t.double().requires_grad_() for t in (x, w, bias)]
    layers = [F.max_pool2d(F.conv2d(a, b, c, 1, padding), 2) for a, b, c in zip(*leaves, strict=True)]
    y = torch.stack(layers).relu() if relu else torch.stack(layers)
    gy = torch.randn(y.shape, generator=generator).to(device, dtype)
    (y * gy.double()).sum().backward()
    got, where = triton_conv_pool.forward(last(x), last(w), bias, g, relu)
    gx = triton_conv_pool.input_grad(last(gy), where, last(w), g)
    gw, gb = triton_conv_pool.weight_grad(last(gy), where, last(x), g)
    found = [
        relative(a.permute(0, 1, 4, 2, 3), b)
        for a, b in zip((got, gx, gw), (y.detach(), leaves[0].grad, leaves[1].grad), strict=True)
    ]
    return [*found, relative(gb, leaves[2].grad)]


def dropout_difference(device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative difference of convolution + ReLU + dropout and its gradient from torch's own operations."""
    from fedblur.accel.kernels import triton_common, triton_conv
    from fedblur.accel.kernels.geometry import Geometry
    from fedblur.accel.kernels.operators import relu_dropout
    from fedblur.core.hashing import threshold

    g = Geometry(3, 4, 16, 13, 15, 70, (3, 3), (1, 1), (0, 0), (1, 1))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 4, 16, 13, 15, generator=generator).to(device, dtype)
    w = torch.randn(3, 70, 16, 3, 3, generator=generator).to(device, dtype)
    keys = torch.randint(-(2**31), 2**31, (3,), generator=generator).to(device, torch.int32)
    leaf = torch.stack([F.conv2d(a, b) for a, b in zip(x.double(), w.double(), strict=True)]).requires_grad_()
    y = torch.stack([relu_dropout(one, key, 0.3) for one, key in zip(leaf, keys, strict=True)])
    gy = torch.randn(y.shape, generator=generator).to(device, dtype)
    (y * gy.double()).sum().backward()
    got = triton_conv.forward(last(x), last(w), None, g, triton_conv.Dropout(keys, threshold(0.3), 1 / 0.7))
    gx = triton_common.relu_dropout_grad(gy, got, 1 / 0.7).permute(0, 1, 4, 2, 3)
    return max(relative(got, y.detach()), relative(gx, leaf.grad))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernels need a CUDA device")
@pytest.mark.parametrize("case", cases(30), ids=str)
def test_triton_conv__agrees_with_float64(case: tuple) -> None:
    assert max(errors(case, torch.device("cuda"), torch.bfloat16)) < 3e-3  # bf16 has 8 bits


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernels need a CUDA device")
def test_triton_conv__a_repeated_weight_gradient_has_the_same_bits() -> None:
    from fedblur.accel.kernels.geometry import Geometry
    from fedblur.accel.kernels.triton_conv import weight_grad

    g = Geometry(4, 64, 1, 28, 28, 32, (3, 3), (1, 1), (0, 0), (1, 1))
    x = torch.randn(4, 64, 28, 28, 1, device="cuda").bfloat16()
    gy = torch.randn(4, 64, 26, 26, 32, device="cuda").bfloat16()
    first, second = weight_grad(gy, x, g), weight_grad(gy, x, g)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernels need a CUDA device")
@pytest.mark.parametrize("case", pool_cases(20), ids=str)
def test_triton_conv_pool__agrees_with_float64(case: tuple) -> None:
    # A near tie that rounding decides the other way moves a whole gradient, hence the wider bound.
    forward, *gradients = pool_errors(case, torch.device("cuda"), torch.bfloat16)
    assert forward < 3e-3
    assert max(gradients) < 3e-2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernels need a CUDA device")
def test_triton_relu_dropout__has_the_masks_of_the_other_engines() -> None:
    assert dropout_difference(torch.device("cuda"), torch.bfloat16) < 3e-3
