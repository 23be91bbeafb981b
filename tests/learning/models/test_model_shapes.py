"""Parameter counts of the method brief, and which shapes fit which model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedblur.core import registry
from fedblur.core.errors import ConfigError, ModelError
from fedblur.learning.model_checks import check_model
from fedblur.learning.models import CharMlp, Cnn, GnCnn, GnResNet, Logistic, Mlp, Model, ResNet18, make_model
from fedblur.learning.models.gn_resnet import Wavelets
from fedblur.learning.module_function import Layout
from fedblur.training.checks import reads_text

EMNIST = ((1, 28, 28), 62)
CIFAR = ((3, 32, 32), 10)
DIGITS = ((1, 8, 8), 10)

COUNTS = [
    (Cnn(variant="a"), *EMNIST, 1_206_590),
    (Cnn(variant="b"), *EMNIST, 1_018_174),
    (Cnn(), *EMNIST, 1_018_174),
    (Cnn(variant="a"), *CIFAR, 1_626_442),
    (Cnn(variant="b"), *CIFAR, 1_405_258),
    (Cnn(variant="b", second_pool=True), *CIFAR, 315_722),
    (ResNet18(), *CIFAR, 11_173_962),
    (ResNet18(), *EMNIST, 11_199_486),
    (GnCnn(), *EMNIST, 39_454),
    (GnCnn(), *CIFAR, 98_826),
    (GnCnn(widths=(32, 64, 96), pool_first=True), *EMNIST, 98_462),
    (GnCnn(pooling="global"), *EMNIST, 39_454 - 3 * 64 * 62),
    (GnResNet(), *EMNIST, 91_206),
    (GnResNet(standardise=True, head_scale=0.5), *EMNIST, 91_206),
    (GnResNet(front="wavelets"), *EMNIST, 91_206 - 25 * 24 + 17 * 24),
    (CharMlp(), (8,), 36, 36 * 8 + 64 * 64 + 64 + 64 * 36 + 36),
    (Logistic(), *EMNIST, 784 * 62 + 62),
    (Logistic(), (64,), 10, 650),
    (Mlp(hidden=(32,)), (64,), 10, 64 * 32 + 32 + 32 * 10 + 10),
    (Mlp(hidden=(200, 100)), *EMNIST, 784 * 200 + 200 + 200 * 100 + 100 + 100 * 62 + 62),
]


@pytest.mark.parametrize(("part", "shape", "classes", "count"), COUNTS)
def test_model__parameter_count_is_the_published_one(
    part: Model, shape: tuple[int, ...], classes: int, count: int
) -> None:
    assert Layout.of(make_model(part, shape, classes, seed=0)).total == count


def test_resnet18__has_62_trainable_tensors() -> None:
    assert len(Layout.of(make_model(ResNet18(), *CIFAR, seed=0)).names) == 62


@pytest.mark.parametrize("name", sorted(registry.parts("model")))
def test_model__every_registered_one_passes_the_check_on_digits(name: str) -> None:
    part = registry.build("model", name)
    form = ((8,), 36) if reads_text(part) else DIGITS  # windows of characters, for models that read text
    check_model(make_model(part, *form, seed=0), *form)


@pytest.mark.parametrize("part", [Logistic(), Mlp()])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 8, 8), (2, 3, 4, 5)])
def test_dense_models__fit_any_shape(part: Model, shape: tuple[int, ...]) -> None:
    check_model(make_model(part, shape, 3, seed=0), shape, 3)


@pytest.mark.parametrize("part", [Logistic(), Mlp()])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_dense_models__a_sample_without_values_is_refused(part: Model, shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=r"holds no features"):
        part.build(shape, 3)


@pytest.mark.parametrize("part", [Cnn(), GnCnn(), GnResNet(), ResNet18()])
@pytest.mark.parametrize("shape", [(64,), (8, 8), (1, 1, 8, 8), (1, 0, 8)])
def test_image_models__what_is_no_image_is_refused(part: Model, shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=r"reads \(channels, height, width\); use") as caught:
        part.build(shape, 3)
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize(
    ("part", "smallest"),
    [
        (Cnn(variant="a"), 6),
        (Cnn(variant="b"), 8),
        (Cnn(second_pool=True), 10),
        (GnCnn(), 8),
        (GnCnn(pooling="global"), 4),
        (GnCnn(widths=(8, 8)), 4),
        (ResNet18(), 1),
    ],
)
def test_image_models__smallest_image_works_and_one_pixel_less_says_so(part: Model, smallest: int) -> None:
    shape = (1, smallest + 3, smallest)
    check_model(make_model(part, shape, 3, seed=0), shape, 3)
    if smallest > 1:
        with pytest.raises(ModelError, match=rf"would vanish; height and width must be at least {smallest}$"):
            part.build((1, smallest + 3, smallest - 1), 3)


@pytest.mark.parametrize("side", range(8, 41))
@pytest.mark.parametrize("part", [Cnn(), Cnn(variant="a"), GnCnn(), GnCnn(pooling="global")])
def test_image_models__head_fits_every_side(part: Model, side: int) -> None:
    with torch.device("meta"):
        module = part.build((1, side, side + 1), 3).eval()
        assert module(torch.zeros(2, 1, side, side + 1)).shape == (2, 3)


def test_gn_cnn__groups_follow_the_widths() -> None:
    def groups(width: int) -> int:
        module = GnCnn(widths=(width,)).build((1, 8, 8), 3)
        return next(layer.num_groups for layer in module.modules() if isinstance(layer, nn.GroupNorm))

    assert [groups(width) for width in (1, 3, 7, 10, 16, 32, 64, 96, 128)] == [1, 1, 1, 2, 4, 8, 8, 8, 8]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"name": "mlp", "hidden": []}, "model.mlp.hidden=[] must be widths of 1 or more"),
        ({"name": "mlp", "hidden": [8, 0]}, "model.mlp.hidden=[8, 0] must be widths of 1 or more"),
        ({"name": "gn_cnn", "widths": [0]}, "model.gn_cnn.widths=[0] must be widths of 1 or more"),
        ({"name": "cnn", "variant": "c"}, "model.cnn.variant='c'"),
        ({"name": "cnn", "variant": "a", "second_pool": True}, 'second_pool=true needs variant "b"'),
        ({"name": "gn_cnn", "pooling": "max"}, "model.gn_cnn.pooling='max'"),
    ],
)
def test_model__wrong_settings_are_one_line(value: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.build("model", value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("front", ["none", "wavelets"])
def test_gn_resnet__a_standardised_filter_s_mean_and_length_do_not_matter(front: str) -> None:
    module = make_model(GnResNet(standardise=True, front=front), *CIFAR, seed=0).eval()
    x = torch.rand(2, 3, 32, 32)
    before = module(x)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d):
                layer.weight.mul_(3.0).add_(0.7)
    torch.testing.assert_close(module(x), before, rtol=1e-3, atol=1e-3)


def test_wavelets__are_constants_that_answer_to_edges_and_not_to_brightness() -> None:
    front = Wavelets(1)
    assert not [tensor for tensor in front.parameters() if tensor.requires_grad]
    flat = front(torch.full((1, 1, 32, 32), 0.8))[0, :, 6:10, 6:10]
    torch.testing.assert_close(flat[0], torch.full((4, 4), 0.8))
    assert float(flat[1:].max()) < 0.02
    stripes = torch.arange(32).remainder(4).ge(2).float().expand(1, 1, 32, 32)
    answers = front(stripes)[0, 1:, 6:10, 6:10].mean((1, 2)).view(2, 8)
    assert int(answers[0].argmax()) == 0  # along x
    assert float(answers[0, 0]) > 5 * float(answers[0, 4])
