"""A root of a continuous function, by Brent's method (1973): as SciPy's `brentq`, without its slow import."""

from __future__ import annotations

import math
from collections.abc import Callable

_EPS = 2.0**-52
_MOST_STEPS = 100


def find_root(
    function: Callable[[float], float], low: float, high: float, xtol: float = 2e-12, rtol: float = 4 * _EPS
) -> float:
    """Return a point at most xtol + rtol·|x| away from where the function changes its sign.

    The floating-point operations are those of `scipy.optimize.brentq`, so the result is the same to the last bit.

        function(low) or function(high) = 0      that end
        the same sign at both ends               ValueError
        no convergence in 100 steps              RuntimeError
    """
    before, f_before, best, f_best = low, function(low), high, function(high)
    if f_before == 0:
        return before
    if f_best == 0:
        return best
    if (f_before > 0) == (f_best > 0):
        raise ValueError(f"the function has the same sign at {low} and at {high}: {f_before} and {f_best}")
    across = f_across = step = last_step = 0.0
    for _ in range(_MOST_STEPS):
        if (f_before > 0) != (f_best > 0):  # the root is between the last two points
            across, f_across = before, f_before
            step = last_step = best - before
        if abs(f_across) < abs(f_best):  # the nearer one to zero is the best
            before, best, across = best, across, best
            f_before, f_best, f_across = f_best, f_across, f_best
        tolerance = (xtol + rtol * abs(best)) / 2
        bisection = (across - best) / 2
        if f_best == 0 or abs(bisection) < tolerance:
            return best
        tried = math.inf
        if abs(last_step) > tolerance and abs(f_best) < abs(f_before):
            tried = _interpolate(before, f_before, best, f_best, across, f_across)
        if 2 * abs(tried) < min(abs(last_step), 3 * abs(bisection) - tolerance):
            last_step, step = step, tried
        else:
            last_step = step = bisection
        before, f_before = best, f_best
        best += step if abs(step) > tolerance else math.copysign(tolerance, bisection)
        f_best = function(best)
    raise RuntimeError(f"no root between {low} and {high} in {_MOST_STEPS} steps; the best is {best}")


def _interpolate(before: float, f_before: float, best: float, f_best: float, across: float, f_across: float) -> float:
    """Return the step from the best point by the secant, or by an inverse parabola through three points."""
    if before == across:
        return -f_best * (best - before) / (f_best - f_before)
    slope, slope_across = (f_before - f_best) / (before - best), (f_across - f_best) / (across - best)
    return -f_best * (f_across * slope_across - f_before * slope) / (slope_across * slope * (f_across - f_before))
