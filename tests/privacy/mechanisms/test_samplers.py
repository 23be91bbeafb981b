"""Discrete samplers against their exact probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedblur.core.rng import Keystream, Seeded, System
from fedblur.privacy.mechanisms.ddgauss import sample_discrete_gaussian
from fedblur.privacy.mechanisms.skellam import sample_poisson, sample_skellam
from tests.privacy.mechanisms import laws

DRAWS = 400_000


def source(seed: int | None = 0) -> Keystream:
    return (System() if seed is None else Seeded.root(seed)).keystream()


def chi_square(draws: np.ndarray, log_law: np.ndarray) -> float:
    """p-value of draws against probabilities on −reach … reach; neighbours are pooled to 100 or more expected."""
    reach = len(log_law) // 2
    assert int(np.abs(draws).max()) <= reach
    observed = np.bincount(draws + reach, minlength=len(log_law))
    expected = np.exp(log_law) * len(draws)
    pool = np.floor(np.cumsum(expected) / 100).astype(int).clip(max=int(expected.sum() / 100) - 1)
    kept = np.bincount(pool, observed), np.bincount(pool, expected)
    kept = tuple(part[kept[1] > 0] for part in kept)
    return float(stats.chisquare(kept[0], kept[1] * kept[0].sum() / kept[1].sum()).pvalue)


@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0, 10.0, 100.0, 1000.0])
def test_discrete_gaussian__chi_square_against_its_exact_law(tau: float) -> None:
    draws = sample_discrete_gaussian(tau, DRAWS, source())
    assert chi_square(draws, laws.discrete_gaussian(tau, int(12 * tau) + 5)) > 1e-3


@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_discrete_gaussian__is_no_rounded_gaussian(tau: float) -> None:
    """The same test tells a rounded float Gaussian apart."""
    rounded = np.random.default_rng(0).normal(0, tau, DRAWS).round().astype(np.int64)
    assert chi_square(rounded, laws.discrete_gaussian(tau, int(12 * tau) + 5)) < 1e-12


@pytest.mark.parametrize("tau", [1.0, 37.3])
def test_discrete_gaussian__the_tail_has_its_share(tau: float) -> None:
    """Beyond four deviations, where a coin of few bits would show."""
    law = np.exp(laws.discrete_gaussian(tau, int(12 * tau)))
    far = np.abs(np.arange(-int(12 * tau), int(12 * tau) + 1)) > 4 * tau
    count = 2_000_000
    found = int((np.abs(sample_discrete_gaussian(tau, count, source(1))) > 4 * tau).sum())
    assert (
        stats.poisson.ppf(1e-4, count * law[far].sum()) <= found <= stats.poisson.ppf(1 - 1e-4, count * law[far].sum())
    )


def test_discrete_gaussian__draws_are_independent_whole_and_repeatable() -> None:
    a, b = sample_discrete_gaussian(20.0, 5000, source()), sample_discrete_gaussian(20.0, 5000, source())
    assert a.dtype == np.int64
    assert np.array_equal(a, b)
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.06


def test_discrete_gaussian__without_a_seed_every_call_is_new() -> None:
    a, b = (sample_discrete_gaussian(20.0, 5000, source(None)) for _ in range(2))
    assert not np.array_equal(a, b)
    assert np.concatenate([a, b]).std() == pytest.approx(20, rel=0.05)


def test_discrete_gaussian__no_noise_and_no_draws() -> None:
    assert sample_discrete_gaussian(0.0, 4, source()).tolist() == [0, 0, 0, 0]
    assert len(sample_discrete_gaussian(3.0, 0, source())) == 0


@pytest.mark.parametrize("variance", [0.2, 2.0, 30.0, 400.0])
def test_skellam__chi_square_against_its_exact_law(variance: float) -> None:
    draws = sample_skellam(variance, DRAWS, source())
    assert chi_square(draws, laws.skellam(variance, int(14 * math.sqrt(variance)) + 20)) > 1e-3


@pytest.mark.parametrize("mean", [0.1, 9.99, 10.0, 11.7, 1e3, 4e7])
def test_poisson__chi_square_against_its_exact_law(mean: float) -> None:
    draws = sample_poisson(mean, DRAWS, source(2))
    edges = np.unique(stats.poisson.ppf(np.linspace(0.001, 0.999, 80), mean))
    expected = np.diff(np.concatenate([[0], stats.poisson.cdf(edges, mean), [1]])) * DRAWS
    observed = np.bincount(np.searchsorted(edges, draws), minlength=len(expected))
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_skellam__shares_add_up_to_one_draw() -> None:
    shares = sum(sample_skellam(50.0, 100_000, source(seed)) for seed in range(3, 11))
    one = sample_skellam(400.0, 100_000, source(11))
    assert stats.ks_2samp(shares, one).pvalue > 1e-3
