"""Accounting against published tables; its shape, its edges, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from fedblur.core.errors import ConfigError, PrivacyError
from fedblur.privacy.accountants import INTERPRETERS
from fedblur.privacy.accounting import (
    Accountant,
    _spent,
    adjacency,
    calibrate,
    epsilon,
    make_plan,
    parse_delta,
    rounds_within,
)
from fedblur.privacy.events import Composed, Event, FixedSizeSampled, Gaussian, PoissonSampled, SelfComposed
from fedblur.privacy.mechanisms.gaussian import Gaussian as GaussianMechanism
from fedblur.privacy.mechanisms.rounded_gaussian import TAIL
from fedblur.privacy.sampling import Fixed, Poisson

BOTH: list[Accountant] = ["pld", "rdp"]


def poisson(sigma: float, rate: float = 0.04) -> PoissonSampled:
    return PoissonSampled(rate, Gaussian(sigma))


def at_rate(rate: float) -> Callable[[float], Event]:
    return lambda sigma: poisson(sigma, rate)


# --- published tables: (N, p, T, delta, epsilon, σ RDP, σ PLD) ---

ONE_OVER_N = [
    *((3400, 0.04, 1000, "1/N", *row) for row in [
        (2, 2.382, 2.178), (4, 1.449, 1.348), (6, 1.137, 1.068), (8, 0.979, 0.924)]),
    *((100, 0.06, 300, "1/N", *row) for row in [
        (2, 1.540, 1.363), (4, 1.050, 0.951), (6, 0.870, 0.795), (8, 0.768, 0.708)]),
    *((500, 0.06, 300, "1/N", *row) for row in [
        (2, 1.780, 1.602), (4, 1.162, 1.067), (6, 0.946, 0.875), (8, 0.830, 0.771)]),
    *((1000, 0.06, 300, "1/N", *row) for row in [
        (2, 1.876, 1.699), (4, 1.207, 1.113), (6, 0.976, 0.907), (8, 0.854, 0.796)]),
    *((5000, 0.06, 300, "1/N", *row) for row in [
        (2, 2.087, 1.912), (4, 1.306, 1.214), (6, 1.042, 0.975), (8, 0.905, 0.849)]),
    *((10000, 0.06, 300, "1/N", *row) for row in [
        (2, 2.173, 1.999), (4, 1.346, 1.256), (6, 1.069, 1.003), (8, 0.925, 0.871)]),
]  # fmt: skip
SMALLER_DELTA = [
    *((3400, 0.04, 1000, "N^-1.1", *row) for row in [
        (2, 2.505, 2.302), (4, 1.505, 1.405), (6, 1.172, 1.104), (8, 1.004, 0.952)]),
    *((500, 0.06, 300, "N^-1.1", *row) for row in [
        (2, 1.866, 1.689), (4, 1.202, 1.108), (6, 0.973, 0.903), (8, 0.851, 0.793)]),
    *((1000, 0.06, 300, "N^-1.1", *row) for row in [
        (2, 1.969, 1.793), (4, 1.250, 1.157), (6, 1.004, 0.937), (8, 0.877, 0.819)]),
]  # fmt: skip


@pytest.mark.parametrize(("n", "p", "t", "delta", "target", "rdp", "pld"), ONE_OVER_N + SMALLER_DELTA)
def test_calibration__published_noise_multipliers(
    n: int, p: float, t: int, delta: str, target: float, rdp: float, pld: float
) -> None:
    """The σ that meets the target lies within 0.1 % and the printed precision of the published one."""
    for accountant, sigma in (("rdp", rdp), ("pld", pld)):
        room = 1e-3 * sigma + 5e-4
        spent = [epsilon(poisson(s, p), t, parse_delta(delta, n), accountant) for s in (sigma - room, sigma + room)]
        assert spent[0] > target >= spent[1]


@pytest.mark.parametrize(
    ("t", "target", "p", "sigma", "ratio"),
    [
        (100, 2, 0.01, 0.63, 0.53), (100, 8, 0.2, 1.25, 5.39), (100, 2, 1.0, 16.0, 2.10),
        (300, 2, 0.1, 2.92, 2.00), (300, 8, 0.1, 1.13, 5.17), (1000, 2, 0.2, 10.2, 2.09),
        (1000, 8, 0.01, 0.54, 1.99), (1000, 2, 1.0, 50.7, 2.10), (1000, 8, 1.0, 16.3, 6.55),
    ],
)  # fmt: skip
def test_calibration__published_cohorts_and_rounds(t: int, target: float, p: float, sigma: float, ratio: float) -> None:
    found = calibrate(at_rate(p), t, target, 1 / 3400)
    assert found == pytest.approx(sigma, abs=0.0055 if sigma < 10 else 0.055)
    assert math.sqrt(t) * p * 3400 / (found * math.sqrt(1_018_174)) == pytest.approx(ratio, abs=0.006)


def test_calibration__published_fixed_size_relative_to_twice_the_clip_norm() -> None:
    """dp_accounting alone gives 4.58 and 1.58 (its σ is over the sensitivity 2S); ours is over S."""
    for target, sigma in ((2, 2 * 4.58), (8, 2 * 1.58)):
        make = lambda s: FixedSizeSampled(3400, 136, Gaussian(s))  # noqa: E731
        assert calibrate(make, 1000, target, 1 / 3400, "rdp") == pytest.approx(sigma, rel=2e-3)


# --- shape ---


@pytest.mark.parametrize("accountant", BOTH)
def test_epsilon__falls_with_noise_rises_with_rounds_and_rate(accountant: Accountant) -> None:
    by_sigma = [epsilon(poisson(s), 300, 1e-4, accountant) for s in np.geomspace(0.5, 50, 20)]
    assert by_sigma == sorted(by_sigma, reverse=True)
    by_rounds = [epsilon(poisson(1.2), t, 1e-4, accountant) for t in (0, 1, 2, 3, 7, 50, 51, 52, 999, 1000, 1001)]
    assert by_rounds == sorted(by_rounds)
    by_rate = [epsilon(poisson(1.2, p), 100, 1e-4, accountant) for p in (0.001, 0.01, 0.1, 0.3, 0.9, 1.0)]
    assert by_rate == sorted(by_rate)
    by_delta = [epsilon(poisson(1.2), 100, d, accountant) for d in (1e-9, 1e-6, 1e-3, 1e-1)]
    assert by_delta == sorted(by_delta, reverse=True)


@pytest.mark.parametrize("accountant", BOTH)
def test_epsilon__nesting_makes_no_difference(accountant: Accountant) -> None:
    event = poisson(1.2)
    once = epsilon(event, 12, 1e-4, accountant)
    assert epsilon(SelfComposed(event, 4), 3, 1e-4, accountant) == once
    assert epsilon(Composed((event, SelfComposed(event, 5))), 2, 1e-4, accountant) == once


@pytest.mark.parametrize("accountant", BOTH)
def test_epsilon__different_releases_add_up(accountant: Accountant) -> None:
    """Gaussians compose exactly: 1/σ² adds up."""
    both = epsilon(Composed((Gaussian(2.0), Gaussian(3.0))), 1, 1e-5, accountant)
    assert both == pytest.approx(epsilon(Gaussian((1 / 4 + 1 / 9) ** -0.5), 1, 1e-5, accountant), rel=1e-3)
    mixed = epsilon(Composed((poisson(1.0), poisson(2.0, 0.1))), 50, 1e-5, accountant)
    assert mixed > max(epsilon(poisson(1.0), 50, 1e-5, accountant), epsilon(poisson(2.0, 0.1), 50, 1e-5, accountant))


@pytest.mark.parametrize("accountant", BOTH)
def test_epsilon__edges(accountant: Accountant) -> None:
    assert epsilon(poisson(0.0), 1, 1e-5, accountant) == math.inf
    assert epsilon(Gaussian(0.0), 1, 1e-5, accountant) == math.inf
    assert epsilon(Composed((Gaussian(0.0), Gaussian(9.0))), 1, 1e-5, accountant) == math.inf
    assert epsilon(poisson(0.0), 0, 1e-5, accountant) == 0
    assert epsilon(poisson(1e6), 1, 0.1, accountant) == 0
    assert epsilon(poisson(0.02), 1000, 1e-5, accountant) > 1e4
    for delta in (0.0, 1.0, -1e-5, math.nan):
        with pytest.raises(ConfigError, match=r"delta=.* must be in \(0, 1\)"):
            epsilon(poisson(1.0), 1, delta, accountant)
    with pytest.raises(ConfigError, match="count=-1"):
        epsilon(poisson(1.0), -1, 1e-5, accountant)


def test_epsilon__what_the_noise_leaves_out_is_paid_for_out_of_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise ends at 32 deviations: 2^64 draws of it and an epsilon of 350 still fit into what is taken off delta."""
    seen: list[float] = []
    monkeypatch.setitem(INTERPRETERS, "rdp", lambda releases, delta: seen.append(delta) or 1.0)
    for delta in (1e-2, 1e-5, 2.0**-100):
        _spent.__wrapped__(Gaussian(1.0), 3, delta, "rdp")
        assert 2.0**64 * (1 + math.exp(350)) * TAIL <= delta - seen[-1] <= 1e-9 * delta


def test_epsilon__what_rounding_may_hide_is_paid_for_out_of_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    """The FFT of PLD is off by up to 7e-17 a round in delta (`accountants.py`)."""
    seen: list[float] = []
    monkeypatch.setattr(PLDAccountant, "get_epsilon", lambda self, delta: seen.append(delta) or 1.0)
    for rounds in (10, 5000):
        _spent.__wrapped__(PoissonSampled(0.1, Gaussian(1.0)), rounds, 1e-6, "pld")
        assert 7e-16 * rounds <= 1e-6 - seen[-1] <= 1e-9


def test_epsilon__fixed_size_edges() -> None:
    assert epsilon(FixedSizeSampled(100, 10, Gaussian(0.0)), 1, 1e-5, "rdp") == math.inf
    assert epsilon(FixedSizeSampled(100, 10, Gaussian(1e5)), 1, 0.1, "rdp") == 0


def test_pld__unsampled_clients_cost_nothing() -> None:
    assert epsilon(PoissonSampled(1e-4, Gaussian(0.1)), 1, 1e-2) == 0


# --- refusals and adjacency ---


@dataclass(frozen=True)
class Unheard(Event):
    noise_multiplier: float = 1.0


@pytest.mark.parametrize("accountant", BOTH)
@pytest.mark.parametrize(
    "event",
    [
        Unheard(),
        PoissonSampled(0.1, Unheard()),
        PoissonSampled(1.0, Unheard()),
        FixedSizeSampled(10, 2, Unheard()),
        Composed((Gaussian(1.0), Unheard())),
        PoissonSampled(0.1, PoissonSampled(0.1, Gaussian(1.0))),
        PoissonSampled(0.1, SelfComposed(Gaussian(1.0), 2)),
    ],
)
def test_invariant_4__unknown_event_is_refused(event: Event, accountant: Accountant) -> None:
    with pytest.raises(PrivacyError, match="an unknown event is refused"):
        epsilon(event, 1, 1e-5, accountant)


def test_invariant_4__unknown_accountant_is_refused() -> None:
    with pytest.raises(PrivacyError, match="accountant='moments' is unknown"):
        epsilon(Gaussian(1.0), 1, 1e-5, "moments")  # type: ignore[arg-type]


def test_adjacency__follows_the_event() -> None:
    assert adjacency(Gaussian(1.0)) == "add or remove one client"
    assert adjacency(SelfComposed(poisson(1.0), 3)) == "add or remove one client"
    assert adjacency(FixedSizeSampled(10, 2, Gaussian(1.0))) == "replace one client"
    with pytest.raises(PrivacyError, match="an unknown event is refused"):
        adjacency(PoissonSampled(0.1, Unheard()))


def test_adjacency__a_mixture_is_refused() -> None:
    mixed = Composed((Gaussian(1.0), FixedSizeSampled(10, 2, Gaussian(1.0))))
    with pytest.raises(PrivacyError, match="different neighbours"):
        epsilon(mixed, 1, 1e-5, "rdp")


# --- calibration ---


@pytest.mark.parametrize("accountant", BOTH)
@pytest.mark.parametrize(
    ("rate", "rounds", "target", "delta"),
    [
        (0.04, 1000, 2.0, 1 / 3400),
        (0.04, 1000, 0.01, 1e-5),
        (0.2, 1, 1.0, 1e-6),
        (0.1, 50, 60.0, 1e-4),
        (1.0, 9, 3.0, 0.01),
    ],
)
def test_calibrate__safe_and_within_tolerance(
    rate: float, rounds: int, target: float, delta: float, accountant: Accountant
) -> None:
    sigma = calibrate(at_rate(rate), rounds, target, delta, accountant)
    assert epsilon(poisson(sigma, rate), rounds, delta, accountant) <= target
    assert epsilon(poisson(sigma * (1 - 1.5e-4), rate), rounds, delta, accountant) > target


def test_calibrate__edges() -> None:
    assert calibrate(at_rate(0.1), 10, math.inf, 1e-5) == 0
    for target in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="must be above 0"):
            calibrate(at_rate(0.1), 10, target, 1e-5)
    with pytest.raises(ConfigError, match="rounds=0"):
        calibrate(at_rate(0.1), 0, 1.0, 1e-5)


@pytest.mark.parametrize(
    ("rounds", "target", "delta", "way_out"),
    [
        (10**5, 1e-9, 1e-9, "cannot be reached.*raise epsilon or delta, or lower rounds or sample_rate"),
        (10, 1e9, 1e-5, "next to no noise.*set epsilon = inf"),
        (1, 1.0, 0.5, "next to no noise.*lower epsilon or delta"),
    ],
)
def test_calibrate__out_of_reach_is_one_line_with_a_way_out(
    rounds: int, target: float, delta: float, way_out: str
) -> None:
    with pytest.raises(PrivacyError, match=way_out) as caught:
        calibrate(at_rate(0.1), rounds, target, delta, "pld")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("accountant", BOTH)
def test_rounds_within__is_the_last_that_fits(accountant: Accountant) -> None:
    event = poisson(2.178)
    allowed = rounds_within(event, 1.5, 1 / 3400, accountant, at_most=10**9)
    assert epsilon(event, allowed, 1 / 3400, accountant) <= 1.5 < epsilon(event, allowed + 1, 1 / 3400, accountant)
    assert rounds_within(event, 1.5, 1 / 3400, accountant, at_most=100) == 100


def test_rounds_within__agrees_with_calibration() -> None:
    """A run that was calibrated for T rounds may run all of them: each shorter prefix fits too."""
    for rounds in (1, 7, 100, 1000):
        sigma = calibrate(at_rate(0.04), rounds, 2.0, 1e-4)
        assert rounds_within(poisson(sigma), 2.0, 1e-4, at_most=rounds) == rounds


def test_rounds_within__edges() -> None:
    assert rounds_within(poisson(0.0), 1.0, 1e-5, at_most=10) == 0
    assert rounds_within(poisson(0.0), math.inf, 1e-5, at_most=10) == 10
    assert rounds_within(poisson(1.0), 1e-6, 1e-5, at_most=10) == 0
    assert rounds_within(poisson(1.0), 1.0, 1e-5, at_most=0) == 0


# --- delta and plans ---


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1/N", 1 / 3400),
        ("1 / n", 1 / 3400),
        ("N^-1.1", 3400**-1.1),
        ("N^-2", 3400**-2),
        ("1e-5", 1e-5),
        (1e-5, 1e-5),
    ],
)
def test_parse_delta__numbers_and_powers_of_n(value: float | str, expected: float) -> None:
    assert parse_delta(value, 3400) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("value", [0, 1, 1.5, -0.1, math.nan, "0", "2", "inf", "N", "N^1.1", "one", "", "1/N2", True])
def test_parse_delta__anything_else_is_refused(value: float | str) -> None:
    with pytest.raises(ConfigError, match="delta="):
        parse_delta(value, 3400)


def test_parse_delta__one_client_has_no_1_over_n() -> None:
    with pytest.raises(ConfigError, match=r"delta=1/N \(1 for 1 clients\)"):
        parse_delta("1/N", 1)


def test_plan__from_epsilon_or_from_noise() -> None:
    sampler = Poisson().sampler(3400, 0.04)
    plan = make_plan(sampler, GaussianMechanism(), rounds=1000, epsilon=2.0)
    assert plan.noise_multiplier == pytest.approx(2.178, abs=5e-4)
    assert plan.delta == 1 / 3400
    assert plan.event() == PoissonSampled(0.04, Gaussian(plan.noise_multiplier))
    assert plan.epsilon_target == 2.0
    assert plan.epsilon(0) == 0 < plan.epsilon(10) < plan.epsilon() <= 2.0
    again = make_plan(sampler, GaussianMechanism(), rounds=1000, noise_multiplier=plan.noise_multiplier)
    assert again.epsilon_target == plan.epsilon()


def test_plan__without_noise() -> None:
    plan = make_plan(Fixed().sampler(10, 0.5), GaussianMechanism(), rounds=3, epsilon=math.inf)
    assert plan.noise_multiplier == 0
    assert plan.epsilon_target == math.inf


def test_plan__exactly_one_of_epsilon_and_noise() -> None:
    sampler = Poisson().sampler(10, 0.5)
    with pytest.raises(ConfigError, match="exactly one"):
        make_plan(sampler, GaussianMechanism(), rounds=3)
    with pytest.raises(ConfigError, match="exactly one"):
        make_plan(sampler, GaussianMechanism(), rounds=3, epsilon=1.0, noise_multiplier=1.0)
