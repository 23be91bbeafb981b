"""What is refused before anything is spent: by the name of the layer, and the model stays as it was."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedblur.core.errors import ModelError
from fedblur.learning.model_checks import check_model, constants_digest, for_training
from fedblur.learning.module_function import choose_trainable, initial_vector, trainable_tensors
from tests.learning.test_module_function import Constant, small


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


class Traced(nn.Module):
    """A linear layer with a trace of what it saw, or a constant."""

    def __init__(self, change: Callable[[nn.Module, Tensor], object], persistent: bool = True) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(6, 3), change
        self.register_buffer("counter", torch.zeros(1), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.change(self, x)
        logits: Tensor = self.linear(x) + self.counter
        return logits


@pytest.mark.parametrize("persistent", [True, False])
def test_check_model__buffers_that_change_in_training_are_refused_by_name(persistent: bool) -> None:
    def count(layer: nn.Module, x: Tensor) -> None:
        layer.counter += x.detach().mean()

    module = nn.Sequential(nn.Flatten(), Traced(count, persistent))
    with pytest.raises(ModelError, match=r"1 \(Traced\) changes its buffer 'counter' in training.*a constant or a"):
        check_model(module, (6,), 3)
    assert float(module[1].counter) == 0
    check_model(nn.Sequential(nn.Flatten(), Traced(lambda layer, x: None, persistent)), (6,), 3)


def test_check_model__norms_with_statistics_pass_where_these_are_constants() -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
    module[1].eval()
    check_model(module, (1, 8, 8), 3)
    trained = for_training(module.eval())  # as pre-trained models come
    assert [layer.training for layer in trained] == [True, False, True, True]


def test_for_training__keeps_layers_that_are_in_eval_on_purpose() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)).train()
    module[1].eval()
    assert [layer.training for layer in for_training(module)] == [True, False]
    assert [layer.training for layer in for_training(module.eval())] == [True, True]


class Disturbed(nn.Module):
    """Two layers; the second draws in a way of its own."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), Draws(draw)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(self.first(x))
        return logits


class Draws(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.draw(self.linear(x))
        return logits


OWN = torch.Generator().manual_seed(0)
COUNT = iter(range(1000))
FOREIGN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "multinomial": (lambda x: x * torch.multinomial(torch.ones(3), 3), "draws from torch's global generator"),
    "poisson": (lambda x: x * torch.poisson(torch.ones_like(x)), "draws from torch's global generator"),
    "random": (lambda x: x * random.random(), "draws from Python's random"),
    "numpy": (lambda x: x * float(np.random.rand()), "draws from NumPy's global generator"),
    "a generator of its own": (lambda x: x * torch.poisson(torch.full((3,), 9.0), generator=OWN), "two outputs"),
    "a counter": (lambda x: x * next(COUNT), "two outputs"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_check_model__draws_that_cannot_be_seeded_are_refused_by_the_layers_name(name: str) -> None:
    draw, why = FOREIGN[name]
    module = Disturbed(draw)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(ModelError, match=rf"^second \(Draws\).*{why}"):
        check_model(module, (6,), 3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_check_model__draws_that_are_seeded_pass() -> None:
    check_model(Disturbed(lambda x: x * torch.rand(3) + torch.randn_like(x)), (6,), 3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_check_model__checkpointing_is_refused(reentrant: bool) -> None:
    """It would draw other masks when it computes a layer again, and nothing would show that."""
    drop = nn.Dropout(0.5)
    module = Disturbed(lambda x: checkpoint(drop, x, use_reentrant=reentrant) if torch.is_grad_enabled() else x)
    with pytest.raises(ModelError, match="a training step of the model fails: .*checkpoint"):
        check_model(module, (6,), 3)


def test_check_model__a_frozen_parameter_that_the_model_changes_is_refused() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.student.weight.detach(), 0.1)
            logits: Tensor = self.student(x) + self.teacher(x)
            return logits

    with pytest.raises(ModelError, match=r"parameter teacher\.weight is changed by the model itself"):
        check_model(Teacher(), (6,), 3)


def test_check_model__takes_the_logits_of_an_object_that_has_them() -> None:
    class Output:
        def __init__(self, **fields: Tensor) -> None:
            self.__dict__.update(fields)

    class Wrapped(nn.Module):
        def __init__(self, field: str) -> None:
            super().__init__()
            self.linear, self.field = nn.Linear(6, 3), field

        def forward(self, x: Tensor) -> Output:
            return Output(**{self.field: self.linear(x)})

    assert tuple(check_model(Wrapped("logits"), (6,), 3).shape) == (2, 3)
    with pytest.raises(ModelError, match=r"returns a Output: .* or an object that has one as \.logits"):
        check_model(Wrapped("last_hidden_state"), (6,), 3)


def test_constants_digest__is_of_what_is_not_trained() -> None:
    module = small()
    assert constants_digest(module) == ""
    module.get_submodule("1").requires_grad_(False)
    module.register_buffer("table", torch.arange(3), persistent=False)
    seen = {constants_digest(module)}
    with torch.no_grad():
        module.get_parameter("3.weight").add_(1)  # trained
        assert constants_digest(module) in seen
        module.get_parameter("1.weight")[0, 0] += 1e-6
        seen.add(constants_digest(module))
        module.get_buffer("table")[0] = 7
        seen.add(constants_digest(module))
    assert len(seen) == 3


def test_choose_trainable__freezes_all_that_no_pattern_matches() -> None:
    module = small()
    choose_trainable(module, ["3.*", "*.bias"])
    assert list(trainable_tensors(module)) == ["1.bias", "3.weight", "3.bias"]
    with pytest.raises(ModelError, match=r"trainable='3\.wieght' matches no parameter.*did you mean '3\.weight'"):
        choose_trainable(module, ["3.*", "3.wieght"])
    with pytest.raises(ModelError, match="known: 1.bias"):
        choose_trainable(module, ["*.lora_*"])


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
    with pytest.raises(ModelError, match="returns a tuple: it must return one tensor of logits, or"):
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
