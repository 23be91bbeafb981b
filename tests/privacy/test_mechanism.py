"""Noise: dense, sized by the bound, added to exact sums of whole numbers."""

import math

import pytest
import torch

from fedblur.core.errors import PrivacyError
from fedblur.core.rng import Seeded
from fedblur.privacy.clipping import Bounded
from fedblur.privacy.mechanisms.base import Release
from fedblur.privacy.mechanisms.gaussian import Gaussian
from tests.worlds import CPU


def release(dimension: int = 5000, cohort: int = 7, sigma: float = 2.0, clip_norm: float = 0.5) -> Release:
    return Release(dimension, clip_norm, sigma, cohort, CPU)


def noisy(mechanism: Gaussian, request: Release, seed: int, values: torch.Tensor | None = None) -> torch.Tensor:
    rng = Seeded.root(seed)
    rows = torch.zeros(request.cohort, request.dimension) if values is None else values
    blocks = [Bounded(part, request.clip_norm) for part in rows.split(3)] if len(rows) else []
    noise = mechanism.draw(request, rng)
    return mechanism.release(mechanism.accumulate(blocks, request, rng), request, noise())


def test_pin_e__noise_has_the_variance_that_was_promised() -> None:
    request = release()
    draws = torch.cat([noisy(Gaussian(), request, seed) for seed in range(40)]).double()
    expected = 2.0 * 0.5  # σS
    assert float(draws.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * len(draws)))
    assert float(draws.mean()) == pytest.approx(0, abs=5 * expected / math.sqrt(len(draws)))


def test_invariant_2__noise_is_dense() -> None:
    """Whatever was sent, zeros included, every coordinate carries its own noise."""
    rows = torch.zeros(7, 5000)
    rows[:, :10] = 0.1  # a common sparse support
    result = noisy(Gaussian(), release(), 0, rows)
    assert int((result == 0).sum()) == 0
    assert len(result.unique()) > 4990


def test_gaussian__an_empty_cohort_is_as_noisy() -> None:
    result = noisy(Gaussian(), release(dimension=50_000, cohort=0), 0)
    assert float(result.std()) == pytest.approx(1.0, rel=0.03)


def test_gaussian__without_noise_is_the_sum() -> None:
    rows = torch.randn(7, 5000) / 200
    result = noisy(Gaussian(), release(sigma=0.0), 0, rows)
    torch.testing.assert_close(result, rows.double().sum(0).float(), atol=7 * 2**-20 * 0.5 / 5000**0.5, rtol=1e-6)


def test_gaussian__refuses_updates_with_a_larger_bound_or_another_shape() -> None:
    request = release()
    with pytest.raises(PrivacyError, match="bounded by 0.6"):
        Gaussian().accumulate([Bounded(torch.zeros(1, 5000), 0.6)], request, Seeded.root(0))
    with pytest.raises(PrivacyError, match="4999 values"):
        Gaussian().accumulate([Bounded(torch.zeros(1, 4999), 0.5)], request, Seeded.root(0))
