"""Roots: SciPy's to the last bit, and refused where there is none."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import brentq

from fedblur.privacy.root_finding import find_root

FUNCTIONS: list[Callable[[float, float], float]] = [
    lambda x, a: math.tanh(5 * (x - a)) + 1e-3 * (x - a),
    lambda x, a: (x - a) * (1 + 40 * (x - a) ** 2),
    lambda x, a: math.exp(3 * x) - math.exp(3 * a),
    lambda x, a: math.copysign(1.0, x - a),
    lambda x, a: math.log(2 + x) - math.log(2 + a),
    lambda x, a: math.floor(50 * (x - a)) + 0.5,
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("xtol", "rtol"), [(2e-12, 2.0**-50), (2.5e-5, 2.0**-50), (1e-12, 1e-12), (1e-300, 2.0**-50)])
def test_find_root__is_that_of_scipy_to_the_last_bit(
    function: Callable[[float, float], float], xtol: float, rtol: float
) -> None:
    rng = np.random.default_rng(0)
    for root, below, above in rng.uniform(0, 1, (40, 3)).tolist():
        points: list[list[float]] = [[], []]

        def seen(x: float, who: int, a: float = root, points: list[list[float]] = points) -> float:
            points[who].append(x)
            return function(x, a)

        low, high = root - below, root + above + 1e-3
        found = find_root(functools.partial(seen, who=0), low, high, xtol, rtol)
        assert found == brentq(functools.partial(seen, who=1), low, high, xtol=xtol, rtol=rtol)
        assert points[0] == points[1]


def test_find_root__at_an_end() -> None:
    assert find_root(lambda x: x, 0.0, 1.0) == 0.0
    assert find_root(lambda x: x - 1, 0.0, 1.0) == 1.0


def test_find_root__needs_a_change_of_sign() -> None:
    with pytest.raises(ValueError, match="the same sign at 1.0 and at 2.0"):
        find_root(lambda x: x, 1.0, 2.0)


def test_find_root__that_does_not_converge_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="in 100 steps"):
        find_root(lambda x: math.copysign(1.0, x - 1e-9), -1e300, 1e300, xtol=1e-320)
