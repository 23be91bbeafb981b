"""A module as a function of one flat vector, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedblur.core.errors import ModelError
from fedblur.learning.module_function import Layout, check_model, initial_vector, load_vector


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


def test_check_model__accepts_and_leaves_the_module_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3)).train()
    module[1].eval()
    before = initial_vector(module)
    check_model(module, (6,), 3)
    assert [layer.training for layer in module] == [True, False, True]
    assert torch.equal(initial_vector(module), before)


BATCH_NORM = "running statistics are client data outside the clip"


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm2d(4), f"replace features.1 (BatchNorm2d) by nn.GroupNorm: {BATCH_NORM}"),
        (nn.SyncBatchNorm(4), f"replace features.1 (SyncBatchNorm) by nn.GroupNorm: {BATCH_NORM}"),
        (nn.LazyBatchNorm2d(), f"replace features.1 (LazyBatchNorm2d) by nn.GroupNorm: {BATCH_NORM}"),
        (
            nn.InstanceNorm2d(4, track_running_stats=True),
            f"replace features.1 (InstanceNorm2d) by nn.GroupNorm: {BATCH_NORM}",
        ),
        (
            nn.BatchNorm2d(4, track_running_stats=False),
            "replace features.1 (BatchNorm2d) by nn.GroupNorm: batch statistics would mix samples and padding",
        ),
    ],
)
def test_check_model__norms_with_statistics_are_refused_by_name(layer: nn.Module, message: str) -> None:
    module = nn.Module()
    module.features = nn.Sequential(nn.Conv2d(1, 4, 3), layer)
    with pytest.raises(ModelError) as caught:
        check_model(module, (1, 8, 8), 3)
    assert str(caught.value) == message


@pytest.mark.parametrize("persistent", [True, False])
def test_check_model__any_other_buffer_is_refused_by_name(persistent: bool) -> None:
    module = small()
    module[3].register_buffer("counter", torch.zeros(1), persistent=persistent)
    with pytest.raises(ModelError, match=r"3 \(Linear\) has a buffer 'counter'.*a constant or a parameter"):
        check_model(module, (6,), 3)


def test_check_model__group_norm_and_plain_instance_norm_pass() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(144, 3)
    )
    check_model(module, (1, 8, 8), 3)


def test_check_model__without_trainable_parameters() -> None:
    for module in (nn.Flatten(), small().requires_grad_(False)):
        with pytest.raises(ModelError, match="no trainable parameters: set requires_grad=True"):
            check_model(module, (3,), 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("frozen", [False, True])
def test_check_model__non_finite_parameters(value: float, frozen: bool) -> None:
    module = small()
    bias = module.get_parameter("1.bias").requires_grad_(not frozen)
    bias.data[2] = value
    with pytest.raises(ModelError, match=r"parameter 1\.bias has NaN or infinite values"):
        check_model(module, (6,), 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_check_model__only_float32_is_trained(dtype: torch.dtype) -> None:
    module = small().to(dtype)
    with pytest.raises(ModelError, match=rf"parameter 1\.weight is {dtype}.*call model\.float\(\)"):
        check_model(module, (6,), 3)
    check_model(module.float(), (6,), 3)


def test_check_model__lazy_parameters() -> None:
    module = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    with pytest.raises(ModelError, match=r"parameter 1\.weight has no shape yet \(lazy module\)"):
        check_model(module, (6,), 3)
    module(torch.zeros(1, 6))
    check_model(module, (6,), 3)


def test_check_model__output_that_does_not_fit_names_both_shapes() -> None:
    with pytest.raises(ModelError, match=r"2 samples has shape \(2, 3\), but classes=10: it must be \(2, 10\)"):
        check_model(small(), (6,), 10)


def test_check_model__input_that_does_not_fit_is_one_line() -> None:
    with pytest.raises(ModelError, match=r"cannot read samples of shape \(1, 8, 8\): ") as caught:
        check_model(small(), (1, 8, 8), 3)
    assert "\n" not in str(caught.value)


def test_check_model__output_that_is_no_tensor() -> None:
    with pytest.raises(ModelError, match="returns a tuple: it must return one tensor of logits"):
        check_model(Constant((torch.zeros(2, 3), None)), (6,), 3)


def test_check_model__recurrent_models_pass() -> None:
    class LastStep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(5, 8, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.lstm(x)[0][:, -1])
            return result

    check_model(LastStep(), (7, 5), 3)
