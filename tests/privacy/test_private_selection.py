"""Guarantees of the best of a random number of trials, against brute force on mechanisms with few outcomes."""

import json
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.special import logsumexp

from fedblur.core.errors import ConfigError, PrivacyError
from fedblur.privacy import accounting
from fedblur.privacy.accountants import ORDERS, renyi
from fedblur.privacy.events import (
    FixedSizeSampled,
    Gaussian,
    PoissonSampled,
    PrivateSelection,
    SelfComposed,
    from_json,
    to_json,
)
from fedblur.privacy.private_selection import WORDS, TrialCount, best_of

LAWS = [TrialCount(eta, mean) for eta in (-0.5, 0.0, 0.5, 1.0, 3.0, math.inf) for mean in (1.5, 4.0, 30.0)]
SIMPLE = np.array([1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0, 256.0])


def divergence(p: np.ndarray, q: np.ndarray, order: float) -> float:
    seen = p > 0
    return float(logsumexp(order * np.log(p[seen]) + (1 - order) * np.log(q[seen])) / (order - 1))


def both_ways(p: np.ndarray, q: np.ndarray, orders: np.ndarray) -> np.ndarray:
    return np.array([max(divergence(p, q, a), divergence(q, p, a)) for a in orders])


def all_chances(count: TrialCount) -> np.ndarray:
    most = 500
    while (chances := count.chances(most)).sum() < 1 - 1e-12:
        most *= 2
    return chances


def law_of_the_best(p: np.ndarray, count: TrialCount) -> np.ndarray:
    """The exact law of the best of K outcomes; outcomes are in the order of their scores, K = 0 is one more."""
    chances = all_chances(count)
    below = np.concatenate([[0.0], np.cumsum(p)])
    generating = np.array([np.sum(chances * x ** np.arange(len(chances))) for x in below])  # E[x^K]
    return np.concatenate([[chances[0]], np.diff(generating)])


def smallest_delta(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(max(np.maximum(p - math.exp(epsilon) * q, 0).sum(), np.maximum(q - math.exp(epsilon) * p, 0).sum()))


def randomised_response(outcomes: int, epsilon: float, truth: int) -> np.ndarray:
    chances = np.ones(outcomes)
    chances[truth] = math.exp(epsilon)
    return chances / chances.sum()


TOYS = [
    (randomised_response(2, 0.3, 0), randomised_response(2, 0.3, 1)),
    (randomised_response(2, 2.0, 0), randomised_response(2, 2.0, 1)),
    (randomised_response(5, 1.0, 4), randomised_response(5, 1.0, 1)),
    (np.array([0.97, 0.02, 0.01]), np.array([0.9, 0.02, 0.08])),
    (np.array([0.2, 0.79, 0.01]), np.array([0.21, 0.7895, 0.0005])),
]


@pytest.mark.parametrize("count", LAWS, ids=str)
@pytest.mark.parametrize("toy", range(len(TOYS)))
def test_best_of__bounds_the_true_divergence_of_the_best(toy: int, count: TrialCount) -> None:
    p, q = TOYS[toy]
    for first, second in ((p, q), (p[::-1], q[::-1])):  # another order of scores is another mechanism
        bound = best_of(both_ways(p, q, SIMPLE), SIMPLE, count, lambda e: smallest_delta(p, q, e))
        true = both_ways(law_of_the_best(first, count), law_of_the_best(second, count), SIMPLE)
        assert (true <= bound + 1e-9).all()


def test_best_of__of_a_fixed_number_of_trials_would_not_be_bounded_so() -> None:
    """Why K has to be random: 100 trials for sure leak more than the bound for 100 expected ones allows."""
    p, q = randomised_response(2, 2.0, 0), randomised_response(2, 2.0, 1)
    k = 100
    best = [np.array([x[0] ** k, 1 - x[0] ** k]) for x in (p, q)]
    bound = best_of(both_ways(p, q, SIMPLE), SIMPLE, TrialCount(0.0, k), lambda e: smallest_delta(p, q, e))
    assert (both_ways(best[0], best[1], SIMPLE) > bound).any()


@pytest.mark.parametrize("count", LAWS, ids=str)
def test_trial_count__is_a_law_with_the_mean_that_was_asked_for(count: TrialCount) -> None:
    chances = all_chances(count)
    assert chances.min() >= 0
    assert chances.sum() == pytest.approx(1, abs=1e-9)
    assert np.arange(len(chances)) @ chances == pytest.approx(count.mean, rel=1e-6)
    assert (chances[0] == 0) != count.poisson


def test_trial_count__is_the_published_one() -> None:
    k = np.arange(1, 200)
    geometric = TrialCount(1.0, 5.0)
    assert geometric.gamma == pytest.approx(1 / 5)
    assert np.allclose(geometric.chances(199)[1:], 0.2 * 0.8 ** (k - 1))
    gamma = TrialCount(0.0, 5.0).gamma
    assert np.allclose(TrialCount(0.0, 5.0).chances(199)[1:], (1 - gamma) ** k / (k * math.log(1 / gamma)))
    half = TrialCount(0.5, 5.0)
    first = (1 - half.gamma) / (half.gamma**-0.5 - 1) * 0.5  # Definition 1 at k = 1
    second = first * (1 - half.gamma) * 1.5 / 2
    assert np.allclose(half.chances(2)[1:], [first, second])


@pytest.mark.parametrize("count", LAWS, ids=str)
def test_trial_count__draws_follow_the_law(count: TrialCount) -> None:
    uniforms = (np.arange(400) + 0.5) / 400
    draws = np.bincount([count.draw(as_words(int(u * 2**64))) for u in uniforms], minlength=6)[:6] / 400
    assert np.allclose(draws, count.chances(5), atol=1 / 400)
    assert count.draw(as_words(2**64 - 2**11)) > count.mean


@pytest.mark.parametrize("count", LAWS, ids=str)
def test_trial_count__draw_steps_where_the_sum_of_exact_chances_does(count: TrialCount) -> None:
    """For random words just above and below P[K ≤ k]: 50 digits, far beyond what float64 could tell apart."""
    with mpmath.workdps(120):
        gamma, eta = (mpmath.mpf(1) if count.poisson else mpmath.mpf(count.gamma)), mpmath.mpf(count.shape)
        total = mpmath.mpf(0)
        for k in range(6):
            if count.poisson:
                total += mpmath.exp(-mpmath.mpf(count.mean)) * mpmath.mpf(count.mean) ** k / mpmath.factorial(k)
            elif k:
                first = 1 / (gamma**-eta - 1) if eta else 1 / mpmath.log(1 / gamma)
                product = mpmath.fprod((j + eta) / (j + 1) for j in range(int(not eta), k))
                total += first * (1 - gamma) ** k * product
            if total:
                edge = int(total * 2 ** (64 * WORDS))
                below, above = (np.array(words_of(edge + by * 2**700), dtype=np.uint64) for by in (-1, 1))
                assert (count.draw(below), count.draw(above)) == (k, k + 1)


def words_of(number: int) -> list[int]:
    return [number >> (64 * place) & (2**64 - 1) for place in range(WORDS)]


def as_words(top: int) -> np.ndarray:
    """A uniform number whose first 64 bits are these."""
    return np.array([0] * (WORDS - 1) + [top], dtype=np.uint64)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 2.0, math.inf])
@pytest.mark.parametrize("mean", [2.0, 10.0, 100.0])
def test_selection__agrees_with_dp_accounting_for_one_candidate(shape: float, mean: float) -> None:
    trial = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0)), 50
    )
    oracle = RdpAccountant(list(ORDERS)).compose(RepeatAndSelectDpEvent(trial, mean, shape))
    event = PrivateSelection((SelfComposed(PoissonSampled(0.1, Gaussian(2.0)), 50),), shape, mean)
    assert accounting.epsilon(event, 1, 1e-3, "rdp") == pytest.approx(oracle.get_epsilon(1e-3), rel=1e-6)


@pytest.mark.parametrize("eta", [-0.5, 0.0, 1.0])
def test_best_of__pure_privacy_grows_by_the_published_factor(eta: float) -> None:
    """A trial that is ε-private for every order: the best is (2 + η)ε-private (the limit of Theorem 2)."""
    orders = np.geomspace(1.01, 1e7, 400)
    curve = best_of(np.full(400, 0.25), orders, TrialCount(eta, 20.0), lambda e: 0.0)
    assert curve[-1] == pytest.approx((2 + eta) * 0.25, rel=1e-4)


def test_selection__costs_more_with_trials_shape_and_epsilon_and_at_least_one_trial() -> None:
    def cost(shape: float = 0.0, mean: float = 10.0, sigma: float = 3.0) -> float:
        event = PrivateSelection((Gaussian(sigma),), shape, mean)
        return accounting.epsilon(event, 1, 1e-3, "rdp")

    assert cost(mean=3) < cost(mean=10) < cost(mean=100)
    assert cost(shape=-0.5, mean=3) < cost(shape=0, mean=3) < cost(shape=1, mean=3)
    assert cost(sigma=6) < cost(sigma=3) < cost(sigma=1)
    assert cost(mean=1.0001) > accounting.epsilon(Gaussian(3.0), 1, 1e-3, "rdp")
    assert cost(sigma=0.0) == math.inf


def test_selection__costs_what_the_worst_candidate_costs() -> None:
    small, large = Gaussian(4.0), SelfComposed(Gaussian(2.0), 2)
    both, worst = (PrivateSelection(trials, 0.0, 5.0) for trials in ((small, large), (large,)))
    assert np.array_equal(renyi(both), renyi(worst))
    assert (renyi(both) > renyi(PrivateSelection((small,), 0.0, 5.0))).all()


def test_selection__is_kept_in_ledgers_and_refused_by_pld() -> None:
    event = PrivateSelection((SelfComposed(PoissonSampled(0.1, Gaussian(2.0)), 50), Gaussian(1.5)), math.inf, 5.0)
    text = json.dumps(to_json(event), allow_nan=False)
    assert from_json(json.loads(text)) == event
    with pytest.raises(PrivacyError, match='accountant = "rdp"'):
        accounting.epsilon(event, 1, 1e-3, "pld")


def test_selection__refuses_trials_that_protect_different_neighbours() -> None:
    assert accounting.adjacency(PrivateSelection((Gaussian(1.0),), 0.0, 5.0)) == "add or remove one client"
    fixed = FixedSizeSampled(100, 10, Gaussian(1.0))
    assert accounting.adjacency(PrivateSelection((fixed,), 0.0, 5.0)) == "replace one client"
    with pytest.raises(PrivacyError, match="different neighbours"):
        accounting.adjacency(PrivateSelection((fixed, Gaussian(1.0)), 0.0, 5.0))


@pytest.mark.parametrize(
    ("eta", "mean", "word"), [(-1.0, 5.0, "eta=-1.0"), (0.0, 1.0, "trials=1.0"), (math.nan, 5.0, "eta")]
)
def test_trial_count__names_what_is_out_of_range(eta: float, mean: float, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        TrialCount(eta, mean)
    with pytest.raises(PrivacyError):
        PrivateSelection((Gaussian(1.0),), eta, mean)
