"""Correlated noise: what is added in one round is mostly taken off again later, so a sum over rounds carries little.

    clients' messages → exact sum of whole numbers (as `gaussian.py`) → + n_t, whole numbers → × γ

All rounds together are one Gaussian mechanism on Cx, whose sensitivity follows from how often, and how far apart, a
client may take part: no amplification by sampling is needed. So the part "sampling" must bound that (`participation`).
docs/correlated-noise.md has the proof in whole numbers. The noise of earlier rounds must stay as secret as this
round's: with it, earlier sums are known. It is made again from its keys (`noise_key.py`), never stored.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np

from fedblur.core.errors import ConfigError, PrivacyError
from fedblur.core.registry import register
from fedblur.core.rng import Keystream, Rng
from fedblur.privacy import events
from fedblur.privacy.mechanisms import noise_recursion, rounded_gaussian
from fedblur.privacy.mechanisms.base import Conditions, Noise, Once, Release
from fedblur.privacy.mechanisms.gaussian import FixedPoint, Gaussian
from fedblur.privacy.mechanisms.noise_recursion import FIXED, Recursion, Values
from fedblur.privacy.noise_matrices import UNIT, NoiseMatrix, Toeplitz
from fedblur.privacy.noise_matrices import Blt as Fading
from fedblur.privacy.noise_matrices import Tree as Nodes

if TYPE_CHECKING:
    from torch import Tensor

    from fedblur.privacy.clipping import Bounded

Kind = Literal["tree", "banded", "blt"]

_MOST_EXCESS = 2.0**20  # a matrix whose inverse explodes: its noise would leave 64 bits in the middle of a run
_MOST_ROUNDS = 4096  # over which it is computed how much noise a sum over rounds carries


class NoiseSource(Protocol):
    """The origin of a run's fresh noise: the same words for the same step, for as long as the run lasts."""

    def keystream(self, step: int) -> Keystream:
        """Return the key of a step's fresh noise."""

    def serve(self, step: int) -> None:
        """Write down that a step's noise is about to be released; refuse one that was."""

    def forget(self) -> None:
        """Remove what the noise of a run could be made again from, when it is complete."""


@dataclass(frozen=True)
class SeededNoise:
    """Fresh noise that follows from a seed. NOT PRIVATE."""

    rng: Rng  # of the run

    def keystream(self, step: int) -> Keystream:
        return self.rng.child("round", step).child("noise").keystream()

    def serve(self, step: int) -> None:
        """Do nothing: a seeded run repeats the very same release."""

    def forget(self) -> None:
        """Do nothing: the seed stays."""


class NoiseStream:
    """The noise of one run. A step that is asked for out of order is reached by making the noise before it again."""

    def __init__(self, begin: Callable[[], Recursion], source: NoiseSource) -> None:
        self._begin, self.source = begin, source
        self._recursion, self._step = begin(), 0  # and how many steps it has made

    def make(self, step: int, scale: float, count: int, threads: int = 1) -> Values:
        """Return the noise of a step: `count` whole numbers, fresh noise with a deviation of `scale` steps."""
        if self._step != step - 1:
            self._recursion, self._step = self._begin(), 0
        while True:
            self._step += 1
            fresh = rounded_gaussian.draw(scale, count, self.source.keystream(self._step), threads)
            noise = self._recursion.next(fresh)
            if self._step == step:
                return noise


@dataclass(frozen=True)
class CorrelatedNoise:
    """A mechanism whose noise hangs together over the rounds of one run."""

    part: Correlated
    rounds: int  # T
    stream: NoiseStream | None = None  # None: of a process that only plans

    @property
    def shows_cohort(self) -> bool:
        return False

    @property
    def excess(self) -> float:
        rounds = min(self.rounds, _MOST_ROUNDS)
        event = self.part.event(1.0)
        assert isinstance(event, events.Correlated)
        found = float(event.matrix.gain(np.ones(rounds))) ** 2 / rounds
        if not found < _MOST_EXCESS:
            raise ConfigError(
                f"mechanism={self.part.name!r}: with these numbers noise grows from round to round and never cancels; "
                "leave them out, and they are fitted to the server"
            )
        return found

    def event(self, noise_multiplier: float) -> events.Event:
        return self.part.event(noise_multiplier)

    def notes(self, noise_multiplier: float) -> tuple[str, ...]:
        return ()

    def started(self, source: NoiseSource) -> CorrelatedNoise:
        """Return the mechanism of a run that draws its noise from this source."""
        return CorrelatedNoise(self.part, self.rounds, NoiseStream(self.part.recursion, source))

    def ended(self) -> None:
        """Forget the keys of a run that is complete."""
        if self.stream is not None:
            self.stream.source.forget()

    def accumulate(self, blocks: Iterable[Bounded], release: Release, rng: Rng) -> Tensor:
        return Gaussian().accumulate(blocks, release, rng)

    def scale(self, release: Release) -> float:
        """Return the standard deviation of fresh noise, in steps, with what rounding costs.

        Rounding moves the means of T rounds of d coordinates by less than E each, so by E·√(dT) in l2 norm, beside the
        S/γ that a client moves them by at least.
        """
        grid = FixedPoint.of(release)
        moved = self.part.recursion().error * math.sqrt(release.dimension * self.rounds)
        return grid.scale(release.noise_std) * (1 + moved * grid.step / release.clip_norm) * (1 + 2.0**-50)

    def draw(self, release: Release, rng: Rng) -> Noise:
        if release.noise_std == 0:
            return Gaussian().draw(release, rng)
        if self.stream is None:
            raise PrivacyError("correlated noise was asked for outside of a run; no source of it was named")
        stream, scale, count = self.stream, self.scale(release), release.dimension
        coming = rounded_gaussian.begin_draw(lambda threads: stream.make(release.number, scale, count, threads), count)
        return Once(lambda: coming().to(release.device))

    def release(self, total: Tensor, release: Release, noise: Tensor) -> Tensor:
        """Return the noisy sum, [d] float32. It is on disk before that this step's noise is used."""
        if release.noise_std and self.stream is not None:
            self.stream.source.serve(release.number)
        return Gaussian().release(total, release, noise)


@dataclass(frozen=True)
class Correlated(ABC):
    """A part whose noise is correlated over rounds."""

    name: ClassVar[Kind]

    @property
    def trust(self) -> str:
        """The parties that must be trusted for the guarantee to hold."""
        return (
            "a server that sees each clipped update, adds the noise, keeps the noise of all rounds secret, and lets no "
            "client take part more often than it says; who takes part need not be random or secret"
        )

    def bind(self, conditions: Conditions) -> CorrelatedNoise:
        """Return the mechanism for these conditions."""
        return CorrelatedNoise(self.settled(conditions), conditions.rounds)

    @property
    @abstractmethod
    def open(self) -> bool:
        """Whether it leaves numbers open, to be fitted to the server's steps (`training/noise_planning.py`)."""

    @abstractmethod
    def like(self, matrix: NoiseMatrix) -> Correlated:
        """Return the part with the numbers of this matrix, which is of its kind."""

    @abstractmethod
    def settled(self, conditions: Conditions) -> Correlated:
        """Return this part with every number that it left open, from a formula that fits no server."""

    @abstractmethod
    def event(self, noise_multiplier: float) -> events.Event:
        """Return the event of a round, before participation."""

    @abstractmethod
    def recursion(self) -> Recursion:
        """Return what makes the noise, at the first round."""


@register("mechanism", "banded")
@dataclass(frozen=True)
class Banded(Correlated):
    """Each round takes off parts of the noise of the last rounds: the memory of as many models as it looks back."""

    name: ClassVar[Kind] = "banded"

    bands: int = 0  # columns of C have so many entries; 0: the separation of a client's rounds
    coefficients: tuple[float, ...] = ()  # c_1, c_2 … of C, falling from 1; (): fitted to the server's steps

    def __post_init__(self) -> None:
        if self.bands < 0 or self.bands == 1:
            raise ConfigError(
                f"mechanism.bands={self.bands} must be 2 or more, or 0: the separation of a client's rounds"
            )
        if self.coefficients and self.bands not in (0, len(self.coefficients) + 1):
            raise ConfigError(
                f"mechanism.bands={self.bands}, but there are {len(self.coefficients)} coefficients beside the first"
            )

    @property
    def open(self) -> bool:
        return not self.coefficients

    def like(self, matrix: NoiseMatrix) -> Banded:
        assert isinstance(matrix, Toeplitz)
        coefficients = tuple(value / UNIT for value in matrix.coefficients) or (0.0,)  # best for a client in all rounds
        return Banded(1 + len(coefficients), coefficients)

    def settled(self, conditions: Conditions) -> Banded:
        """Return this part with its coefficients: by default those of the square root of a sum over rounds."""
        if self.coefficients:
            return self
        bands = min(self.bands or max(conditions.separation, 2), max(conditions.rounds, 2))
        found, here = [], 1.0
        for k in range(1, bands):
            here *= (2 * k - 1) / (2 * k)
            found.append(_fixed(here) / 2**FIXED)
        return Banded(bands, tuple(found))

    @property
    def whole(self) -> tuple[int, ...]:
        """Return the coefficients in units of 2^-20."""
        return tuple(map(_fixed, self.coefficients))

    def event(self, noise_multiplier: float) -> events.Event:
        return events.ToeplitzNoise(noise_multiplier, self.whole)

    def recursion(self) -> Recursion:
        return noise_recursion.Banded(self.whole)


@register("mechanism", "blt")
@dataclass(frozen=True)
class Blt(Correlated):
    """Noise from a few fading sums of all earlier noise (buffered linear Toeplitz): the memory of `buffers` models."""

    name: ClassVar[Kind] = "blt"

    buffers: int = 4  # at most: another one is taken where it takes off noise
    decays: tuple[float, ...] = ()  # θ: what a buffer keeps from round to round; (): optimised for the server's steps
    weights: tuple[float, ...] = ()  # ω: how much of a buffer is taken off, 1 at most in all

    def __post_init__(self) -> None:
        if not 1 <= self.buffers <= 64:
            raise ConfigError(f"mechanism.buffers={self.buffers} must be from 1 to 64")
        if len(self.decays) != len(self.weights) or (self.decays and len(self.decays) != self.buffers):
            raise ConfigError(
                f"mechanism.decays has {len(self.decays)} numbers and mechanism.weights {len(self.weights)}; "
                f"give {self.buffers} of each, or none"
            )
        for name, values in (("decays", self.decays), ("weights", self.weights)):
            if not all(2.0**-FIXED <= value < 1 for value in values):
                raise ConfigError(f"mechanism.{name}={list(values)} must be in [2^-{FIXED}, 1)")
        if sum(self.weights) > 1:
            raise ConfigError(f"mechanism.weights={list(self.weights)} must add up to at most 1")

    @property
    def open(self) -> bool:
        return not self.decays

    def like(self, matrix: NoiseMatrix) -> Blt:
        assert isinstance(matrix, Fading)
        decays, weights = (tuple(value / UNIT for value in values) for values in (matrix.decays, matrix.weights))
        return Blt(len(decays), decays, weights)

    def settled(self, conditions: Conditions) -> Blt:
        """Return this part with its decays and weights: by default near the square root of a sum over rounds.

        That has c_k = ∫ θ^k dθ / (π√(θ(1 − θ))), here by Gauss's rule, which is exact for k below twice the buffers.
        """
        if self.decays:
            return self
        m = self.buffers
        decays = [(1 + math.cos((2 * i + 1) * math.pi / (2 * m))) / 2 for i in range(m)]
        fixed = tuple(max(_fixed(decay), 1) / 2**FIXED for decay in decays)
        return Blt(m, fixed, tuple(max(_fixed(decay / m), 1) / 2**FIXED for decay in decays))

    @property
    def whole(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return decays and weights in units of 2^-20."""
        return tuple(map(_fixed, self.decays)), tuple(map(_fixed, self.weights))

    def event(self, noise_multiplier: float) -> events.Event:
        return events.BltNoise(noise_multiplier, *self.whole)

    def recursion(self) -> Recursion:
        return noise_recursion.Buffered(*self.whole)


@register("mechanism", "tree")
@dataclass(frozen=True)
class Tree(Correlated):
    """Noise of a binary tree over the rounds (Kairouz et al. 2021): a sum over rounds has that of a few nodes."""

    name: ClassVar[Kind] = "tree"

    restart: int = 0  # a fresh tree after so many rounds, a power of two; 0: the best for the server's steps

    def __post_init__(self) -> None:
        if self.restart < 0 or self.restart & (self.restart - 1):
            raise ConfigError(f"mechanism.restart={self.restart} must be a power of two, or 0")

    @property
    def open(self) -> bool:
        return not self.restart

    def like(self, matrix: NoiseMatrix) -> Tree:
        assert isinstance(matrix, Nodes)
        return Tree(matrix.restart)

    def settled(self, conditions: Conditions) -> Tree:
        """Return this part with its restarts: by default so often that a client is once in a tree."""
        return self if self.restart else Tree(1 << (max(conditions.separation, 1).bit_length() - 1))

    def event(self, noise_multiplier: float) -> events.Event:
        return events.TreeNoise(noise_multiplier, self.restart)

    def recursion(self) -> Recursion:
        return noise_recursion.Tree(self.restart)


def _fixed(value: float) -> int:
    """Return a number in units of 2^-20, rounded down, so that a falling sequence stays one."""
    whole: int = math.floor(value * 2**FIXED)
    return whole
