"""Layers for one client on a core: torch's values and gradients in any layout, and torch's own path for the rest."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.engines.workers import channels_last
from fedblur.kernels import single
from fedblur.kernels.single import SingleClientLayers


def gradients(function, *tensors: Tensor) -> list[Tensor]:
    """The output, then the gradients of a sum with fixed weights."""
    leaves = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in tensors]
    output = function(*leaves)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return [output.detach(), *torch.autograd.grad(output, leaves, weights)]


def compare(function, *tensors: Tensor) -> None:
    """With the layers against without them in float64."""
    with SingleClientLayers():
        got = gradients(function, *tensors)
    expected = gradients(function, *(tensor.double() for tensor in tensors))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def applied(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    calls: list[int] = []
    kernel = getattr(single, name)
    whole = kernel.apply
    monkeypatch.setattr(kernel, "apply", lambda *args: calls.append(1) or whole(*args))
    return calls


@pytest.mark.parametrize("layout", [channels_last, lambda tensor: tensor], ids=["nhwc", "nchw"])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"), [(1, 0, 1, 1), (2, (1, 0), 1, 1), (1, 2, 2, 1), (1, 1, 1, 3)]
)
def test_single__convolutions_are_torchs(layout, stride, padding, dilation, groups, monkeypatch) -> None:
    torch.manual_seed(0)
    calls = applied(monkeypatch, "_Convolution")
    x, weight, bias = layout(torch.randn(4, 6, 11, 9)), layout(torch.randn(9, 6 // groups, 3, 3)), torch.randn(9)
    compare(lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation, groups), x, weight, bias)
    assert len(calls) == 1  # float64 takes torch's own path


@pytest.mark.parametrize("bias", [True, False])
def test_single__dense_layers_are_torchs(bias, monkeypatch) -> None:
    torch.manual_seed(0)
    calls = applied(monkeypatch, "_Dense")
    for width in (700, 6):  # few weights are not worth the choice of a kernel
        compare(F.linear, torch.randn(5, width), torch.randn(100, width), *([torch.randn(100)] if bias else []))
    assert len(calls) == int(single._has_onednn())


def test_single__what_is_not_covered_is_torchs() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 6, 8, 8), torch.randn(9, 6, 3, 3), torch.randn(9)
    with SingleClientLayers():
        assert torch.equal(F.conv2d(x, weight), torch.conv2d(x, weight))
        assert torch.equal(F.conv2d(x[0], weight, bias), torch.conv2d(x[0], weight, bias))
        assert torch.equal(F.conv2d(x, weight, bias, padding="same"), torch.conv2d(x, weight, bias, padding="same"))
        assert F.linear(torch.randn(2, 3, 700), torch.randn(100, 700)).shape == (2, 3, 100)


@pytest.mark.parametrize(
    "flatten",
    [lambda x: x.flatten(1), lambda x: torch.flatten(x, start_dim=1), torch.nn.Flatten()],
    ids=["method", "function", "module"],
)
def test_single__flattened_features_get_gradients_in_their_own_layout(flatten, monkeypatch) -> None:
    torch.manual_seed(0)
    calls = applied(monkeypatch, "_Flat")
    x = channels_last(torch.randn(4, 6, 5, 3))
    compare(lambda x: flatten(x.relu()) ** 2, x)
    assert len(calls) == 1  # only within the context
    seen: list[Tensor] = []
    with SingleClientLayers():
        features = x.requires_grad_() * 1.0
        features.register_hook(seen.append)
        flatten(features).sum().backward()
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_single__other_flattenings_are_torchs(monkeypatch) -> None:
    calls = applied(monkeypatch, "_Flat")
    x = channels_last(torch.randn(4, 6, 5, 3))
    with SingleClientLayers():
        assert x.flatten().shape == (360,)
        assert x.flatten(2).shape == (4, 6, 15)
        assert torch.flatten(x, end_dim=1).shape == (24, 5, 3)
        assert x.contiguous().flatten(1).shape == (4, 90)
        assert x[0].flatten(1).shape == (6, 15)
    assert not calls
