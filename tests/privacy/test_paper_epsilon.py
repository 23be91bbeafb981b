"""What the cut-off's share of delta changes in the epsilon of the paper's settings: next to nothing."""

from __future__ import annotations

import math

import pytest

from fedblur.core.errors import ConfigError, PrivacyError
from fedblur.privacy import accounting
from fedblur.privacy.accountants import INTERPRETERS
from fedblur.privacy.accounting import calibrate, epsilon, largest_epsilon
from fedblur.privacy.events import Gaussian, PoissonSampled, flatten

FEMNIST, CIFAR = (3400, 0.04, 1000), (1000, 0.06, 300)  # N, p, T; δ = 1/N


@pytest.mark.parametrize("target", [2.0, 4.0, 6.0, 8.0])
@pytest.mark.parametrize(("clients", "rate", "rounds"), [FEMNIST, CIFAR], ids=["femnist", "cifar"])
def test_paper__epsilon_changes_by_less_than_a_thousandth(
    clients: int, rate: float, rounds: int, target: float
) -> None:
    """Before, all of delta was the Gaussian's; now 2^-40 of it pays for noise that ends at 32 standard deviations."""
    delta = 1 / clients

    def before(sigma: float) -> float:
        return INTERPRETERS["pld"](flatten(PoissonSampled(rate, Gaussian(sigma)), rounds), delta)

    sigma = calibrate(lambda s: PoissonSampled(rate, Gaussian(s)), rounds, target, delta, "pld")
    now = epsilon(PoissonSampled(rate, Gaussian(sigma)), rounds, delta, "pld")
    print(
        f"N = {clients}, p = {rate}, T = {rounds}: sigma {sigma:.5f}, epsilon {before(sigma):.9f} before, {now:.9f} now"
    )
    assert before(sigma) <= now <= target
    assert now <= before(sigma) * 1.001
    assert now == pytest.approx(before(sigma), rel=1e-9)  # it is in fact far less than a thousandth
    assert now > target * 0.999


def test_cut_off__is_taken_out_of_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    event, seen = PoissonSampled(0.04, Gaussian(2.0)), []
    monkeypatch.setitem(INTERPRETERS, "pld", lambda releases, delta: seen.append(delta) or 1.0)
    accounting._spent.cache_clear()
    epsilon(event, 7, 1e-5)
    accounting._spent.cache_clear()
    assert seen == [1e-5 * (1 - 2.0**-40)]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_epsilon__that_the_cut_off_does_not_cover_is_infinite(accountant) -> None:
    assert largest_epsilon(1e-5) == pytest.approx(426.56, abs=0.01)
    assert 200 < epsilon(Gaussian(0.05), 1, 1e-5, accountant) <= largest_epsilon(1e-5)
    assert epsilon(Gaussian(0.03), 1, 1e-5, accountant) == math.inf


def test_calibrate__refuses_an_epsilon_that_the_cut_off_does_not_cover() -> None:
    with pytest.raises(PrivacyError, match="epsilon=430 is met with next to no noise"):
        calibrate(Gaussian, 1, 430.0, 1e-5)
    assert epsilon(Gaussian(calibrate(Gaussian, 1, 426.0, 1e-5)), 1, 1e-5) <= 426
    with pytest.raises(ConfigError, match="delta=0"):
        calibrate(Gaussian, 1, 430.0, 0.0)
