"""Discrete noise accounted: every bound against divergences by summation, and the published figures."""

from __future__ import annotations

import json
import math
from itertools import product

import numpy as np
import pytest

from fedblur.core.errors import PrivacyError
from fedblur.privacy.accountants import renyi
from fedblur.privacy.accounting import epsilon, make_plan
from fedblur.privacy.events import (
    DistributedDiscreteGaussian,
    FixedSizeSampled,
    PoissonSampled,
    Skellam,
    from_json,
    to_json,
)
from fedblur.privacy.mechanisms.base import Conditions
from fedblur.privacy.mechanisms.ddgauss import DDGauss
from fedblur.privacy.mechanisms.skellam import Skellam as SkellamMechanism
from fedblur.privacy.renyi_discrete import convolution_gap, divergence, poisson_sampled
from fedblur.privacy.sampling import PoissonSampler
from tests.privacy.mechanisms import laws

REACH = 150
ALPHAS = np.array([2.0, 3.0, 5.0, 9.0])


def ddg(noise_std: float, sensitivity: float, dimension: int = 1, shares: int = 1, bound: str = "tight"):
    return DistributedDiscreteGaussian(noise_std, sensitivity, dimension, shares, bound)


def worst(p: np.ndarray, q: np.ndarray, order: float) -> float:
    """In both directions."""
    return max(laws.renyi(p, q, order), laws.renyi(q, p, order))


# --- the curves against summation ---

SHARES = list(product([0.5, 0.7, 1.0, 2.0], [1, 2, 4], [1, 3]))  # share's deviation, shares, shift


@pytest.mark.parametrize(("tau", "n", "shift"), SHARES)
def test_ddgauss__bounds_a_sum_of_shares(tau: float, n: int, shift: int) -> None:
    law = laws.summed(laws.discrete_gaussian(tau, REACH), n)
    bound = divergence(ddg(math.sqrt(n) * tau, shift, shares=n), [1.3, *ALPHAS])
    found = [worst(laws.shifted(law, shift), law, order) for order in (1.3, *ALPHAS)]
    assert np.all(bound >= np.array(found) * (1 - 1e-9) - 1e-12)
    if n == 1:  # one discrete Gaussian shifted by a whole number: α·shift²/2τ² is exact at whole orders
        np.testing.assert_allclose(bound[1:], found[1:], rtol=1e-6)


@pytest.mark.parametrize(("std", "n", "shift"), list(product([1.2, 1.6, 3.0], [1, 2, 4], [0, 1, 2])))
def test_ddgauss__covers_a_client_that_brings_its_share(std: float, n: int, shift: int) -> None:
    """n shares of variance std²/n against n + 1 of std²/(n+1): two different laws, shifted or not."""
    without = laws.summed(laws.discrete_gaussian(std / math.sqrt(n), REACH), n)
    joined = laws.summed(laws.discrete_gaussian(std / math.sqrt(n + 1), REACH), n + 1)
    event = ddg(std, max(shift, 1), shares=n + 1)
    for index, order in enumerate(ALPHAS):
        assert divergence(event, ALPHAS)[index] >= worst(laws.shifted(joined, shift), without, order) - 1e-12
        for rate in (0.05, 0.5):
            mixture = laws.mixed(rate, laws.shifted(joined, shift), without)
            assert poisson_sampled(event, rate, ALPHAS)[index] >= worst(mixture, without, order) - 1e-12


def test_ddgauss__several_coordinates_add_up() -> None:
    tau, n, shifts = 0.55, 3, (1, 0, 2)
    law = laws.summed(laws.discrete_gaussian(tau, REACH), n)
    event = ddg(math.sqrt(n) * tau, math.sqrt(sum(s**2 for s in shifts)), len(shifts), n)
    for order, bound in zip(ALPHAS, divergence(event, ALPHAS)):
        assert bound >= sum(worst(laws.shifted(law, s), law, order) for s in shifts)


@pytest.mark.parametrize(("variance", "shift"), list(product([0.3, 1.0, 4.0, 20.0], [1, 2, 4])))
def test_skellam__bounds_the_divergence(variance: float, shift: int) -> None:
    law = laws.skellam(variance, REACH)
    bound = divergence(Skellam(math.sqrt(variance), shift, 1, "tight"), ALPHAS)
    found = np.array([worst(laws.shifted(law, shift), law, order) for order in ALPHAS])
    assert np.all(bound >= found * (1 - 1e-9))
    if variance == 20 and shift == 1:
        np.testing.assert_allclose(bound, found, rtol=0.12)  # and is close where noise is large


def test_skellam__a_fractional_order_takes_the_next_whole_one() -> None:
    event = Skellam(3.0, 2.0, 10, "tight")
    assert divergence(event, [2.5])[0] == divergence(event, [3.0])[0] > divergence(event, [2.0])[0]


@pytest.mark.parametrize("kind", ["ddgauss", "skellam"])
@pytest.mark.parametrize(("std", "shift", "rate"), list(product([0.8, 2.0, 5.0], [1, 3], [0.02, 0.3])))
def test_sampling__tight_bounds_both_directions(kind: str, std: float, shift: int, rate: float) -> None:
    law = laws.discrete_gaussian(std, REACH) if kind == "ddgauss" else laws.skellam(std**2, REACH)
    mixture = laws.mixed(rate, laws.shifted(law, shift), law)
    tight, general = (
        poisson_sampled(ddg(std, shift, bound=b) if kind == "ddgauss" else Skellam(std, shift, 1, b), rate, ALPHAS)
        for b in ("tight", "general")
    )
    found = [worst(mixture, law, order) for order in ALPHAS]
    assert np.all(tight >= np.array(found) * (1 - 1e-9))
    assert np.all(general >= tight)
    if kind == "ddgauss":
        np.testing.assert_allclose(tight, found, rtol=1e-5)  # one discrete Gaussian: the sum is the divergence


@pytest.mark.parametrize("shares", [2, 7, 12])
def test_sampling__tight_pays_for_a_client_that_changes_the_noise(shares: int) -> None:
    """n shares become n + 1, and neither law is symmetric: τd'(α − ½)/(α − 1) on top of the binomial sum."""
    rate, event = 0.05, ddg(1.2 * math.sqrt(shares), 1.5, 8, shares)
    found = poisson_sampled(event, rate, ALPHAS)
    gap = convolution_gap(event.noise_std, shares)
    for a, bound in zip(map(int, ALPHAS), found):
        law = [math.comb(a, l) * (1 - rate) ** (a - l) * rate**l for l in range(a + 1)]  # noqa: E741
        each = np.concatenate([[0.0, 0.0], divergence(event, np.arange(2.0, a + 1))])
        plain = math.log(sum(w * math.exp((l - 1) * e) for l, (w, e) in enumerate(zip(law, each)))) / (a - 1)  # noqa: E741
        assert gap * 8 > 1e-9
        assert bound - plain == pytest.approx(gap * 8 * (a - 0.5) / (a - 1), rel=1e-4)


def test_sampling__small_divergences_keep_their_digits() -> None:
    """At order 2 the bound is log(1 + p²(e^x − 1)), with x far below the rounding of 1."""
    x = (1 / 1e6) ** 2
    found = poisson_sampled(ddg(1e6, 1.0), 1e-3, [2.0])[0]
    assert found == pytest.approx(1e-6 * x, rel=1e-9)


def test_sampling__never_exceeds_no_sampling() -> None:
    event = ddg(0.6, 2.0)
    curve, plain = renyi(PoissonSampled(0.9, event)), renyi(event)
    assert np.all(curve <= plain)
    assert np.any(curve < plain)
    np.testing.assert_array_equal(renyi(PoissonSampled(1.0, event)), plain)


# --- τ_n ---


def test_convolution_gap__one_share_has_none_and_many_grow() -> None:
    assert convolution_gap(3.0, 1) == 0
    assert 0 < convolution_gap(3.0, 5) < convolution_gap(3.0, 6) < convolution_gap(3.0, 36)
    assert convolution_gap(3.0, 37) == math.inf  # shares below half a step


def test_convolution_gap__bounds_the_log_ratio_of_laws() -> None:
    for tau, n in product([0.5, 0.6, 1.0], [2, 3, 6]):
        law = laws.summed(laws.discrete_gaussian(tau, 60), n)
        one = laws.discrete_gaussian(math.sqrt(n) * tau, 60)
        gap = np.abs(law - one)[60 - int(8 * tau) : 60 + int(8 * tau) + 1].max()  # where dropped mass is no matter
        assert 0 < gap <= convolution_gap(math.sqrt(n) * tau, n) / 2 + 1e-12


def test_convolution_gap__long_sums_are_bounded_from_above() -> None:
    j = np.arange(1, 20_000)
    exact = 10 * np.exp(-2 * math.pi**2 * 0.6**2 * j / (j + 1)).sum()
    assert exact <= convolution_gap(0.6 * math.sqrt(20_000), 20_000) <= exact * 1.001


# --- published figures ---

EMNIST = PoissonSampler(3400, 0.04)
CNN_B, RESNET = 1_018_174, 11_199_486


def plan(mechanism, target: float, sampler=EMNIST, rounds: int = 1000, parameters: int = CNN_B):
    bound = mechanism.bind(Conditions(parameters, 0.03, sampler.expected_cohort, sampler.clients))
    return make_plan(sampler, bound, rounds=rounds, accountant="rdp", epsilon=target), bound


@pytest.mark.parametrize(
    ("target", "tight", "general", "step", "share"),
    [
        (2, 2.409, 3.964, 8.86e-6, 700), (4, 1.463, 1.640, 5.38e-6, 700),
        (6, 1.151, 1.223, 4.24e-6, 699), (8, 0.982, 1.048, 3.64e-6, 695),
    ],
)  # fmt: skip
def test_pin__effective_multipliers_at_16_bits(
    target: float, tight: float, general: float, step: float, share: float
) -> None:
    found, mechanism = plan(DDGauss(), target)
    grid = mechanism.grid(found.noise_multiplier)
    assert found.noise_multiplier == pytest.approx(tight, rel=5e-3)
    assert grid.step(0.03) == pytest.approx(step, rel=1e-2)  # the published ones are from a coarse bisection
    assert grid.noise_steps / math.sqrt(136) == pytest.approx(share, rel=1e-2)
    assert plan(DDGauss(bound="general"), target)[0].noise_multiplier == pytest.approx(general, rel=5e-3)
    assert found.epsilon() <= target


@pytest.mark.parametrize(
    ("bits", "sigma", "inflation"), [(20, 0.980, 1.000), (14, 1.012, 1.032), (12, 5.169, 5.27)]
)  # fmt: skip
def test_pin__other_bits_at_epsilon_8(bits: int, sigma: float, inflation: float) -> None:
    found, mechanism = plan(DDGauss(bits=bits), 8)
    assert found.noise_multiplier == pytest.approx(sigma, rel=5e-3)
    assert mechanism.grid(found.noise_multiplier).inflation == pytest.approx(inflation, rel=5e-3)


def test_pin__resnet_and_cifar() -> None:
    assert plan(DDGauss(), 8, parameters=RESNET)[0].noise_multiplier == pytest.approx(1.011, rel=1e-2)  # less padding
    assert plan(DDGauss(bits=18), 8, parameters=RESNET)[0].noise_multiplier == pytest.approx(0.982, rel=5e-3)
    cifar, _ = plan(DDGauss(), 8, PoissonSampler(1000, 0.06), 300, 1_405_258)
    assert cifar.noise_multiplier == pytest.approx(0.879, rel=5e-3)


def test_pin__exact_mode_pays_nothing_at_16_bits_and_skellam_next_to_nothing() -> None:
    fast = plan(DDGauss(), 4)[0].noise_multiplier
    assert plan(DDGauss(mode="exact"), 4)[0].noise_multiplier == pytest.approx(fast, rel=1e-12)
    assert fast < plan(SkellamMechanism(), 4)[0].noise_multiplier < 1.001 * fast


def test_exact_mode__pays_for_shares_that_are_nearly_too_small() -> None:
    conditions = Conditions(1000, 1.0, 50, 500)
    coarse = [DDGauss(bits=7, mode=mode).bind(conditions).event(3.0) for mode in ("fast", "exact")]
    assert coarse[0].shares == 1
    assert coarse[1].shares == 501  # every client of a neighbouring population may take part
    fast, exact = (epsilon(PoissonSampled(0.1, event), 10, 1e-3, "rdp") for event in coarse)
    assert fast < exact


# --- refusals and the ledger ---

EVENTS = [ddg(700.0, 3400.0, 1024, 137), Skellam(700.0, 3400.0, 1024, "general")]


@pytest.mark.parametrize("event", EVENTS)
def test_event__survives_the_ledger(event) -> None:
    sampled = PoissonSampled(0.04, event)
    assert from_json(json.loads(json.dumps(to_json(sampled)))) == sampled


@pytest.mark.parametrize("event", EVENTS)
def test_pld__refuses_discrete_noise_with_the_way_out(event) -> None:
    for release in (event, PoissonSampled(0.04, event)):
        with pytest.raises(PrivacyError, match='set accountant = "rdp"'):
            epsilon(release, 3, 1e-3, "pld")


@pytest.mark.parametrize("event", EVENTS)
def test_rdp__refuses_fixed_size_cohorts_of_discrete_noise(event) -> None:
    with pytest.raises(PrivacyError, match='set sampling = "poisson"'):
        epsilon(FixedSizeSampled(100, 10, event), 3, 1e-3, "rdp")


def test_event__no_noise_is_no_privacy() -> None:
    for event in (ddg(0.0, 5.0), Skellam(0.0, 5.0, 3, "tight")):
        assert epsilon(PoissonSampled(0.1, event), 1, 1e-3, "rdp") == math.inf
        assert epsilon(event, 1, 1e-3, "rdp") == math.inf


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((-1.0, 1.0, 1, 1, "tight"), "noise_std=-1.0"),
        ((1.0, 0.0, 1, 1, "tight"), "sensitivity=0.0"),
        ((1.0, 1.0, 1, 0, "tight"), "shares=0"),
        ((1.0, 1.0, 1, 1, "loose"), "bound='loose'"),
    ],
)
def test_event__refuses_what_makes_no_sense(values: tuple[float, float, int, int, str], message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        DistributedDiscreteGaussian(*values)
