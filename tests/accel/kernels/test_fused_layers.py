"""Layers fused with a convolution: the traced program has them, and its gradients are those of the plain layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedblur.accel.kernels.fused_layers import PerClientLayers, fusing
from fedblur.learning.randomness import SeededRandomness

CLIENTS, BATCH = 3, 4


def conv(padding: int = 0, bias: bool = True, outputs: int = 5, inputs: int = 2) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=padding, bias=bias)


STACKS = {
    "conv pool relu": ([conv(), nn.MaxPool2d(2), nn.ReLU()], {"client_conv_pool"}),
    "conv relu pool": ([conv(), nn.ReLU(), nn.MaxPool2d(2)], {"client_conv_pool"}),
    "conv pool norm": ([conv(1, bias=False), nn.MaxPool2d(2, 2), nn.GroupNorm(1, 5)], {"client_conv_pool"}),
    "two of them": (
        [conv(1, outputs=16), nn.MaxPool2d(2), nn.ReLU(), conv(inputs=16), nn.MaxPool2d(2)],
        {"client_conv_pool", "client_conv_pool_input_grad"},
    ),
    "conv relu dropout": (
        [conv(), nn.ReLU(), nn.Dropout(0.25)],
        {"client_conv_relu_dropout", "client_relu_dropout_grad"},
    ),
    "relu in place is left alone": ([conv(), nn.ReLU(inplace=True), nn.MaxPool2d(2)], {"client_conv"}),
    "another window is left alone": ([conv(), nn.MaxPool2d(3, 2)], {"client_conv"}),
    "a strided convolution is left alone": ([nn.Conv2d(2, 5, 3, 2), nn.MaxPool2d(2)], {"client_conv"}),
}


@pytest.fixture(autouse=True)
def _in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def stacked(layers: list[nn.Module]) -> tuple[nn.Module, dict[str, Tensor], Tensor, Tensor]:
    torch.manual_seed(0)
    features = nn.Sequential(*layers).double()
    x = torch.randn(CLIENTS, BATCH, 2, 11, 9)
    width = features(x[0]).flatten(1).shape[1]
    module = nn.Sequential(features, nn.Flatten(), nn.Linear(width, 3))
    theta = {name: torch.randn(CLIENTS, *p.shape) for name, p in module.named_parameters()}
    return module, theta, x, torch.arange(CLIENTS) + 100


def gradients_of(module: nn.Module, mode: bool):
    def loss(theta: dict[str, Tensor], x: Tensor, seed: Tensor) -> Tensor:
        with SeededRandomness(seed, 7):
            if not mode:
                return F.cross_entropy(functional_call(module, theta, (x,)), torch.arange(BATCH) % 3)
            with PerClientLayers():
                return F.cross_entropy(functional_call(module, theta, (x,)), torch.arange(BATCH) % 3)

    return vmap(grad(loss, argnums=(0, 1)))


@pytest.mark.parametrize("name", STACKS)
def test_fused_layers__gradients_equal_those_of_the_plain_layers(name: str) -> None:
    layers, wanted = STACKS[name]
    module, theta, x, seeds = stacked(layers)
    with fusing():
        graph = make_fx(gradients_of(module, True), tracing_mode="fake", _allow_non_fake_inputs=True)(theta, x, seeds)
    graph.graph.eliminate_dead_code()
    called = {str(node.target).split(".")[1] for node in graph.graph.nodes if str(node.target).startswith("fedblur.")}
    assert wanted <= called
    assert ("client_conv_pool" in called) == ("client_conv_pool" in wanted)
    if not wanted & {"client_conv"}:
        assert "client_conv" not in called  # the unfused convolution is not computed beside it
    got, expected = graph(theta, x, seeds), gradients_of(module, False)(theta, x, seeds)
    torch.testing.assert_close(got, expected)


def test_fused_layers__nothing_is_noted_outside_of_tracing() -> None:
    module, theta, x, seeds = stacked(STACKS["conv pool relu"][0])
    torch.testing.assert_close(
        gradients_of(module, True)(theta, x, seeds), gradients_of(module, False)(theta, x, seeds)
    )
