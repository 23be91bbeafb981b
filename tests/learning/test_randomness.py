"""Seeded dropout: the right rate, the right scale, no correlation between clients, steps and layers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from fedblur.learning.randomness import SeededRandomness


def mask(seed: int, step: int = 0, p: float = 0.25, shape: tuple[int, ...] = (200, 500)) -> torch.Tensor:
    with SeededRandomness(torch.tensor(seed), step):
        return F.dropout(torch.ones(shape), p)


def test_dropout__rate_and_scale() -> None:
    dropped = mask(3)
    assert float((dropped == 0).float().mean()) == pytest.approx(0.25, abs=0.005)
    assert float(dropped.max()) == pytest.approx(1 / 0.75)
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.01)


def test_dropout__masks_of_clients_and_steps_are_uncorrelated() -> None:
    base = (mask(3) == 0).double().flatten()
    for other in (mask(4), mask(3, step=1), mask(2**31 + 5)):
        both = torch.stack([base, (other == 0).double().flatten()])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 0.02


def test_dropout__two_layers_in_one_pass_differ() -> None:
    with SeededRandomness(torch.tensor(1)):
        first, second = F.dropout(torch.ones(1000)), F.dropout(torch.ones(1000))
    assert not torch.equal(first, second)


def test_dropout__is_off_without_a_seed_and_in_eval_mode() -> None:
    layer = nn.Dropout(0.5)
    with SeededRandomness(None):
        assert torch.equal(layer(torch.ones(50)), torch.ones(50))
    with SeededRandomness(torch.tensor(1)):
        assert torch.equal(layer.eval()(torch.ones(50)), torch.ones(50))


def test_dropout2d__drops_whole_channels() -> None:
    with SeededRandomness(torch.tensor(1)):
        out = nn.Dropout2d(0.5)(torch.ones(20, 8, 3, 3))
    per_channel = out.flatten(2)
    assert bool((per_channel == per_channel[..., :1]).all())
    assert 0.3 < float((per_channel[..., 0] == 0).float().mean()) < 0.7


def test_alpha_dropout__keeps_mean_and_variance() -> None:
    x = torch.randn(400, 500, generator=torch.Generator().manual_seed(0))
    with SeededRandomness(torch.tensor(1)):
        out = nn.AlphaDropout(0.3)(x)
        whole = nn.FeatureAlphaDropout(0.3)(torch.ones(400, 20, 25))
    assert float(out.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(out.std()) == pytest.approx(1.0, abs=0.01)
    assert len(whole.unique()) == 2
    assert torch.equal(whole.amin(-1), whole.amax(-1))
    assert float((whole == whole.min()).float().mean()) == pytest.approx(0.3, abs=0.02)


LAWS = {
    "rand": (lambda: torch.rand(200, 500), 0.5, 12**-0.5),
    "randn": (lambda: torch.randn((200, 500)), 0.0, 1.0),
    "rand_like": (lambda: torch.rand_like(torch.ones(200, 500)), 0.5, 12**-0.5),
    "randint": (lambda: torch.randint(3, (200, 500)).float(), 1.0, (2 / 3) ** 0.5),
    "randint_like": (lambda: torch.randint_like(torch.ones(200, 500), 1, 4), 2.0, (2 / 3) ** 0.5),
    "normal": (lambda: torch.normal(2.0, 3.0, (200, 500)), 2.0, 3.0),
    "normal of tensors": (lambda: torch.normal(torch.full((200, 500), 2.0), 3.0), 2.0, 3.0),
    "bernoulli": (lambda: torch.bernoulli(torch.full((200, 500), 0.2)), 0.2, 0.4),
    "bernoulli_": (lambda: torch.empty(200, 500).bernoulli_(0.2), 0.2, 0.4),
    "uniform_": (lambda: torch.empty(200, 500).uniform_(-1, 3), 1.0, 4 * 12**-0.5),
    "normal_": (lambda: torch.empty(200, 500).normal_(1, 2), 1.0, 2.0),
    "exponential_": (lambda: torch.empty(200, 500).exponential_(2.0), 0.5, 0.5),
    "randperm": (lambda: torch.randperm(1000).float(), 499.5, 1000 * 12**-0.5),
    "distribution": (lambda: torch.distributions.Normal(torch.full((200, 500), 2.0), 3.0).rsample(), 2.0, 3.0),
}


@pytest.mark.parametrize("draw", LAWS)
def test_draws__follow_their_law_and_the_seed_and_leave_the_global_generator(draw: str) -> None:
    make, mean, deviation = LAWS[draw]
    before = torch.get_rng_state()
    found = []
    for seed, step in ((1, 0), (1, 0), (2, 0), (1, 1)):
        with SeededRandomness(torch.tensor(seed), step):
            found.append(make())
    assert torch.equal(torch.get_rng_state(), before)
    first, same, *others = found
    assert torch.equal(first, same)
    assert all(not torch.equal(first, other) for other in others)
    assert float(first.mean()) == pytest.approx(mean, abs=0.02 * deviation)
    assert float(first.std()) == pytest.approx(deviation, rel=0.02)
    assert bool(first.isfinite().all())


def test_attention__is_torchs_own_with_a_known_mask() -> None:
    """With a dropout so rare that nothing is dropped, all options give what torch's kernel gives."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2, 2))
    some = torch.rand(5, 5, generator=generator) > 0.3
    some |= torch.eye(5, dtype=torch.bool)
    blind = some & (torch.arange(5) != 2)[:, None]  # the third query sees nothing
    masks = (some, blind, some.float(), torch.where(blind, 0.0, -math.inf))
    for options in ({}, {"is_causal": True}, *({"attn_mask": mask} for mask in masks), {"scale": 0.3}):
        own = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        with SeededRandomness(torch.tensor(1)):
            ours = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, dropout_p=1e-9, **options)
        torch.testing.assert_close(ours, own)


@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True, "batch_first": True}, {"bias": False, "num_layers": 1}]
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")  # of torch's kernel
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "projected", "relu"])
def test_recurrent__step_by_step_is_torchs_own_kernel(kind: str, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    options = {"num_layers": 2, **options}
    layer = {
        "projected": lambda: nn.LSTM(3, 6, proj_size=2, **options),
        "relu": lambda: nn.RNN(3, 6, nonlinearity="relu", **options),
    }.get(kind, lambda: getattr(nn, kind)(3, 6, **options))()
    x = torch.randn(4, 5, 3)
    weights = {name: tensor.detach() for name, tensor in layer.named_parameters()}

    def call(params: dict[str, torch.Tensor], x: torch.Tensor) -> object:
        with SeededRandomness(torch.tensor(1)):
            return torch.func.functional_call(layer, params, (x,))

    mapped = torch.func.vmap(call, in_dims=(None, 0))(weights, torch.stack([x, -x]))
    torch.testing.assert_close(
        pytree.tree_map(lambda tensor: tensor[0], mapped), pytree.tree_map(torch.detach, layer(x))
    )
