"""Whole numbers that follow a rounded Gaussian exactly: P(n) = Φ((n + ½)/s) − Φ((n − ½)/s), for any s up to 2^40.

Why rounded: for whole x and a real g, x + round(g) = round(x + g). So a sum of whole numbers plus this noise is what
rounding makes of the Gaussian mechanism's output, and costs no more (docs/exact-noise.md has the proof).

Rejection with 512 bins of width 1/16. Let h(x) = exp(−x²/2). One proposal takes three random words:

    word 0    a bin i with probability W_i/2^63 (alias table, whole numbers), and a sign
    word 1    u, the first 64 bits of a uniform real: x = (i + u)/16
    word 2    r, the first 64 bits of a uniform real: accept if r < M·h(x)/W_i, where W_i ≥ M·h(i/16)
    result    ± round(s·x)

In real arithmetic the accepted x has a density in proportion to h(x), whatever the W_i are. Floating point only sorts
out the clear cases: each comparison is made with a margin far above its rounding error, and a proposal that falls
inside the margin (about one in 2^39 for the acceptance, one in 2^17 for rounding at s = 2^30) is decided with rational
numbers and as many more random bits as that takes. So the law is exact but for one thing: |x| < 32. What lies beyond
has probability 2·Φ(−32) < 2^-743, which `accounting.py` pays for out of delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedblur.core.errors import PrivacyError
from fedblur.core.lazy import torch
from fedblur.core.rng import Keystream, Lane

if TYPE_CHECKING:
    from torch import Tensor

# Floating point only sorts out the clear cases: a comparison is trusted if it holds with this margin, else it is
# decided with rational numbers. More than twice the relative error of an acceptance probability, and four times the
# absolute error of the 64 bits that it is compared with.
MARGIN, OPEN = 2.0**-40, 2.0**-62
ROUNDING = 2.0**-48  # relative error of what is rounded to a whole number
# At least what the samplers lack beyond 32 standard deviations: 2·Φ(−32) = 1.1e-224 of a Gaussian, 2·exp(−512) of a
# discrete Gaussian or a Poisson variable (Chernoff).
TAIL = 2.0**-737
TOTAL = 2**63  # what a table's weights add up to

_LANE = 2**15  # coordinates drawn together: their arrays fit into a core's cache
_AHEAD = 2**15  # coordinates from which a draw is worth a thread
_THREADS = 4

Values = NDArray[np.int64]
Words = NDArray[np.uint64]
# [3, n] words → values, and whether each is accepted
Propose = Callable[[Words, Lane], tuple[Values, NDArray[np.bool_]]]

BINS, PER_UNIT = 512, 16  # |x| < 32
LARGEST = 2.0**40  # s
_COLUMN = TOTAL // BINS
# Relative error of M·h(x)/W_i in float64: x has two roundings of 2^-53, so x²/2 ≤ 512 is off by at most 1.25·2^-42, and
# exp of it by as large a share; exp itself adds 4 units in the last place, the products 3 roundings. Together below
# 2^-41, half of MARGIN. Absolute error of r: 2^-53 of itself, and the 2^-64 that its bits leave open: OPEN is four
# times that. Relative error of s·x: below 2^-51, an eighth of ROUNDING; what word 1 leaves open is s·2^-68.
REST = 2.0**-60


@dataclass(frozen=True)
class Table:
    """The bins: whole weights, their alias table, and what the clear cases need."""

    top: int  # M
    weights: tuple[int, ...]  # W_i
    cut: NDArray[np.uint64]  # [512] below: the column's own bin; from there on: its alias
    alias: NDArray[np.intp]
    scale: NDArray[np.float64]  # M/W_i
    sure: NDArray[np.float64]  # r below this is accepted wherever in the bin x lies


@cache
def table() -> Table:
    """Make the bins, in whole numbers and decimals of 60 digits: once a process."""
    with localcontext(Context(prec=60)):
        heights = [(-((Decimal(i) / PER_UNIT) ** 2) / 2).exp() for i in range(BINS + 1)]
        top = int((TOTAL - 2 * BINS) / sum(heights[:BINS]))
        weights = [int(top * height) + 1 for height in heights[:BINS]]  # above M·h(i/16), to the last digit
        weights[0] += TOTAL - sum(weights)
        lowest = [float(top * heights[i + 1] / weights[i]) for i in range(BINS)]
    cut, alias = aliases(weights)
    return Table(
        top,
        tuple(weights),
        np.array(cut, dtype=np.uint64),
        np.array(alias, dtype=np.intp),
        np.array([top / weight for weight in weights]),
        np.maximum(np.array(lowest) * (1 - MARGIN) - OPEN, 0.0),
    )


def draw(scale: float, count: int, source: Keystream, threads: int = 1) -> Values:
    """Draw `count` independent values with s = `scale`. The result depends on the key alone, not on threads.

    scale = 0                            zeros
    scale < 0, above 2^40 or nan         PrivacyError
    """
    if not 0 <= scale <= LARGEST:
        raise PrivacyError(f"noise of {scale:g} grid steps must be between 0 and 2^40 of them")
    if scale == 0:
        return np.zeros(count, dtype=np.int64)
    return draw_by_rejection(partial(_propose, scale=scale), count, source, threads)


def begin(scale: float, count: int, source: Keystream) -> Callable[[], Tensor]:
    """Draw beside what the caller does next; call the result to wait for the noise, int64."""
    return begin_draw(lambda threads: draw(scale, count, source, threads), count)


def _propose(words: Words, lane: Lane, *, scale: float) -> tuple[Values, NDArray[np.bool_]]:
    """Make one proposal for each column of words: its value, and whether it is accepted."""
    bins = table()
    column = (words[0] >> np.uint64(55)).astype(np.intp)
    chosen = np.where((words[0] & np.uint64(_COLUMN - 1)) < bins.cut[column], column, bins.alias[column])
    x, r = place(chosen, words[1]), words[2] * 2.0**-64
    accepted = r < bins.sure[chosen]
    rest = np.flatnonzero(~accepted)
    limit = chance(x[rest], chosen[rest])
    accepted[rest] = r[rest] < limit * (1 - MARGIN) - OPEN
    unclear = ~accepted[rest] & (r[rest] <= limit * (1 + MARGIN) + OPEN)
    y = scale * x
    nearest = np.rint(y)
    between = np.flatnonzero(np.abs(y - nearest) + ROUNDING * y + REST * scale >= 0.5)
    values = nearest.astype(np.int64)
    for i in np.union1d(rest[unclear], between):
        values[i], accepted[i] = decide(int(chosen[i]), int(words[1, i]), int(words[2, i]), scale, lane)
    np.negative(values, out=values, where=(words[0] & np.uint64(_COLUMN)) != 0)
    return values, accepted


def place(chosen: NDArray[np.intp], u: Words) -> NDArray[np.float64]:
    """Return x in float64: a relative error of 2^-52, and the 2^-68 that 64 bits leave open."""
    return np.asarray((chosen + u * 2.0**-64) / PER_UNIT)


def chance(x: NDArray[np.float64], chosen: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return M·h(x)/W_i in float64: a relative error of 2^-41."""
    return np.asarray(np.exp(-0.5 * x**2) * table().scale[chosen])


def decide(chosen: int, u: int, r: int, scale: float, lane: Lane) -> tuple[int, bool]:
    """Decide one proposal in rational arithmetic: (round(s·x), accepted). More bits of u and r come from the lane."""
    bits, s, bins = 64, Fraction(scale), table()
    while True:
        low, high = (Fraction(chosen * 2**bits + u + end, PER_UNIT * 2**bits) for end in (0, 1))  # x, open above
        least, most = _height(high, bits, down=True), _height(low, bits, down=False)
        accepted = (r + 1) * bins.weights[chosen] <= bins.top * least * 2**bits
        rejected = r * bins.weights[chosen] >= bins.top * most * 2**bits
        value = math.floor(s * low + Fraction(1, 2))
        if rejected or (accepted and s * high <= value + Fraction(1, 2)):
            return value, accepted
        more = [int(word) for word in lane.words(2)]
        bits, u, r = bits + 64, u << 64 | more[0], r << 64 | more[1]


def _height(x: Fraction, bits: int, down: bool) -> Fraction:
    """Bound exp(−x²/2) from one side, to a relative 10^-digits. Decimal's exp is correctly rounded."""
    digits = 30 + bits // 3
    with localcontext(Context(prec=digits)):
        square = x * x / 2
        height = Fraction((-(Decimal(square.numerator) / Decimal(square.denominator))).exp())
    # rounding x²/2 ≤ 512 moves the result by a share of 512·5·10^-digits at most, rounding exp by 5·10^-digits
    return height * (1 + (-1 if down else 1) * Fraction(10) ** (4 - digits))


# Rejection, for every exact sampler: a place keeps the first proposal that is accepted, so what it holds follows the
# law that an accepted proposal has. The result depends on the key alone: coordinates are drawn in groups of a constant
# size, each from its own lane, however many threads there are.


def aliases(weights: list[int]) -> tuple[list[int], list[int]]:
    """Divide bins among columns of equal weight, at most two bins in each (Walker 1977, Vose 1991).

    Below cut[column] it is the column's own bin, from there on its alias. The weights add up to TOTAL.
    """
    size = TOTAL // len(weights)
    left, cut, alias = list(weights), [size] * len(weights), list(range(len(weights)))
    small = [i for i, weight in enumerate(left) if weight < size]
    large = [i for i, weight in enumerate(left) if weight > size]
    while small:
        light, heavy = small.pop(), large[-1]
        cut[light], alias[light] = left[light], heavy
        left[heavy] -= size - left[light]
        if left[heavy] <= size:
            large.pop()
            if left[heavy] < size:
                small.append(heavy)
    return cut, alias


def draw_by_rejection(propose: Propose, count: int, source: Keystream, threads: int = 1) -> Values:
    """Draw `count` independent values."""
    found = np.zeros(count, dtype=np.int64)
    lanes = [(found[first : first + _LANE], first // _LANE) for first in range(0, count, _LANE)]
    if threads == 1 or len(lanes) == 1:
        for part, number in lanes:
            _fill(part, propose, source.lane(number))
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda lane: _fill(lane[0], propose, source.lane(lane[1])), lanes))
    return found


def begin_draw(work: Callable[[int], Values], count: int) -> Callable[[], Tensor]:
    """Start `work(threads)` beside what the caller does next; call the result to wait for its values, int64."""
    if count < _AHEAD:
        return lambda: torch.from_numpy(work(1))
    pool = ThreadPoolExecutor(1, "noise")
    coming: Future[Values] = pool.submit(work, min(_THREADS, -(-count // _LANE)))
    pool.shutdown(wait=False)
    return lambda: torch.from_numpy(coming.result())


def _fill(found: Values, propose: Propose, lane: Lane) -> None:
    """Propose for every place, then again for those that were rejected, until none is left."""
    places: NDArray[np.intp] | slice = slice(None)
    count = len(found)
    while count:
        values, accepted = propose(lane.words(3 * count).reshape(3, count), lane)
        found[places] = values
        rejected = np.flatnonzero(~accepted)
        places = rejected if isinstance(places, slice) else places[rejected]
        count = len(rejected)
