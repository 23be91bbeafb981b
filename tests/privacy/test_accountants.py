"""The two interpreters against oracles: quadrature, exact formulas, and a second implementation."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from itertools import pairwise

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from fedblur.core.errors import PrivacyError
from fedblur.privacy.accountants import ORDERS, renyi
from fedblur.privacy.accounting import epsilon
from fedblur.privacy.events import FixedSizeSampled, Gaussian, PoissonSampled


def poisson(sigma: float, rate: float = 0.04) -> PoissonSampled:
    return PoissonSampled(rate, Gaussian(sigma))


# --- RDP against quadrature ---


def renyi_by_quadrature(p_log: Callable[[float], float], q_log: Callable[[float], float], order: float) -> float:
    """D_order(P ‖ Q) of two densities on the line, with the peak of the integrand factored out."""

    def exponent(x: float) -> float:
        return order * p_log(x) + (1 - order) * q_log(x)

    grid = np.linspace(-60, 60 + 2 * order, 4001)
    values = np.array([exponent(x) for x in grid])
    peak, top = float(grid[values.argmax()]), float(values.max())
    area = integrate.quad(lambda x: math.exp(exponent(x) - top), peak - 60, peak + 60, points=[peak], limit=400)[0]
    return (top + math.log(area)) / (order - 1)


def mixture(rate: float, mean: float, sigma: float) -> Callable[[float], float]:
    """Log density of N(0, σ²), or with probability `rate` N(mean, σ²)."""

    def log_density(x: float) -> float:
        away, there = -(x**2) / (2 * sigma**2), -((x - mean) ** 2) / (2 * sigma**2)
        scale = math.log(sigma * math.sqrt(2 * math.pi))
        if rate == 1:
            return there - scale
        return float(np.logaddexp(math.log1p(-rate) + away, math.log(rate) + there)) - scale

    return log_density


def plain(sigma: float) -> Callable[[float], float]:
    return mixture(1.0, 0.0, sigma)


@pytest.mark.parametrize("order", [1.5, 2.0, 3.7, 8.0, 20.0])
@pytest.mark.parametrize(("rate", "sigma"), [(0.04, 2.382), (0.04, 0.979), (0.5, 1.5), (0.001, 1.0), (1.0, 2.0)])
def test_rdp__poisson_matches_quadrature_in_both_directions(rate: float, sigma: float, order: float) -> None:
    ours = renyi(poisson(sigma, rate))[ORDERS.index(order)]
    removed = renyi_by_quadrature(mixture(rate, 1, sigma), plain(sigma), order)
    added = renyi_by_quadrature(plain(sigma), mixture(rate, 1, sigma), order)
    assert ours >= max(removed, added) * (1 - 1e-9)
    if order.is_integer():  # in between, dp_accounting's series is an upper bound
        assert ours == pytest.approx(removed, rel=1e-6)


def test_rdp__orders_reach_from_1_1_to_1024_and_are_fine() -> None:
    assert ORDERS[0] == 1.1
    assert ORDERS[-1] == 1024
    assert list(ORDERS) == sorted(set(ORDERS))
    assert max(b / a for a, b in pairwise(ORDERS)) <= 1.5


# --- fixed size: neighbours differ by 2S ---


def theorem_27(q: float, sigma: float, order: int) -> float:
    """Wang, Balle, Kasiviswanathan (2019), in 80 digits, for a base divergence α·(2S)²/(2σ²S²) = 2α/σ²."""
    with localcontext() as context:
        context.prec = 80
        base = Decimal(2) / Decimal(sigma) ** 2

        def moment(i: int) -> Decimal:
            return ((i - 1) * i * base).exp()

        def alternating(degree: int) -> Decimal:
            return abs(sum((-1) ** (i % 2) * math.comb(degree, i) * moment(i) for i in range(degree + 1)))

        total = 1 + Decimal(q) ** 2 * math.comb(order, 2) * min(4 * (moment(2) - 1), 2 * moment(2))
        for j in range(3, order + 1):
            ternary = 4 * (alternating(2 * (j // 2)) * alternating(2 * ((j + 1) // 2))).sqrt()
            total += Decimal(q) ** j * math.comb(order, j) * min(ternary, 2 * moment(j))
        return float(total.ln()) / (order - 1)


@pytest.mark.parametrize("order", [2, 3, 7, 20, 48])
@pytest.mark.parametrize(("population", "cohort", "sigma"), [(3400, 136, 9.16), (3400, 136, 3.16), (100, 50, 20.0)])
def test_fixed_size__matches_a_second_implementation(population: int, cohort: int, sigma: float, order: int) -> None:
    ours = renyi(FixedSizeSampled(population, cohort, Gaussian(sigma)))[ORDERS.index(order)]
    exact = theorem_27(cohort / population, sigma, order)
    assert exact * (1 - 1e-7) <= ours <= exact * (1 + 1e-4)


@pytest.mark.parametrize("order", [2.0, 5.0, 12.0])
@pytest.mark.parametrize(("population", "cohort", "sigma"), [(10, 10, 4.0), (10, 9, 4.0), (2, 1, 6.0), (25, 1, 9.0)])
def test_fixed_size__bounds_replacing_u_by_minus_u(population: int, cohort: int, sigma: float, order: float) -> None:
    """One client's update turns from +S to −S: what an attacker sees, by quadrature."""
    q = cohort / population
    seen = renyi_by_quadrature(mixture(q, 1, sigma), mixture(q, -1, sigma), order)
    curve = renyi(FixedSizeSampled(population, cohort, Gaussian(sigma)))
    assert curve[ORDERS.index(order)] >= seen * (1 - 1e-9)
    if q == 1:  # nothing is sampled: exactly a Gaussian with sensitivity 2S
        assert curve[ORDERS.index(order)] == pytest.approx(2 * order / sigma**2)


def test_fixed_size__the_clip_norm_as_sensitivity_would_be_wrong() -> None:
    """Had σ not been halved, the bound would be broken by the attack above: the halving is needed."""
    seen = renyi_by_quadrature(mixture(0.9, 1, 4.0), mixture(0.9, -1, 4.0), 5.0)
    assert renyi(FixedSizeSampled(10, 9, Gaussian(8.0)))[ORDERS.index(5.0)] < seen


def test_fixed_size__needs_rdp_and_says_so() -> None:
    event = FixedSizeSampled(3400, 136, Gaussian(4.0))
    with pytest.raises(PrivacyError, match='set accountant = "rdp"'):
        epsilon(event, 10, 1e-5, "pld")
    assert 0 < epsilon(event, 10, 1e-5, "rdp") < math.inf


# --- PLD against exact values ---


def gaussian_delta(sigma: float, eps: float) -> float:
    """Balle and Wang (2018), Theorem 8."""
    tail = stats.norm.cdf(0.5 / sigma - eps * sigma)
    return float(tail - math.exp(eps + stats.norm.logcdf(-0.5 / sigma - eps * sigma)))


def gaussian_epsilon(sigma: float, delta: float) -> float:
    return float(optimize.brentq(lambda eps: gaussian_delta(sigma, eps) - delta, 0, 500, xtol=1e-12))


@pytest.mark.parametrize(("sigma", "rounds"), [(1.0, 1), (50.7, 1000), (16.3, 1000), (200.0, 1000), (0.5, 3), (5.0, 1)])
def test_pld__full_participation_is_exact(sigma: float, rounds: int) -> None:
    """T rounds of σ are one of σ/√T."""
    exact = gaussian_epsilon(sigma / math.sqrt(rounds), 1e-5)
    for event in (Gaussian(sigma), poisson(sigma, 1.0)):
        assert exact * (1 - 1e-9) <= epsilon(event, rounds, 1e-5) <= exact * (1 + 5e-4)


@pytest.mark.parametrize(
    ("rate", "sigma", "delta"), [(0.04, 1.0, 1e-4), (0.5, 2.0, 1e-5), (0.01, 10.0, 1e-5), (0.001, 3.0, 1e-5)]
)
def test_pld__one_sampled_round_matches_quadrature(rate: float, sigma: float, delta: float) -> None:
    """Also where epsilon is as small as 7e-4: the discretisation is refined by itself."""
    sampled, base = mixture(rate, 1, sigma), plain(sigma)

    def leak(eps: float, one: Callable[[float], float], other: Callable[[float], float]) -> float:
        positive = lambda x: max(math.exp(one(x)) - math.exp(eps + other(x)), 0.0)  # noqa: E731
        cuts = np.linspace(-12 * sigma, 12 * sigma + 1, 400)
        return sum(integrate.quad(positive, a, b)[0] for a, b in pairwise(cuts))

    spent = epsilon(poisson(sigma, rate), 1, delta)
    worst = lambda eps: max(leak(eps, sampled, base), leak(eps, base, sampled))  # noqa: E731
    assert worst(spent) <= delta * (1 + 1e-6)  # an upper bound
    assert worst(spent * (1 - 1e-3)) > delta  # and a tight one


@pytest.mark.parametrize(("sigma", "expected"), [(2.178, 1.99936), (20.0, 0.142168), (200.0, 0.00817214)])
def test_pld__is_tight_for_small_epsilons_too(sigma: float, expected: float) -> None:
    """Against an interval of 1e-5 or less; a fixed 1e-3 would give 0.1456 and 0.0203 for the last two."""
    assert expected * (1 - 1e-5) <= epsilon(poisson(sigma), 1000, 1 / 3400) <= expected * (1 + 5e-4)


@pytest.mark.parametrize(
    ("rate", "sigma", "rounds", "delta"),
    [
        (0.001, 30.0, 10**5, 1e-6),
        (0.001, 100.0, 10**5, 1e-6),
        (0.1, 1000.0, 1000, 1e-5),
        (0.01, 300.0, 10**4, 1e-5),
    ],
)
def test_pld__many_sampled_rounds_match_the_central_limit(rate: float, sigma: float, rounds: int, delta: float) -> None:
    """Small losses add up to one Gaussian with 1/σ = p·√(T(e^(1/σ²) − 1)); skewness is below 4e-4 here."""
    limit = gaussian_epsilon(1 / (rate * math.sqrt(rounds * math.expm1(sigma**-2))), delta)
    assert limit * (1 - 1e-4) <= epsilon(poisson(sigma, rate), rounds, delta) <= limit * (1 + 1e-3)


def test_pld__is_never_looser_than_rdp() -> None:
    for sigma, rate, rounds in ((0.6, 0.01, 50), (1.0, 0.2, 10), (3.0, 0.04, 2000), (10.0, 1.0, 100)):
        event = poisson(sigma, rate)
        assert epsilon(event, rounds, 1e-5, "pld") <= epsilon(event, rounds, 1e-5, "rdp")


def test_pld__delta_below_its_rounding_is_refused() -> None:
    with pytest.raises(PrivacyError, match='too small for PLD over 1000 rounds; set accountant = "rdp"'):
        epsilon(poisson(1.0), 1000, 1e-13, "pld")
    assert epsilon(poisson(1.0), 1000, 1e-13, "rdp") < math.inf


def test_rdp__rounding_is_never_taken_for_perfect_privacy() -> None:
    """dp_accounting would read the negative divergences that rounding leaves here as epsilon = 0."""
    assert min(renyi(poisson(1e7, 1e-3))) >= 1e-15
    assert epsilon(poisson(1e7, 1e-3), 10**9, 1e-9, "rdp") > 0


def test_rdp__says_nothing_about_orders_that_do_not_converge(caplog: pytest.LogCaptureFixture) -> None:
    renyi(poisson(0.7654, 0.06))
    assert not caplog.records
