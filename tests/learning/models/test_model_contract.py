"""What the engines rely on: weights that follow from a seed alone, and per-client gradients under vmap."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from fedblur.core import registry
from fedblur.learning.models import Cnn, Glyphs, GnCnn, GnResNet, Leaves, Logistic, Model, make_model
from fedblur.learning.module_function import Layout, initial_vector
from fedblur.training.checks import reads_text

PARTS = [
    *(registry.build("model", name) for name in sorted(registry.parts("model"))),
    Cnn(variant="a"),
    GnCnn(pool_first=True, pooling="global"),
    GnResNet(standardise=True, front="wavelets", head_scale=0.5),
]
SHAPE, CLASSES = (1, 8, 8), 5


def shape_for(part: Model) -> tuple[int, ...]:
    """What a model can read: small images, or windows of characters."""
    return (6,) if reads_text(part) else SHAPE


def inputs_for(part: Model, lead: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if reads_text(part):
        return torch.randint(CLASSES, (*lead, *shape_for(part)), generator=generator).float()
    return torch.randn(*lead, *shape_for(part), generator=generator)


@pytest.mark.parametrize("part", PARTS, ids=repr)
def test_model__vmap_of_grad_equals_a_loop(part: Model) -> None:
    module = make_model(part, shape_for(part), CLASSES, seed=0).eval()  # eval: dropout is the client's business
    layout = Layout.of(module)

    def loss(vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
        logits = functional_call(module, layout.unflatten(vector), (x,))
        return cross_entropy(logits, y)

    generator = torch.Generator().manual_seed(1)
    clients, batch = 3, 4
    start = initial_vector(module)
    theta = start + 0.01 * torch.randn(clients, layout.total, generator=generator)
    x = inputs_for(part, (clients, batch), generator)
    y = torch.randint(CLASSES, (clients, batch), generator=generator)

    together = vmap(grad(loss))(theta, x, y)
    apart = torch.stack([grad(loss)(theta[c], x[c], y[c]) for c in range(clients)])

    assert together.shape == (clients, layout.total)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    assert bool((together.norm(dim=1) > 1e-3).all())


@pytest.mark.parametrize("part", PARTS, ids=repr)
def test_make_model__weights_follow_from_the_seed_alone(part: Model) -> None:
    first = initial_vector(make_model(part, shape_for(part), CLASSES, seed=7))
    torch.manual_seed(123)
    assert torch.equal(first, initial_vector(make_model(part, shape_for(part), CLASSES, seed=7)))
    if not isinstance(part, Logistic | Glyphs | Leaves):  # convex: zero is where they start
        assert not torch.equal(first, initial_vector(make_model(part, shape_for(part), CLASSES, seed=8)))


def test_make_model__leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_model(Cnn(), SHAPE, CLASSES, seed=2**63 - 1)
    assert torch.equal(torch.rand(3), expected)


def test_make_model__ignores_the_default_device() -> None:
    with torch.device("meta"):
        module = make_model(Cnn(), SHAPE, CLASSES, seed=0)
    assert {tensor.device.type for tensor in module.parameters()} == {"cpu"}


@pytest.mark.parametrize("part", [Cnn(), Cnn(variant="a")])
def test_cnn__glorot_weights_and_zero_biases(part: Cnn) -> None:
    module = make_model(part, (1, 28, 28), 62, seed=0)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            assert layer.bias is not None
            assert not bool(layer.bias.any())
            field = layer.weight[0][0].numel()  # 9 for a 3x3 convolution, 1 for a dense layer
            fans = field * (layer.weight.shape[0] + layer.weight.shape[1])
            limit = (6 / fans) ** 0.5
            assert 0.95 * limit < float(layer.weight.detach().abs().max()) <= limit


def test_logistic__starts_at_zero() -> None:
    assert not bool(initial_vector(make_model(Logistic(), SHAPE, CLASSES, seed=0)).any())


def test_cnn__dropout_rates_are_the_published_ones_and_can_be_off() -> None:
    rates = [m.p for m in Cnn().build(SHAPE, CLASSES).modules() if isinstance(m, nn.Dropout)]
    assert rates == [0.25, 0.5]
    assert not [m for m in Cnn(dropout=False).build(SHAPE, CLASSES).modules() if isinstance(m, nn.Dropout)]


def test_cnn__dropout_adds_no_parameters_and_does_not_change_the_start() -> None:
    with_dropout = initial_vector(make_model(Cnn(), SHAPE, CLASSES, seed=3))
    without = initial_vector(make_model(Cnn(dropout=False), SHAPE, CLASSES, seed=3))
    assert torch.equal(with_dropout, without)


@pytest.mark.parametrize("variant", ["a", "b"])
def test_cnn__equals_the_published_layer_order(variant: str) -> None:
    """Ours pools before the ReLU; the published models after it. The function is the same."""
    module = make_model(registry.build("model", {"name": "cnn", "variant": variant}), (1, 12, 12), 5, seed=0)
    p = dict(module.named_parameters())
    x = torch.randn(2, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    pool = nn.MaxPool2d(2)
    hidden = torch.relu(torch.conv2d(x, p["conv1.weight"], p["conv1.bias"]))
    hidden = pool(hidden) if variant == "b" else hidden
    hidden = torch.relu(torch.conv2d(hidden, p["conv2.weight"], p["conv2.bias"]))
    hidden = pool(hidden) if variant == "a" else hidden
    hidden = torch.relu(hidden.flatten(1) @ p["dense.weight"].T + p["dense.bias"])
    expected = hidden @ p["head.weight"].T + p["head.bias"]
    torch.testing.assert_close(module.eval()(x), expected)
