"""Matrices of correlated noise: what one client can do to all releases together, and how noisy a sum of rounds is.

Round t releases x_t + n_t, where x_t is the sum of the clients' messages and C n = z: z has independent N(0, s²)
entries, C is lower triangular [rounds, rounds] with ones on its diagonal. So the releases are one Gaussian mechanism
y = C x + z, and the noise of one round takes back part of the noise of earlier ones.

In: a matrix in whole numbers, and a rule of participation. Out: `sensitivity`, the largest ‖Σ_t C[:, t] u_t‖ over the
rounds in which a client may take part, ‖u_t‖ ≤ 1 (zero-out neighbours, in units of the clip norm), and `gain`, the
standard deviation of the noise in a weighted sum of releases, in units of s.

Guarantee: a sensitivity is exact but for rounding, rounds up, and never falls with more rounds. What cannot be computed
exactly is refused. No sampling is assumed. Numbers are whole, in units of 2⁻²⁰, so that everybody computes the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedblur.core.errors import PrivacyError

Values = NDArray[np.float64]

UNIT = 2**20  # coefficients are whole numbers in units of 1 / UNIT
ROUND_UP = 1 + 1e-9  # far above the rounding of a sum of 2²⁰ terms
LARGEST = 2**12 * UNIT  # of coefficients together: their products with noise below 2⁵⁰ steps stay within 64 bits


class NoiseMatrix(ABC):
    """A lower triangular matrix C with ones on its diagonal, for any number of rounds."""

    @abstractmethod
    def matrix(self, rounds: int) -> Values:
        """Return C [rounds, rounds]."""

    @abstractmethod
    def sensitivity(self, rounds: int, separation: int, at_most: int | None = None) -> float:
        """Return what a client can do that takes part in rounds at least `separation` apart, `at_most` times."""

    @abstractmethod
    def sensitivity_in_turn(self, rounds: int, groups: int) -> float:
        """Return what a client can do that takes part in every `groups`-th round, whichever its first round is."""

    @abstractmethod
    def columns_overlap(self, separation: int) -> bool:
        """Return whether rounds that are `separation` apart share noise. Proofs of amplification need that none do."""

    @abstractmethod
    def gain(self, weights: Values) -> Values:
        """Return ‖C⁻ᵀ w‖ of weights [..., rounds]: the noise's standard deviation in Σ_t w_t x̃_t for s = 1."""


class _Constant(NoiseMatrix):
    """A Toeplitz matrix: C[t, s] = c[t - s]."""

    @abstractmethod
    def series(self, rounds: int) -> Values:
        """Return c, as far as the first `rounds` rounds reach."""

    @abstractmethod
    def _demand_exact(self, separation: int, falling: bool) -> None:
        """Refuse where the worst pattern is not known."""

    def matrix(self, rounds: int) -> Values:
        lags = np.subtract.outer(np.arange(rounds), np.arange(rounds))
        column = np.zeros(rounds)
        series = self.series(rounds)
        column[: len(series)] = series
        return np.where(lags >= 0, column[np.maximum(lags, 0)], 0.0)

    def sensitivity(self, rounds: int, separation: int, at_most: int | None = None) -> float:
        _check(rounds, separation=separation, at_most=1 if at_most is None else at_most)
        self._demand_exact(separation, falling=True)
        return self._as_early_as_possible(rounds, separation, at_most)

    def sensitivity_in_turn(self, rounds: int, groups: int) -> float:
        _check(rounds, groups=groups)
        self._demand_exact(groups, falling=False)
        return self._as_early_as_possible(rounds, groups, None)  # a later group does the same, cut off earlier

    def _as_early_as_possible(self, rounds: int, separation: int, at_most: int | None) -> float:
        """Return the norm of the columns 1, 1 + separation, 1 + 2·separation, ... together.

        It is the worst pattern where columns do not overlap (a later column is at most as long), and for entries
        c_0 ≥ c_1 ≥ ... ≥ 0 (Kalinin & Lampert 2024, theorem 2).
        """
        series = self.series(rounds)
        together = np.zeros(rounds)
        for first in range(0, rounds, separation)[:at_most]:
            together[first : first + len(series)] += series[: rounds - first]
        return float(np.linalg.norm(together)) * ROUND_UP

    def gain(self, weights: Values) -> Values:
        rounds = np.shape(weights)[-1]
        inverse = np.fft.rfft(inverse_series(self.series(rounds), rounds), 2 * rounds)
        spread = np.fft.irfft(np.fft.rfft(np.flip(weights, -1), 2 * rounds) * inverse, 2 * rounds)[..., :rounds]
        return np.asarray(np.linalg.norm(spread, axis=-1))  # C⁻ᵀ w, from the last round to the first


def inverse_series(c: Values, terms: int) -> Values:
    """Return the first terms of the power series 1 / c: the first column of C⁻¹."""
    inverse = np.zeros(terms)
    inverse[:1] = 1 / c[0]
    for k in range(1, terms):
        reach = min(k, len(c) - 1)
        inverse[k] = -(c[1 : reach + 1] @ inverse[k - reach : k][::-1]) / c[0]
    return inverse


@dataclass(frozen=True)
class Toeplitz(_Constant):
    """A banded matrix: the same coefficients in every column. Without coefficients the noise is independent."""

    coefficients: tuple[int, ...]  # c_1, c_2, ... in units of 2^-20; c_0 is 1

    def __post_init__(self) -> None:
        _check_whole("coefficients", self.coefficients, -LARGEST, LARGEST)
        if sum(map(abs, self.coefficients)) > LARGEST:
            raise PrivacyError(f"the coefficients are {sum(map(abs, self.coefficients))} together, beyond {LARGEST}")

    @property
    def bands(self) -> int:
        """Number of rounds that a round's noise reaches, itself included."""
        return 1 + len(self.coefficients)

    def series(self, rounds: int) -> Values:
        return np.array([UNIT, *self.coefficients][:rounds], dtype=np.float64) / UNIT

    def columns_overlap(self, separation: int) -> bool:
        return self.bands > separation

    def _demand_exact(self, separation: int, falling: bool) -> None:
        if not self.columns_overlap(separation):
            return
        if min(self.coefficients) < 0:
            wrong = "are negative"
        elif falling and any(np.diff([UNIT, *self.coefficients]) > 0):
            wrong = "grow, or exceed 1"
        else:
            return
        raise PrivacyError(
            f"the coefficients of {self.bands} bands overlap in rounds that are {separation} apart, and some {wrong}: "
            f"their sensitivity is not known exactly; use at most {separation} bands, or coefficients that never grow"
        )


@dataclass(frozen=True)
class Blt(_Constant):
    """A buffered linear Toeplitz matrix: c_k = Σ_i ω_i θ_i^(k-1), so that a few buffers hold all earlier noise."""

    decays: tuple[int, ...]  # θ in units of 2^-20: what a buffer keeps from round to round
    weights: tuple[int, ...]  # ω in units of 2^-20: what a round's noise takes back of each buffer; at most 1 together

    def __post_init__(self) -> None:
        _check_whole("decays", self.decays, 1, UNIT - 1)
        _check_whole("weights", self.weights, 1, UNIT)
        if len(self.decays) != len(self.weights) or not self.decays:
            raise PrivacyError(f"{len(self.decays)} decays, {len(self.weights)} weights: give one of each per buffer")
        if sum(self.weights) > UNIT:
            raise PrivacyError(f"weights={self.weights} are {sum(self.weights)} together; they must be at most {UNIT}")

    def series(self, rounds: int) -> Values:
        powers = np.power.outer(np.array(self.decays) / UNIT, np.arange(max(rounds - 1, 0)))  # [buffers, rounds - 1]
        return np.concatenate([[1.0], np.array(self.weights) / UNIT @ powers])[:rounds]

    def columns_overlap(self, separation: int) -> bool:
        return True  # noise fades, but never ends

    def _demand_exact(self, separation: int, falling: bool) -> None:
        """Accept: by its limits on weights and decays, a series is positive and never grows."""


@dataclass(frozen=True)
class Tree(NoiseMatrix):
    """A binary tree over each `restart` rounds, without the nodes that no prefix of rounds needs.

    Row t of C is the node that ends with round t: with r = t's place in its tree, from 1, it has the last lowbit(r)
    rounds. The nodes whose rounds are 1 to r are then r, r - lowbit(r), and so on: at most log2(restart) + 1.
    """

    restart: int  # rounds of a tree, a power of two

    def __post_init__(self) -> None:
        _check_whole("restart", (self.restart,), 1, 2**30)
        if self.restart & (self.restart - 1):
            raise PrivacyError(f"restart={self.restart} must be a power of two")

    def children(self, round_: int) -> list[int]:
        """Return the rounds whose nodes make up the node of a round, but for the round itself; rounds count from 1.

        n_t = z_t - Σ z_s over these rounds s: a node's noise takes the place of its children's.
        """
        return [round_ - step for step in _steps((round_ - 1) % self.restart + 1)]

    def parents(self, rounds: int) -> NDArray[np.int64]:
        """Return for each of the rounds 1 to `rounds` the one whose node has its node as a child; 0 if none has."""
        place = np.arange(rounds) % self.restart + 1
        width = place & -place
        parents = np.arange(1, rounds + 1) + width
        return np.where((place + width <= self.restart) & (parents <= rounds), parents, 0)

    def matrix(self, rounds: int) -> Values:
        place = np.arange(rounds) % self.restart + 1
        lags = np.subtract.outer(np.arange(rounds), np.arange(rounds))
        return ((lags >= 0) & (lags < (place & -place)[:, None])).astype(np.float64)

    def sensitivity(self, rounds: int, separation: int, at_most: int | None = None) -> float:
        _check(rounds, separation=separation, at_most=1 if at_most is None else at_most)
        separation = min(separation, max(rounds, 1))
        most = -(-rounds // separation)
        return _worst_in_trees(self.restart, rounds, separation, most if at_most is None else min(at_most, most))

    def sensitivity_in_turn(self, rounds: int, groups: int) -> float:
        _check(rounds, groups=groups)
        ends = np.arange(1, rounds + 1)
        place = (ends - 1) % self.restart + 1
        worst = 0
        for first in range(1, min(groups, rounds) + 1):  # how often the client has taken part by the end of each round
            counts = np.concatenate([[0], (ends - first) // groups + 1])
            worst = max(worst, int(((counts[ends] - counts[ends - (place & -place)]) ** 2).sum()))
        return math.sqrt(worst) * ROUND_UP

    def columns_overlap(self, separation: int) -> bool:
        return self.restart > separation

    def gain(self, weights: Values) -> Values:
        weights = np.asarray(weights, dtype=np.float64)
        followed = np.concatenate([np.zeros_like(weights[..., :1]), weights], axis=-1)
        return np.asarray(np.linalg.norm(weights - followed[..., self.parents(weights.shape[-1])], axis=-1))


def _steps(place: int) -> list[int]:
    """Return 1, 2, 4, ... below the largest power of two that divides `place`."""
    return [1 << power for power in range((place & -place).bit_length() - 1)]


# The worst pattern in trees, by dynamic programming. A table [times, g, g] holds for a tree of 2^j rounds the largest
# Σ over its nodes of (times that the client took part in the node)², where the client takes part `times` + 1 times, at
# least l rounds lie before its first and at least r after its last time; l and r are below g = min(separation, 2^j).
# Nodes that are second children are not released: their parent is. So a table without the root's own square is made
# of one with and one without.


@lru_cache(maxsize=16)
def _inside(separation: int, level: int) -> Values:
    """Return the table of trees of 2^level rounds whose root is not released."""
    if level == 0:
        return np.zeros((1, 1, 1))
    below = _inside(separation, level - 1)
    return _joined(_with_root(below), below, 2 ** (level - 1), separation)


def _with_root(inside: Values) -> Values:
    squares: Values = np.arange(1.0, len(inside) + 1) ** 2
    return inside + squares[:, None, None]


def _joined(left: Values, right: Values, size: int, separation: int) -> Values:
    """Return the table of two trees of `size` rounds, one after the other."""
    most, reach = -(-2 * size // separation), left.shape[1]
    gaps = np.arange(min(separation, 2 * size))
    beyond = np.maximum(gaps - size, 0)  # the gap that is left for the other tree where one tree is empty
    joined = np.full((most, len(gaps), len(gaps)), -np.inf)
    joined[: len(left), :reach] = left[:, :, beyond]
    joined[: len(right), :, :reach] = np.maximum(joined[: len(right), :, :reach], right[:, beyond])
    for times in range(len(left)):
        there = right[: most - times - 1]
        best = joined[times + 1 : times + 1 + len(there), :reach, :reach]
        for gap in range(separation - reach, reach):  # after the last time in the left tree
            both = left[times, :, gap, None] + there[:, separation - 1 - gap, None]
            np.maximum(best, both, out=best)
    return joined


@lru_cache(maxsize=256)
def _worst_in_trees(restart: int, rounds: int, separation: int, at_most: int) -> float:
    """Return the largest norm over all patterns; an unfinished tree is the trees of its finished nodes."""
    rest = rounds % restart
    sizes = [restart] * (rounds // restart) + [1 << j for j in reversed(range(rest.bit_length())) if rest >> j & 1]
    tables = {size: _with_root(_inside(separation, size.bit_length() - 1)) for size in set(sizes)}
    gaps = np.arange(separation)
    best = np.full((at_most + 1, separation), -np.inf)  # [times so far, rounds since the last time, at least]
    best[0] = 0.0
    for size in sizes:
        table = tables[size]
        reach = table.shape[1]
        longer = best[:, np.maximum(gaps - size, 0)]
        for times in range(1, min(len(table), at_most) + 1):
            both = best[: at_most + 1 - times, separation - reach :, None] + table[times - 1, ::-1]  # b - 1 together
            longer[times:, :reach] = np.maximum(longer[times:, :reach], both.max(axis=1))
        best = longer
    return math.sqrt(best.max()) * ROUND_UP


def _check(rounds: int, **positive: int) -> None:
    if rounds < 0:
        raise PrivacyError(f"rounds={rounds} must be 0 or more")
    for name, value in positive.items():
        if value < 1:
            raise PrivacyError(f"{name}={value} must be 1 or more")


def _check_whole(name: str, values: tuple[int, ...], least: int, most: int) -> None:
    for value in values:
        if type(value) is not int or not least <= value <= most:
            raise PrivacyError(f"{name} has {value!r}: it must be a whole number from {least} to {most}")
