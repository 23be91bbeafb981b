"""Noise: dense, sized by the bound, the same whether the server or the clients add it."""

import math

import pytest
import torch

from fedblur.clipping import Bounded
from fedblur.errors import PrivacyError
from fedblur.mechanisms.base import Release
from fedblur.mechanisms.gaussian import Gaussian
from fedblur.rng import Seeded
from tests.worlds import CPU


def release(dimension: int = 5000, cohort: int = 7, sigma: float = 2.0, clip_norm: float = 0.5) -> Release:
    return Release(dimension, clip_norm, sigma, cohort, CPU)


def noisy(mechanism: Gaussian, request: Release, seed: int, values: torch.Tensor | None = None) -> torch.Tensor:
    rng = Seeded.root(seed)
    rows = torch.zeros(request.cohort, request.dimension) if values is None else values
    blocks = [Bounded(part, request.clip_norm) for part in rows.split(3)] if len(rows) else []
    return mechanism.release(mechanism.accumulate(blocks, request, rng), request, rng)


@pytest.mark.parametrize("placement", ["server", "clients"])
def test_pin_e__shares_and_central_noise_have_the_same_variance(placement) -> None:
    request = release()
    draws = torch.cat([noisy(Gaussian(placement), request, seed) for seed in range(40)]).double()
    expected = 2.0 * 0.5  # σS
    assert float(draws.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * len(draws)))
    assert float(draws.mean()) == pytest.approx(0, abs=5 * expected / math.sqrt(len(draws)))


@pytest.mark.parametrize("placement", ["server", "clients"])
def test_invariant_2__noise_is_dense(placement) -> None:
    """Whatever was sent, zeros included, every coordinate carries its own noise."""
    rows = torch.zeros(7, 5000)
    rows[:, :10] = 0.1  # a common sparse support
    result = noisy(Gaussian(placement), release(), 0, rows)
    assert int((result == 0).sum()) == 0
    assert len(result.unique()) > 4990


@pytest.mark.parametrize("placement", ["server", "clients"])
def test_gaussian__an_empty_cohort_is_as_noisy(placement) -> None:
    result = noisy(Gaussian(placement), release(dimension=50_000, cohort=0), 0)
    assert float(result.std()) == pytest.approx(1.0, rel=0.03)


def test_gaussian__without_noise_is_the_sum() -> None:
    rows = torch.randn(7, 5000)
    result = noisy(Gaussian(), release(sigma=0.0), 0, rows)
    torch.testing.assert_close(result, rows.double().sum(0).float())


def test_gaussian__refuses_updates_with_a_larger_bound_or_another_shape() -> None:
    request = release()
    with pytest.raises(PrivacyError, match="bounded by 0.6"):
        Gaussian().accumulate([Bounded(torch.zeros(1, 5000), 0.6)], request, Seeded.root(0))
    with pytest.raises(PrivacyError, match="4999 values"):
        Gaussian().accumulate([Bounded(torch.zeros(1, 4999), 0.5)], request, Seeded.root(0))


def test_invariant_8__fewer_noise_shares_than_planned_abort_the_round() -> None:
    request = release(cohort=7)
    with pytest.raises(PrivacyError, match="4 noise shares arrived of the 7"):
        Gaussian("clients").accumulate([Bounded(torch.zeros(4, 5000), 0.5)], request, Seeded.root(0))


def test_gaussian__shares_are_independent_of_each_other() -> None:
    request = release(dimension=2000, cohort=2)
    shares = Gaussian("clients")._shares(range(2), request, Seeded.root(0))
    assert abs(float(torch.corrcoef(shares)[0, 1])) < 0.1
