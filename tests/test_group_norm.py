"""benchmarks/group_norm: statistics in float32, gradients of the plain layers, kernels against float64 (with a GPU)."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedblur.kernels.fusion import fusing

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SHAPES = [  # clients, batch, channels, groups, height, width
    (2, 5, 64, 32, 32, 32), (2, 5, 128, 32, 16, 16), (3, 4, 256, 32, 8, 8), (2, 3, 512, 32, 4, 4),
    (2, 7, 16, 4, 28, 28), (3, 5, 32, 8, 14, 14), (2, 5, 64, 8, 7, 7), (1, 2, 96, 24, 5, 3), (1, 1, 8, 1, 1, 1),
    (1, 3, 512, 2, 2, 3), (5, 1, 24, 3, 9, 31),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def given(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """x [clients, B, C, H, W], weight, bias and gy; channels differ in their level, as behind a convolution."""
    clients, batch, channels, _, *side = shape
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(clients, batch, channels, *side, generator=dice)
    x += 3 * torch.randn(clients, 1, channels, 1, 1, generator=dice)
    weight, bias = (level + 0.3 * torch.randn(clients, channels, generator=dice) for level in (1.0, 0.0))
    gy = torch.randn(x.shape, generator=dice)
    return [tensor.bfloat16().to(device, dtype) for tensor in (x, weight, bias, gy)]


def passes(groups: int, relu: bool, mode: bool):
    """The output and the three gradients, for a block of clients."""

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = F.group_norm(x, groups, weight, bias)
        return torch.relu(y) if relu else y

    def one(x: Tensor, weight: Tensor, bias: Tensor, gy: Tensor) -> tuple[Tensor, ...]:
        if not mode:
            y, pull_back = vjp(norm, x, weight, bias)
        else:
            from group_norm.layers import WithGroupNorm

            with WithGroupNorm():
                y, pull_back = vjp(norm, x, weight, bias)
        return y, *pull_back(gy)

    return vmap(one)


def errors(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[2] * s[4] <= 1024])
def test_group_norm__gradients_equal_those_of_the_plain_layer(shape: tuple[int, ...], relu: bool) -> None:
    tensors = given(shape, torch.float64)
    found, expected = (passes(shape[3], relu, mode)(*tensors) for mode in (True, False))
    for a, b in zip(found, expected, strict=True):  # a group of one value is zero but for rounding
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_group_norm__in_bf16_rounds_values_and_not_statistics() -> None:
    shape = SHAPES[2]
    expected = passes(shape[3], True, False)(*given(shape, torch.float64))
    ours, torchs = (passes(shape[3], True, mode)(*given(shape, torch.bfloat16)) for mode in (True, False))
    assert max(errors(ours, expected)) < 4e-3  # what rounding the results alone costs
    assert max(errors(torchs, expected)) > 1e-2  # why it is not torch's own under vmap


def test_group_norm__a_relu_behind_it_is_fused_while_a_step_is_traced() -> None:
    tensors = given(SHAPES[2], torch.float64)
    with fusing():
        graph = make_fx(passes(32, True, True), tracing_mode="fake")(*tensors)
    graph.graph.eliminate_dead_code()
    called = [str(node.target) for node in graph.graph.nodes]
    assert called.count("fedblur.client_group_norm.default") == 1
    assert not any("relu" in name or "threshold" in name for name in called)
    for a, b in zip(graph(*tensors), passes(32, True, False)(*tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_group_norm__what_is_not_finite_stays_so(value: float) -> None:
    x, weight, bias, gy = given(SHAPES[2], torch.bfloat16)
    x[1, 2, 3, 0, 0] = value
    y, gx, *_ = passes(32, True, True)(x, weight, bias, gy)
    assert y[1, 2].isnan().any()
    assert gx[1, 2].isnan().any()
    assert y[0].isfinite().all()  # another client's


def test_group_norm__what_the_kernels_cannot_cut_is_torchs_own() -> None:
    from group_norm.ops import covers

    assert not covers(torch.Size((1, 2, 4, 4, 96)), 8)  # groups of 12 channels
    assert covers(torch.Size((1, 2, 4, 4, 96)), 24)
    tensors = given((2, 2, 96, 8, 4, 4), torch.float64)
    found, expected = (passes(8, True, mode)(*tensors) for mode in (True, False))
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernels need a CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("relu", [False, True])
def test_group_norm__kernels_agree_with_float64(shape: tuple[int, ...], relu: bool) -> None:
    assert max(kernel_errors(shape, relu)) < 3e-3


def kernel_errors(shape: tuple[int, ...], relu: bool) -> list[float]:
    found = passes(shape[3], relu, True)(*given(shape, torch.bfloat16, "cuda"))
    expected = passes(shape[3], relu, False)(*given(shape, torch.float64, "cuda"))
    return [float((a.double() - b).norm() / b.norm().clamp(min=1e-3)) for a, b in zip(found, expected, strict=True)]
