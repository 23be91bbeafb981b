"""What dp_accounting is given in place of SciPy's slow modules: the same values, to the last bit."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy.signal import fftconvolve
from scipy.stats import norm

from fedblur.core.lazy import Lazy, standing_in
from fedblur.privacy.accountants import Normal, convolve

POINTS = np.concatenate([np.linspace(-45, 45, 2001), [0.0, -0.0, 1e-300, np.inf, -np.inf, np.nan]])
CHANCES = np.concatenate([np.linspace(0, 1, 1001), 10.0 ** -np.arange(1, 300, 7)])


@pytest.mark.parametrize("scale", [1.0, 0.3, 2.178, 1e5])
def test_normal__is_scipy_s_to_the_last_bit(scale: float) -> None:
    ours, theirs = Normal(scale=scale), norm(scale=scale)
    assert np.array_equal(ours.cdf(POINTS), theirs.cdf(POINTS), equal_nan=True)
    assert np.array_equal(ours.logcdf(POINTS), theirs.logcdf(POINTS), equal_nan=True)
    assert np.array_equal(ours.ppf(CHANCES), theirs.ppf(CHANCES))
    for point in (-3.0, 0.5, 7):
        assert ours.cdf(point) == theirs.cdf(point)
        assert type(ours.cdf(point)) is type(theirs.cdf(point))


@pytest.mark.parametrize(("left", "right"), [(1, 1), (1, 700), (700, 1), (700, 300), (5, 1)])
def test_convolve__is_scipy_s_to_the_last_bit(left: int, right: int) -> None:
    rng = np.random.default_rng(0)
    one, other = rng.random(left), rng.random(right)
    assert np.array_equal(convolve(one, other), fftconvolve(one, other))


EPSILONS = """
from fedblur.privacy.accounting import calibrate, epsilon
from fedblur.privacy.events import Composed, Gaussian, PoissonSampled, SelfComposed
sampled, other = PoissonSampled(0.04, Gaussian(2.2)), PoissonSampled(0.1, Gaussian(3.0))
mixed = Composed((sampled, SelfComposed(other, 30), Gaussian(9.0)))
for accountant in ("pld", "rdp"):
    print(*(epsilon(event, count, 1e-5, accountant).hex() for event in (sampled, mixed) for count in (1, 50)))
    print(calibrate(lambda s: PoissonSampled(0.04, Gaussian(s)), 1000, 2.0, 1e-4, accountant).hex())
"""


def test_epsilon__is_the_same_with_the_modules_themselves() -> None:
    real = "import scipy.optimize, scipy.signal, scipy.stats\n"
    seen = [
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        for code in (EPSILONS, real + EPSILONS)
    ]
    assert seen[0] == seen[1]
    assert "0x" in seen[0]


def test_lazy__names_that_are_given_come_first_and_others_from_the_module() -> None:
    module = Lazy("math", pi=3)
    assert module.pi == 3
    assert module.tau > 6
    with pytest.raises(AttributeError):
        module.nothing  # noqa: B018


def test_standing_in__leaves_what_was_imported_before_and_nothing_behind() -> None:
    before = sys.modules["scipy.stats"]
    with standing_in({"scipy.stats": Lazy("scipy.stats"), "fedblur_nowhere": Lazy("math", pi=3)}):
        assert sys.modules["scipy.stats"] is before
        import fedblur_nowhere  # type: ignore[import-not-found]

        assert fedblur_nowhere.pi == 3
    assert "fedblur_nowhere" not in sys.modules
