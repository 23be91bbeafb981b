"""A module as a function of one flat vector, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedblur.core.errors import ModelError
from fedblur.learning.model_checks import check_model
from fedblur.learning.module_function import Layout, initial_vector, load_vector


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.scale * self.second(torch.relu(self.first(x)))
        return result


class Constant(nn.Module):
    """A forward that gives what it is told to."""

    def __init__(self, output: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.output = output

    def forward(self, x: Tensor) -> object:
        return self.output


def test_layout__registration_order_and_offsets() -> None:
    layout = Layout.of(small())
    assert layout.names == ("1.weight", "1.bias", "3.weight", "3.bias")
    assert layout.shapes == ((4, 6), (4,), (3, 4), (3,))
    assert layout.offsets == (0, 24, 28, 40)
    assert layout.sizes == (24, 4, 12, 3)
    assert layout.total == 43


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (0,)])
@pytest.mark.parametrize("module", [small(), Tied()], ids=["small", "tied"])
def test_layout__flatten_and_unflatten_are_inverse(lead: tuple[int, ...], module: nn.Module) -> None:
    layout = Layout.of(module)
    vector = torch.randn(*lead, layout.total)
    params = layout.unflatten(vector)
    assert {name: tuple(t.shape) for name, t in params.items()} == {
        name: (*lead, *shape) for name, shape in zip(layout.names, layout.shapes, strict=True)
    }
    assert torch.equal(layout.flatten(params), vector)


def test_layout__unflatten_gives_views_and_flatten_a_copy() -> None:
    layout = Layout.of(small())
    vector = torch.zeros(layout.total)
    params = layout.unflatten(vector)
    vector[24] = 7
    assert float(params["1.bias"][0]) == 7
    flat = layout.flatten(params)
    flat.zero_()
    assert float(vector[24]) == 7


def test_layout__offsets_are_where_flatten_puts_each_tensor() -> None:
    module = small()
    layout, vector = Layout.of(module), initial_vector(module)
    for name, offset, size in zip(layout.names, layout.offsets, layout.sizes, strict=True):
        assert torch.equal(vector[offset : offset + size], module.get_parameter(name).detach().flatten())


def test_layout__modules_groups_tensors_by_owner() -> None:
    assert Layout.of(small()).modules() == {"1": ("1.weight", "1.bias"), "3": ("3.weight", "3.bias")}
    assert Layout.of(Tied()).modules() == {
        "": ("scale",),
        "first": ("first.weight", "first.bias"),
        "second": ("second.bias",),
    }


def test_layout__gradient_of_the_vector_is_the_gradient_of_the_tensors() -> None:
    module = small()
    layout = Layout.of(module)
    x = torch.randn(5, 6)

    def loss(vector: Tensor) -> Tensor:
        result: Tensor = functional_call(module, layout.unflatten(vector), (x,)).square().sum()
        return result

    start = initial_vector(module)
    flat = grad(loss)(start)
    module(x).square().sum().backward()
    expected = layout.flatten({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
    torch.testing.assert_close(flat, expected)
    torch.testing.assert_close(vmap(grad(loss))(start.expand(2, -1)), expected.expand(2, -1))


def test_layout__tied_parameters_are_counted_once_and_stay_tied() -> None:
    module = Tied()
    layout = Layout.of(module)
    assert layout.names == ("scale", "first.weight", "first.bias", "second.bias")
    assert layout.total == 1 + 16 + 4 + 4
    params = layout.unflatten(torch.zeros(layout.total))
    params["first.weight"], params["scale"] = torch.eye(4), torch.tensor(1.0)
    x = torch.rand(2, 4)
    torch.testing.assert_close(functional_call(module, params, (x,)), x)


def test_layout__frozen_parameters_are_constants_outside_the_vector() -> None:
    module = small()
    frozen = module.get_submodule("1").requires_grad_(False)
    before = frozen.get_parameter("weight").clone()
    layout = Layout.of(module)
    assert layout.names == ("3.weight", "3.bias")
    load_vector(module, torch.ones(layout.total))
    assert torch.equal(frozen.get_parameter("weight"), before)
    check_model(module, (6,), 3)


def test_load_vector__round_trip() -> None:
    module = small()
    vector = torch.randn(43)
    load_vector(module, vector)
    assert torch.equal(initial_vector(module), vector)
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("shape", [(42,), (44,), (1, 43), ()])
def test_load_vector__wrong_length_is_refused_and_nothing_is_written(shape: tuple[int, ...]) -> None:
    module = small()
    before = initial_vector(module)
    with pytest.raises(ModelError, match="43 trainable parameters"):
        load_vector(module, torch.ones(shape))
    assert torch.equal(initial_vector(module), before)


def test_initial_vector__is_a_detached_float32_copy() -> None:
    module = nn.Linear(3, 2, bias=False)
    before = module.weight.detach().clone()
    vector = initial_vector(module)
    assert vector.dtype == torch.float32
    assert not vector.requires_grad
    vector.zero_()
    assert torch.equal(module.weight, before)
