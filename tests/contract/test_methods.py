"""Contracts of every method that is registered: vmap equals loop, norm ≤ S, finite, nothing read across clients."""

import math

import pytest
import torch
from torch import nn

from fedblur.core.registry import describe, parts
from fedblur.learning.client import train_block
from tests.worlds import job_for, packed, work_for

METHODS = sorted(parts("method"))
SIZES = [2, 5, 9]


def updates(methods, population, ids, vectorise=True, clip_norm=0.3, seed=0):
    torch.manual_seed(0)
    job = job_for(nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10)), methods, clip_norm)
    shard, work = work_for(job, population, ids, seed)
    return train_block(job, shard, work, vectorise)


@pytest.fixture(params=METHODS)
def method(request):
    return parts("method")[request.param]()


def test_method__vmap_equals_loop(method) -> None:
    together, alone = (updates((method,), packed(SIZES), [0, 1, 2], v).bounded.value for v in (True, False))
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clip_norm", [1e-4, 0.3, 100.0])
def test_invariant_1__clip_is_last_whatever_the_method_does(method, clip_norm: float) -> None:
    block = updates((method,), packed(SIZES), [0, 1, 2], clip_norm=clip_norm)
    assert float(block.bounded.value.double().norm(dim=1).max()) <= clip_norm


@pytest.mark.parametrize("world", ["constant", "huge", "one sample"])
def test_method__finite_on_odd_data(method, world: str) -> None:
    population = packed([1, 1, 1] if world == "one sample" else SIZES)
    if world == "constant":
        population.x.fill_(1.0)
        population.y.fill_(0)
    if world == "huge":
        population.x.mul_(1e30)
    assert bool(torch.isfinite(updates((method,), population, [0, 1, 2]).bounded.value).all())


def test_method__reads_nothing_across_clients(method) -> None:
    population = packed(SIZES)
    clean = updates((method,), population, [1]).bounded.value
    population.x[:2] = math.nan
    population.x[7:] = math.nan
    assert torch.equal(updates((method,), population, [1]).bounded.value, clean)


def test_method__composes_with_every_other(method) -> None:
    for other in METHODS:
        block = updates((method, parts("method")[other]()), packed(SIZES), [0, 1])
        assert bool(torch.isfinite(block.bounded.value).all())


def test_method__survives_the_configuration(method) -> None:
    from fedblur.core.registry import build

    assert build("method", describe(method)) == method
