"""Correlated noise, round by round, in whole numbers. In: fresh noise of each round. Out: what is added to its sum.

The noise of a run is C⁻¹z, for a lower triangular C with ones on its diagonal and fresh noise z. So the noise of round
t is z_t less a part w_t of the noise of earlier rounds, which cancels in the model:

    n_t = z_t − w_t(n_1 … n_{t−1}),    w_t ≈ Σ_k C[t, t−k]·n_{t−k}, rounded to whole numbers

All arithmetic is exact in 64 bits, so noise is the same on every machine. Rounding costs privacy next to nothing, if it
is counted: `error` bounds by how much it can move w_t between two neighbouring populations (docs/correlated-noise.md).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedblur.core.errors import PrivacyError

Values = NDArray[np.int64]

FIXED = 20  # bits after the point of coefficients, decays and weights
_FRACTION = 10  # bits after the point of a buffer
_SPLIT = FIXED + _FRACTION
# Noise and buffers stay below these, so that no intermediate result leaves 64 bits, also with a client's messages added
# as the proof does: 2^41 steps at most in each of 2^10 rounds. Noise depends on no data, and neither does a refusal.
_LARGEST, _LARGEST_BUFFER = 2**50, 2**60


class Recursion(Protocol):
    """The memory of one run's noise."""

    @property
    def error(self) -> float:
        """E: rounding moves a coordinate of w_t by less than this between neighbours, in steps."""

    def next(self, fresh: Values) -> Values:
        """Return the noise of the next round, made of fresh noise and of what earlier rounds left."""


class Banded:
    """Noise from the noise of the last rounds: w_t = Σ_k c_k·n_{t−k}, with c_k in units of 2^-20."""

    error = 1.0

    def __init__(self, coefficients: Sequence[int]) -> None:
        self.coefficients = coefficients
        self._past: deque[Values] = deque(maxlen=len(coefficients))  # the newest first

    def next(self, fresh: Values) -> Values:
        noise = fresh - weighted(self.coefficients, self._past, FIXED) if self._past else fresh
        _demand_room(noise, _LARGEST)
        self._past.appendleft(noise)
        return noise


class Buffered:
    """Noise from a few fading sums of all earlier noise: w_t = Σ_i ω_i·B_i, B_i ← θ_i·B_i + n_t (a BLT).

    θ_i and ω_i in units of 2^-20, B_i of 2^-10. A buffer is rounded down each round, so it lacks less than 1/(1 − θ_i)
    of its units.
    """

    def __init__(self, decays: Sequence[int], weights: Sequence[int]) -> None:
        self.decays, self.weights = decays, weights
        self._buffers: list[Values] = []

    @property
    def error(self) -> float:
        pairs = zip(self.decays, self.weights, strict=True)
        return 1.0 + 2.0**-_FRACTION * math.fsum(weight / (2**FIXED - decay) for decay, weight in pairs)

    def next(self, fresh: Values) -> Values:
        noise = fresh - weighted(self.weights, self._buffers, _SPLIT) if self._buffers else fresh
        _demand_room(noise, _LARGEST)
        added = noise << _FRACTION
        if not self._buffers:
            self._buffers = [added.copy() for _ in self.decays]
            return noise
        for decay, buffer in zip(self.decays, self._buffers, strict=True):
            low = buffer & (2**_SPLIT - 1)
            np.right_shift(buffer, _SPLIT, out=buffer)  # ⌊θB⌋, from the upper and the lower bits of B
            buffer *= decay
            buffer <<= _FRACTION
            low *= decay
            low >>= FIXED
            buffer += low
            buffer += added
            _demand_room(buffer, _LARGEST_BUFFER)
        return noise


class Tree:
    """Noise of a binary tree over the rounds, a fresh tree every `restart` rounds: one new node a round.

    A sum over the rounds so far carries the noise of at most log₂(restart) + 1 nodes, those of the ones in t's binary
    digits. So a round adds its own node's noise and takes off that of the nodes that it replaces.
    """

    error = 0.0

    def __init__(self, restart: int) -> None:
        self.restart = restart
        self._round = 0  # in this tree
        self._nodes: dict[int, Values] = {}  # by level

    def next(self, fresh: Values) -> Values:
        self._round += 1
        level = (self._round & -self._round).bit_length() - 1
        noise = fresh.copy()
        for below in range(level):
            noise -= self._nodes.pop(below)
        self._nodes[level] = fresh
        if self._round == self.restart:
            self._round, self._nodes = 0, {}
        return noise


def weighted(weights: Sequence[int], values: Sequence[Values] | deque[Values], bits: int) -> Values:
    """Return Σ weight·value / 2^bits, rounded to the nearest whole number, without leaving 64 bits."""
    high, low = np.zeros_like(values[0]), np.zeros_like(values[0])
    for weight, value in zip(weights, values, strict=False):  # in the first rounds there are fewer values
        high += weight * (value >> bits)
        low += weight * (value & (2**bits - 1))
    low += 2 ** (bits - 1)
    low >>= bits
    high += low
    return high


def _demand_room(values: Values, largest: int) -> None:
    if len(values) and max(int(values.max()), -int(values.min())) > largest:
        raise PrivacyError(
            "correlated noise has grown beyond what 64 bits hold; use fewer bands or buffers, or decays below 1"
        )
