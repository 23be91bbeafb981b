"""Contracts of every mask that is registered: exactly k sorted coordinates, a pure function of the state."""

import pytest
import torch

from fedblur.core.registry import build, describe, parts
from fedblur.training.server import Momentum


@pytest.fixture(params=sorted(parts("mask")))
def mask(request):
    return parts("mask")[request.param]()


def states(dimension: int):
    state = Momentum().init(torch.zeros(dimension))
    generator = torch.Generator().manual_seed(dimension)
    for round_ in range(4):
        yield state
        update = torch.randn(dimension, generator=generator)
        state = Momentum().step(state, update, round_=round_, rounds=9, noise_std=0.1)


@pytest.mark.parametrize("dimension", [1, 7, 16, 1000])
def test_mask__keeps_exactly_k_sorted_coordinates(mask, dimension: int) -> None:
    for state in states(dimension):
        support = mask.support(state)
        assert len(support) == mask.kept(dimension) >= 1
        assert bool((support.diff() > 0).all())
        assert 0 <= int(support[0]) <= int(support[-1]) < dimension


def test_mask__is_a_function_of_the_state(mask) -> None:
    supports = [mask.support(state) for state in states(500)]
    assert all(torch.equal(a, mask.support(state)) for a, state in zip(supports, states(500), strict=True))
    assert not torch.equal(supports[0], supports[1])


def test_mask__survives_the_configuration(mask) -> None:
    assert build("mask", describe(mask)) == mask
