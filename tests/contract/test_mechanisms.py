"""Contracts of every mechanism that is registered: dense noise of the promised size, an event that is accounted."""

import math

import pytest
import torch

from fedblur import accounting
from fedblur.clipping import clip_l2
from fedblur.mechanisms.base import Release
from fedblur.registry import parts
from fedblur.rng import Seeded
from tests.worlds import CPU


@pytest.fixture(params=sorted(parts("mechanism")))
def mechanism(request):
    return parts("mechanism")[request.param]()


def release_once(mechanism, rows: torch.Tensor, sigma: float, seed: int = 0) -> torch.Tensor:
    request = Release(rows.shape[1], 0.5, sigma, len(rows), CPU)
    rng = Seeded.root(seed)
    total = mechanism.accumulate([clip_l2(rows, 0.5)[0]], request, rng)
    return mechanism.release(total, request, rng)


def test_mechanism__noise_is_dense_and_has_the_promised_size(mechanism) -> None:
    noisy = release_once(mechanism, torch.zeros(9, 20_000), sigma=3.0)
    assert int((noisy == 0).sum()) < 20
    assert float(noisy.double().std()) == pytest.approx(1.5, rel=0.05)


def test_mechanism__the_sum_is_unbiased(mechanism) -> None:
    rows = 0.01 * torch.randn(9, 500, generator=torch.Generator().manual_seed(0))
    mean = torch.stack([release_once(mechanism, rows, 1.0, seed).double() for seed in range(400)]).mean(0)
    assert float((mean - rows.double().sum(0)).abs().max()) < 5 * 0.5 / math.sqrt(400)


def test_mechanism__its_event_is_accounted_and_more_noise_costs_less(mechanism) -> None:
    weak, strong = (accounting.epsilon(mechanism.event(sigma), 10, 1e-5, "rdp") for sigma in (1.0, 4.0))
    assert 0 < strong < weak < math.inf


def test_mechanism__says_whom_to_trust(mechanism) -> None:
    assert len(mechanism.trust) > 20
