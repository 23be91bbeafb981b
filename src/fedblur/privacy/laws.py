"""Exact tests of what a plan claims: the noise follows this law, and so do the cohorts.

In: releases whose sum the auditor knows, and who took part in each. Out: named checks, each with its p-value: the
chance that correct code looks so strange. All random checks of one audit together fire on correct code with a
probability of 10⁻⁶ at most: each p-value is already multiplied by `_TESTS`, and by the number of values that were
searched for the strangest one. A check without randomness has the p-value 0 or 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom, chi2, hypergeom, norm
from torch import Tensor

from fedblur.privacy.mechanisms import Mechanism
from fedblur.privacy.mechanisms.base import Release
from fedblur.privacy.mechanisms.gaussian import FixedPoint, Gaussian
from fedblur.privacy.mechanisms.secure_sum import SecureSum
from fedblur.privacy.sampling import FixedSizeSampler, FullSampler, PoissonSampler, Sampler

Values = NDArray[np.float64]

ALARM = 1e-6
_TESTS = 10  # random checks of one audit, at most
_COLUMNS = 4096  # coordinates, or clients, of which pairs of rounds are compared
_ROUNDS = 500  # rounds that are compared with each other
_EXACT = 2.0**24  # whole numbers below it are exact in float32
_MODULI = (2, 16, 256)
_NEAR = 0.25  # of a grid step: float32's rounding of a rotated vector is far below it
_ROOM = 3.9  # standard deviations of noise that a modulus must hold on either side: what leaves it costs 0.04 % of the
# variance, an eighth of the chance error of 200,000 values


@dataclass(frozen=True)
class Check:
    """One claim that was tested."""

    name: str
    p_value: float | None  # None: not tested, `words` say why
    words: str

    @property
    def broken(self) -> bool:
        return self.p_value is not None and self.p_value < ALARM


@dataclass(frozen=True)
class Observation:
    """One release. Only `heard` ever leaves; the rest is the auditor's knowledge of the inside."""

    release: Release
    heard: Tensor  # [width] float32: the noisy sum
    known: Tensor  # [width] float64: the sum of the messages, without noise

    @property
    def residual(self) -> Tensor:
        """The noise, [width] float64, in units of the standard deviation that is claimed for it."""
        return (self.heard.double() - self.known) / self.release.noise_std


def holds(name: str, true: bool, words: str) -> Check:
    """Make a check without randomness."""
    return Check(name, 1.0 if true else 0.0, words)


def chance(name: str, p_value: float, words: str) -> Check:
    return Check(name, min(1.0, _TESTS * p_value), words)


def messages_fit(longest: float) -> Check:
    """Check the `longest` of all messages, in units of what noise is made for."""
    return holds("messages fit the noise", longest <= 1, f"the longest is {longest:.9f} of what noise is made for")


class NoiseLog:
    """Releases of one run, and what they say about its noise. `spread`: of a mechanism whose law is not known here."""

    def __init__(self, mechanism: Mechanism, spread: float | None = None) -> None:
        self.mechanism = mechanism
        self._known_spread = spread
        self._powers: list[float] = []  # ‖residual‖² of each release
        self._rows: list[Tensor] = []  # residuals of some coordinates, float32
        self._echo: Tensor | None = None  # Σ of each release's circular autocorrelation, [width]
        self._low = np.zeros(max(_MODULI), dtype=np.int64)  # whole numbers, modulo the largest modulus
        self._off = self._values = 0
        self._steps = math.inf  # the noise's standard deviation in steps of the grid: the least of all releases
        self._width = 0

    def add(self, seen: Observation) -> None:
        if seen.release.noise_std == 0:
            return
        residual = seen.residual
        self._width = len(residual)
        self._powers.append(float(residual.square().sum()))
        residual = residual / max(1.0, math.sqrt(self._powers[-1] / self._width))  # more noise than claimed is no echo
        if len(self._rows) < _ROUNDS:
            self._rows.append(residual[:: -(-self._width // _COLUMNS)].float().cpu())
        spectrum = torch.fft.rfft(residual)
        echo = torch.fft.irfft(spectrum.abs().square(), n=self._width)
        self._echo = echo if self._echo is None else self._echo + echo
        release, mechanism = seen.release, self.mechanism
        if isinstance(mechanism, Gaussian):
            step, tolerance = FixedPoint.of(release).step, 0.0
            self._steps = min(self._steps, FixedPoint.of(release).scale(release.noise_std))
            numbers = seen.heard.double() / step  # what was released, in steps of the public grid
        elif isinstance(mechanism, SecureSum):
            grid, rotation, tolerance = mechanism.grid(release.noise_multiplier), mechanism.rotation, _NEAR
            self._steps = min(self._steps, grid.noise_steps)
            if rotation.padded != release.dimension:
                return  # the release alone does not show the numbers
            step, signs = grid.step(release.clip_norm), rotation.signs(release.round_, release.device)
            numbers = rotation.forward(seen.heard[None], signs)[0] / step
        else:
            return
        whole = numbers.round()
        self._values += len(numbers)
        self._off += int(((numbers - whole).abs() > tolerance).sum())
        exact = whole.abs() < _EXACT
        if isinstance(mechanism, Gaussian):  # the sum is known to the last bit: what is left is the noise
            whole = whole - seen.known / step
        exact = whole[exact].long() % max(_MODULI)
        self._low += torch.bincount(exact, minlength=max(_MODULI)).cpu().numpy()

    def checks(self) -> list[Check]:
        if not self._powers:
            return [Check("noise", None, "no noise is claimed, or nothing was released")]
        return [self._variance(), self._smallest(), self._across(), self._between(), self._grid(), self._bits()]

    @property
    def _spread(self) -> float | None:
        """Half the variance of a squared coordinate of the noise: 1 for a Gaussian. None: its law is not known here."""
        if self._known_spread is not None or isinstance(self.mechanism, Gaussian):
            return self._known_spread or 1.0
        if not isinstance(self.mechanism, SecureSum):
            return None
        if 2.0 ** (self.mechanism.part.bits - 1) < _ROOM * self._steps:
            return None  # what leaves the modulus comes back smaller
        return 1 + 1 / (2 * self._steps**2)  # Skellam's fourth cumulant; a discrete Gaussian's is almost 0

    def _variance(self) -> Check:
        if self._spread is None:
            return Check("variance of the noise", None, _UNKNOWN)
        total, count = sum(self._powers), len(self._powers) * self._width
        p_value = float(chi2.cdf(total / self._spread, count / self._spread))
        words = f"{total / count:.4f} of what is claimed, over {count:,} values; one-sided"
        return chance("variance of the noise", p_value, words)

    def _smallest(self) -> Check:
        if self._spread is None:
            return Check("noise in every release", None, _UNKNOWN)
        least, count = min(self._powers), len(self._powers)
        p_value = count * float(chi2.cdf(least / self._spread, self._width / self._spread))
        words = f"the smallest of {count} has {least / self._width:.4f} of the variance that is claimed"
        return chance("noise in every release", p_value, words)

    def _across(self) -> Check:
        """Test for the same noise at another place: the strongest echo of all distances between two coordinates."""
        name, half, count = "noise across coordinates", self._width // 2, len(self._powers) * self._width
        if half < 1 or count < 1000:
            return Check(name, None, f"{count} values are too few")
        assert self._echo is not None
        lags = self._echo[1 : half + 1].cpu().numpy() / math.sqrt(count)
        if self._width % 2 == 0:
            lags[-1] /= math.sqrt(2)  # each pair is counted twice
        place = int(np.argmax(np.abs(lags)))
        p_value = 2 * half * float(norm.sf(abs(lags[place])))
        return chance(name, p_value, f"the strongest echo, {place + 1} coordinates apart, is {abs(lags[place]):.1f} σ")

    def _between(self) -> Check:
        """Test for the same noise in another release. Given one of two, their product is exactly normal."""
        name, count = "noise between releases", len(self._rows)
        if count < 2:
            return Check(name, None, "one release")
        rows = torch.stack(self._rows).double()
        products = (rows @ rows.T / torch.linalg.vector_norm(rows, dim=1).clamp(min=1e-12)[:, None]).numpy()
        strongest = float(np.abs(products[np.triu_indices(count, 1)]).max())
        p_value = count * (count - 1) * float(norm.sf(strongest))
        return chance(name, p_value, f"the strongest echo, of {count * (count - 1) // 2:,} pairs, is {strongest:.1f} σ")

    def _grid(self) -> Check:
        name = "released values on the grid"
        if not self._values:
            return Check(name, None, _NO_GRID)
        words = f"{self._off:,} of {self._values:,} lie off it: values that others' whole numbers cannot give"
        return holds(name, self._off == 0, words)

    def _bits(self) -> Check:
        name, count = "low bits", int(self._low.sum())
        moduli = [m for m in _MODULI if 2 * m <= self._steps and count >= 50 * m]
        if not moduli:
            return Check(name, None, _NO_GRID if not self._values else "no released value shows its low bits")
        found = []
        for modulus in moduli:
            cells = self._low.reshape(-1, modulus).sum(0)
            expected = count / modulus
            found.append(float(chi2.sf(((cells - expected) ** 2 / expected).sum(), modulus - 1)))
        words = f"of {count:,} whole numbers, modulo {', '.join(map(str, moduli))}"
        return chance(name, len(moduli) * min(found), words)


_UNKNOWN = "the law of this mechanism's noise is not known here, or leaves its modulus"
_NO_GRID = "what is released is not on a grid that is known here"


class CohortLog:
    """The cohorts, round by round, against the sampler that the plan accounts for."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._counts = np.zeros(sampler.clients, dtype=np.int64)
        self._sizes: list[int] = []
        self._present: list[NDArray[np.int64]] = []  # of the first clients, which stand for all
        self._shown = min(sampler.clients, _COLUMNS)

    def add(self, ids: Tensor) -> None:
        members = ids.numpy()
        np.add.at(self._counts, members, 1)
        self._sizes.append(len(members))
        if len(self._present) < _ROUNDS:
            self._present.append(members[members < self._shown])

    def checks(self) -> list[Check]:
        sampler = self.sampler
        if isinstance(sampler, FullSampler) or (isinstance(sampler, PoissonSampler) and sampler.rate == 1):
            always = bool((self._counts == len(self._sizes)).all())
            return [holds("cohorts are everyone", always, f"everyone in each of {len(self._sizes)} rounds")]
        if isinstance(sampler, PoissonSampler):
            return [self._rate(sampler), self._spread(sampler), self._busiest(sampler.rate), self._overlap()]
        if isinstance(sampler, FixedSizeSampler):
            words = f"between {min(self._sizes)} and {max(self._sizes)} clients; {sampler.size} are accounted for"
            sizes = holds("sizes of cohorts", set(self._sizes) == {sampler.size}, words)
            return [sizes, self._busiest(sampler.size / sampler.clients), self._overlap()]
        return [Check("cohorts", None, f"the law of {type(sampler).__name__} is not known here")]

    def _rate(self, sampler: PoissonSampler) -> Check:
        """Test, one-sided, for clients who take part more often than is accounted for."""
        total, draws = int(self._counts.sum()), len(self._sizes) * sampler.clients
        words = f"a client takes part in {total / draws:.4g} of the rounds; {sampler.rate:g} is accounted for"
        return chance("sampling rate", float(binom.sf(total - 1, draws, sampler.rate)), words)

    def _spread(self, sampler: PoissonSampler) -> Check:
        """Test, two-sided: cohorts of one size are not Poisson cohorts, nor are clients who come together."""
        name, variance = "sizes of cohorts", sampler.cohort_spread**2
        if variance < 5:
            return Check(
                name, None, f"a cohort's size has a standard deviation of {sampler.cohort_spread:.2g}: too little"
            )
        half = 1 + (1 - 6 * sampler.rate * (1 - sampler.rate)) / (2 * variance)  # a binomial's kurtosis
        power = sum((size - sampler.expected_cohort) ** 2 for size in self._sizes) / variance
        count = len(self._sizes)
        tails = chi2.cdf(power / half, count / half), chi2.sf(power / half, count / half)
        return chance(name, 2 * float(min(tails)), f"their variance is {power / count:.3f} of a Poisson cohort's")

    def _busiest(self, rate: float) -> Check:
        most, rounds = int(self._counts.max()), len(self._sizes)
        p_value = len(self._counts) * float(binom.sf(most - 1, rounds, rate))
        return chance("the busiest client", p_value, f"took part in {most} of {rounds} rounds")

    def _overlap(self) -> Check:
        """Test that rounds draw cohorts independently: the largest overlap of two of them, given one of the two."""
        name, count = "cohorts of different rounds", len(self._present)
        if count < 2:
            return Check(name, None, "one round")
        there = np.zeros((count, self._shown), dtype=np.float32)
        for row, members in enumerate(self._present):
            there[row, members] = 1
        first, second = np.triu_indices(count, 1)
        common = np.rint(there @ there.T)[first, second].astype(np.int64)
        sizes = there.sum(1).astype(np.int64)
        if isinstance(self.sampler, FixedSizeSampler):
            size = self.sampler.size
            chances = hypergeom.sf(common - 1, self.sampler.clients, sizes[first], size)
        else:
            chances = binom.sf(common - 1, sizes[first], self.sampler.expected_cohort / self.sampler.clients)
        place = int(np.argmin(chances))
        words = f"the two most alike, of {len(common):,} pairs, share {common[place]} of {sizes[first[place]]} clients"
        return chance(name, len(common) * float(chances[place]), words)
