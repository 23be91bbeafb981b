"""The estimators: exact where a formula is known, and a bound that holds as often as it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from fedblur.experiments.audit.estimate import epsilon_between, gaussian_fit, lower_bound
from fedblur.privacy.accountants import gaussian_epsilon


@pytest.mark.parametrize("mean", [0.05, 0.3, 1.0, 3.0, 10.0])
def test_epsilon_between__equal_variances_are_the_gaussian_mechanism(mean: float) -> None:
    for sign in (1, -1):
        found = float(epsilon_between(np.array(sign * mean), np.array(1.0), 1e-3))
        assert found == pytest.approx(gaussian_epsilon(mean, 1e-3), rel=1e-6)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.1), (0.0, 0.9), (0.5, 0.7), (-0.5, 1.3), (2.0, 1.5), (8.0, 2.0)])
def test_epsilon_between__unequal_variances_match_a_sum_on_a_grid(mean: float, std: float) -> None:
    x = np.linspace(-60, 60, 200_001)
    p, q, width = norm.logpdf(x, mean, std), norm.logpdf(x), x[1] - x[0]
    epsilon, delta = float(epsilon_between(np.array(mean), np.array(std), 3e-3)), 3e-3

    def leak(eps: float) -> float:
        both = [np.maximum(np.exp(a) - np.exp(np.minimum(eps + b, 500)), 0).sum() * width for a, b in ((p, q), (q, p))]
        return float(max(both))

    assert leak(epsilon * 1.001) <= delta <= leak(epsilon * 0.999)


def test_epsilon_between__nothing_to_tell_apart_is_0_and_a_point_is_huge() -> None:
    assert float(epsilon_between(np.array(0.0), np.array(1.0), 1e-5)) == 0
    assert float(epsilon_between(np.array(1.0), np.array(0.0), 1e-5)) > 1000


def test_gaussian_fit__finds_the_epsilon_of_a_known_shift_within_its_interval() -> None:
    dice = np.random.default_rng(0)
    truth, inside = gaussian_epsilon(1.0, 1e-3), 0
    for _ in range(20):
        found = gaussian_fit(dice.normal(1, 1, 2000), None, 1.0, 1e-3, draws=300)
        inside += found.low <= truth <= found.high
        assert found.low <= found.epsilon <= found.high
    assert inside >= 16


def test_lower_bound__holds_for_randomised_response_and_comes_close() -> None:
    """Telling the truth with probability e^ε/(1 + e^ε) is exactly ε-private: the bound may not pass it."""
    dice, epsilon = np.random.default_rng(0), 1.5
    truth = 1 / (1 + math.exp(-epsilon))
    bounds = [
        lower_bound(
            (dice.random((8000, 1)) < truth).astype(float), (dice.random((8000, 1)) < 1 - truth).astype(float), 0.0
        )
        for _ in range(40)
    ]
    assert sum(bound > epsilon for bound in bounds) <= 4  # 95 % confidence: 2 of 40 are expected at most
    assert min(bounds) > 0.85 * epsilon


def test_lower_bound__of_what_cannot_be_told_apart_is_about_0_whatever_is_tried() -> None:
    dice = np.random.default_rng(1)
    bounds = [lower_bound(dice.normal(size=(1000, 6)), dice.normal(size=(1000, 6)), 0.01) for _ in range(40)]
    assert sum(bound > 0 for bound in bounds) <= 4
