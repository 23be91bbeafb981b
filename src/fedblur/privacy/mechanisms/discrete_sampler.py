"""Whole numbers that follow a law exactly whose probabilities fall away from its mode: a discrete Gaussian, Poisson.

The range is divided into 1024 bins of `width` whole numbers, half of them from the mode upwards and half below it. Let
h(n) = P(n)/P(mode). One proposal takes three random words:

    word 0    a bin i with probability W_i/2^63 (alias table, whole numbers)
    word 1    u, the first 64 bits of a uniform real: n is the bin's first number + ⌊u·width⌋
    word 2    r, the first 64 bits of a uniform real: accept if r < M·h(n)/W_i, where W_i ≥ M·max h in the bin

Each n is accepted with a probability in proportion to h(n), whatever the W_i are. As in `rounded_gaussian.py`, floats
sort out the clear cases and the others are decided in decimals, to as many digits and random bits as that takes. The
law is exact but for what lies beyond the bins, below 2^-737 (`rounded_gaussian.TAIL`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from fedblur.core.rng import Keystream, Lane
from fedblur.privacy.mechanisms.rounded_gaussian import (
    MARGIN,
    OPEN,
    ROUNDING,
    TOTAL,
    Values,
    Words,
    aliases,
    draw_by_rejection,
)

BINS = 1024
_COLUMN = TOTAL // BINS


class Law(ABC):
    """A law on whole numbers. Frozen and hashable: its table is kept."""

    @property
    @abstractmethod
    def mode(self) -> int:
        """The place where P is largest; it never rises on the way from there to either side."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Return the width of a bin: 512 bins on either side leave out at most `rounded_gaussian.TAIL` together."""

    @property
    @abstractmethod
    def margin(self) -> float:
        """Relative error of `heights`, at most half of this: of exp of an exponent that is off by so much."""

    @abstractmethod
    def height(self, n: int, digits: int) -> Decimal:
        """Return h(n), with a relative error of at most 10^-digits. 0 where n cannot be."""

    @abstractmethod
    def heights(self, n: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return h(n) in float64, good to half of `margin`, and to 2^-100."""


@dataclass(frozen=True)
class Table:
    """A law's bins."""

    top: int  # M
    first: Values  # [1024] each bin's first number
    weights: tuple[int, ...]  # W_i
    cut: Words  # [1024] below: the column's own bin; from there on: its alias
    alias: NDArray[np.intp]
    scale: NDArray[np.float64]  # M/W_i
    sure: NDArray[np.float64]  # r below this is accepted for every number of the bin


@lru_cache(maxsize=64)
def table(law: Law) -> Table:
    """Make a law's bins, in whole numbers from heights in float64: some milliseconds.

    Those may be off by half of the law's margin; bounds from above and below are all that is asked of them.
    """
    half, width, mode = BINS // 2, law.width, law.mode
    first = mode + width * np.arange(-half, half)
    nearest, farthest = (
        np.where(first >= mode, first, first + width - 1),
        np.where(first >= mode, first + width - 1, first),
    )
    high = law.heights(nearest.astype(np.float64)) * (1 + law.margin)
    low = law.heights(farthest.astype(np.float64)) * (1 - law.margin)
    heights = [int(height * 2.0**60) + 1 for height in high]  # above 2^60·h
    top = (TOTAL - 2 * BINS) * 2**60 // sum(heights)
    weights = [(top * height >> 60) + 1 for height in heights]
    weights[half] += TOTAL - sum(weights)
    scale = np.array([top / weight for weight in weights])
    cut, alias = aliases(weights)
    return Table(
        top,
        first,
        tuple(weights),
        np.array(cut, dtype=np.uint64),
        np.array(alias, dtype=np.intp),
        scale,
        np.maximum(low * scale * (1 - MARGIN) - OPEN, 0.0),
    )


def draw(law: Law, count: int, source: Keystream, threads: int = 1) -> Values:
    """Draw `count` independent values."""
    return draw_by_rejection(partial(_propose, law=law), count, source, threads)


def _propose(words: Words, lane: Lane, *, law: Law) -> tuple[Values, NDArray[np.bool_]]:
    """Make one proposal for each column of words: its value, and whether it is accepted."""
    bins, width, margin = table(law), law.width, law.margin
    column = (words[0] >> np.uint64(54)).astype(np.intp)
    chosen = np.where((words[0] & np.uint64(_COLUMN - 1)) < bins.cut[column], column, bins.alias[column])
    y = words[1] * (2.0**-64 * width)
    values = bins.first[chosen] + y.astype(np.int64)
    between = np.flatnonzero(np.abs(y - np.rint(y)) <= ROUNDING * width)
    r = words[2] * 2.0**-64
    accepted = r < bins.sure[chosen]
    rest = np.flatnonzero(~accepted)
    limit = law.heights(values[rest].astype(np.float64)) * bins.scale[chosen[rest]]
    accepted[rest] = r[rest] < limit * (1 - margin) - OPEN
    unclear = ~accepted[rest] & (r[rest] <= limit * (1 + margin) + OPEN)
    for i in np.union1d(rest[unclear], between):
        values[i], accepted[i] = decide(law, int(chosen[i]), int(words[1, i]), int(words[2, i]), lane)
    return values, accepted


def decide(law: Law, chosen: int, u: int, r: int, lane: Lane) -> tuple[int, bool]:
    """Decide one proposal in rational arithmetic: (n, accepted). More bits of u and r come from the lane."""
    bits, bins, width = 64, table(law), law.width
    while True:
        low, high = (u * width) >> bits, ((u + 1) * width - 1) >> bits
        if low == high:
            n, digits = int(bins.first[chosen]) + low, 30 + bits // 3
            height, error = Fraction(law.height(n, digits)), Fraction(10) ** -digits
            if r * bins.weights[chosen] >= bins.top * height * (1 + error) * 2**bits:
                return n, False
            if (r + 1) * bins.weights[chosen] <= bins.top * height * (1 - error) * 2**bits:
                return n, True
        more = [int(word) for word in lane.words(2)]
        bits, u, r = bits + 64, u << 64 | more[0], r << 64 | more[1]


def steps_to(distance: float) -> int:
    """Return the width of bins of which 512 reach at least so far."""
    return max(1, math.ceil(distance / (BINS // 2) * (1 + 2.0**-40)))
