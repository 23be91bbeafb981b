"""Seeded dropout: the right rate, the right scale, no correlation between clients, steps and layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedblur.core.errors import ModelError
from fedblur.learning.dropout import SeededDropout


def mask(seed: int, step: int = 0, p: float = 0.25, shape: tuple[int, ...] = (200, 500)) -> torch.Tensor:
    with SeededDropout(torch.tensor(seed), step):
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
    with SeededDropout(torch.tensor(1)):
        first, second = F.dropout(torch.ones(1000)), F.dropout(torch.ones(1000))
    assert not torch.equal(first, second)


def test_dropout__is_off_without_a_seed_and_in_eval_mode() -> None:
    layer = nn.Dropout(0.5)
    with SeededDropout(None):
        assert torch.equal(layer(torch.ones(50)), torch.ones(50))
    with SeededDropout(torch.tensor(1)):
        assert torch.equal(layer.eval()(torch.ones(50)), torch.ones(50))


def test_dropout2d__drops_whole_channels() -> None:
    with SeededDropout(torch.tensor(1)):
        out = nn.Dropout2d(0.5)(torch.ones(20, 8, 3, 3))
    per_channel = out.flatten(2)
    assert bool((per_channel == per_channel[..., :1]).all())
    assert 0.3 < float((per_channel[..., 0] == 0).float().mean()) < 0.7


def test_alpha_dropout__is_refused_with_the_way_out() -> None:
    with SeededDropout(torch.tensor(1)), pytest.raises(ModelError, match="use nn.Dropout"):
        nn.AlphaDropout(0.5)(torch.ones(5))
