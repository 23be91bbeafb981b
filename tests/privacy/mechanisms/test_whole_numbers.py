"""From clipped messages to a noisy sum in whole numbers: what `make mutants` must not be able to change unseen."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from fedblur.core.rng import Seeded, System
from fedblur.privacy.clipping import Bounded, clip_l2
from fedblur.privacy.mechanisms import rounded_gaussian
from fedblur.privacy.mechanisms.base import Release
from fedblur.privacy.mechanisms.gaussian import FixedPoint, Gaussian
from tests.worlds import CPU

LANE = 2**15  # coordinates that share a lane


def release(dimension: int = 300, clip_norm: float = 0.3, sigma: float = 1.1, cohort: int = 5) -> Release:
    return Release(dimension, clip_norm, sigma, cohort, CPU)


# --- the grid ---


def test_grid__rounds_towards_zero_so_that_no_norm_grows() -> None:
    request = release()
    grid = FixedPoint.of(request)
    updates = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    rows = clip_l2(updates, request.clip_norm)[0].value
    for row in rows:
        whole = torch.zeros(300, dtype=torch.int64)
        grid.add_rows(whole, row[None])
        exact = [Fraction(value) / Fraction(grid.step) for value in row.tolist()]
        assert whole.tolist() == [math.trunc(value) for value in exact]
        assert sum(value**2 for value in whole.tolist()) * Fraction(grid.step) ** 2 <= Fraction(request.clip_norm) ** 2


def test_grid__is_a_function_of_public_constants_alone() -> None:
    """The cohort that came, the round and a process's part of it must not show in the low bits of what is released."""
    request = release()
    steps = {FixedPoint.of(replace(request, cohort=count, round_=count)).step for count in (0, 1, 2, 7, 100, 10_000)}
    assert steps == {FixedPoint.of(request).step}
    assert FixedPoint.of(replace(request, part=range(2, 4))).step == FixedPoint.of(request).step


def test_grid__noise_in_steps_is_at_least_the_exact_quotient() -> None:
    """σ·S is rounded to a float, half of the time downwards: the scale's margin makes up for it."""
    numbers = np.random.default_rng(0)
    for sigma, clip_norm in zip(numbers.uniform(0.3, 9, 500).tolist(), numbers.uniform(0.01, 5, 500).tolist()):
        request = release(clip_norm=clip_norm, sigma=sigma)
        grid = FixedPoint.of(request)
        exact = Fraction(sigma) * Fraction(clip_norm) / Fraction(grid.step)
        scale = Fraction(grid.scale(request.noise_std))
        assert exact <= scale <= exact * (1 + Fraction(2) ** -48)


def test_grid__sums_are_exact_beyond_what_a_float_holds() -> None:
    """The finest grid that is allowed: 2^41 steps to the clip norm, and 6000 clients at it."""
    request = release(dimension=1, clip_norm=1.0, sigma=2.0**-21, cohort=6000)
    grid = FixedPoint.of(request)
    assert grid.step == 2.0**-41
    value = 1 - 2.0**-24  # the largest float32 below 1
    rows = torch.full((6000, 1), value)
    rows[::2] -= 2.0**-24
    block = [Bounded(part, 1.0) for part in rows.split(5000)]
    total = Gaussian().accumulate(block, request, Seeded.root(0))
    assert int(total) == 3000 * (2**41 - 2**17) + 3000 * (2**41 - 2**18)
    odd = torch.full((2**13 - 1, 1), 1 - 2.0**-41, dtype=torch.float64)
    whole = torch.zeros(1, dtype=torch.int64)
    grid.add_rows(whole, odd)
    assert int(whole) == (2**13 - 1) * (2**41 - 1)  # above 2^53, and odd


# --- the noise ---


def noise(request: Release, rng: Seeded | System) -> torch.Tensor:
    return Gaussian().draw(request, rng)()


def test_gaussian__every_draw_is_new_and_so_is_every_coordinate() -> None:
    request, rng = release(dimension=2 * LANE), System()
    one, two = noise(request, rng), noise(request, rng)
    assert float((one == two).double().mean()) < 0.001
    assert len(one.unique()) > 0.99 * len(one)
    assert not torch.equal(one[:LANE], one[LANE:])


def test_gaussian__adds_noise_to_the_exact_sum_and_only_then_makes_floats() -> None:
    """A float sum plus float noise would have values that another sum cannot reach."""
    request = release(dimension=2)
    grid = FixedPoint.of(request)
    total, draw = torch.tensor([2**40 + 1, -(2**44) + 3]), torch.tensor([-(2**40), 2**44])
    assert Gaussian().release(total, request, draw).tolist() == [grid.step, 3 * grid.step]


@pytest.mark.parametrize("threads", [1, 2])
def test_rounded_gaussian__no_two_lanes_share_their_noise(threads: int) -> None:
    source = Seeded.root(4).keystream()
    drawn = rounded_gaussian.draw(1000.0, 4 * LANE, source, threads).reshape(4, LANE)
    assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 5 / math.sqrt(LANE)
    assert np.array_equal(drawn.ravel(), rounded_gaussian.draw(1000.0, 4 * LANE, source))


def test_rounded_gaussian__follows_its_law_inside_a_bin_too() -> None:
    """64 steps to a standard deviation are four to a bin: proposals without their rejection would show."""
    scale, count = 64.0, 600_000
    drawn = rounded_gaussian.draw(scale, count, Seeded.root(1).keystream())
    reach = int(4 * scale)
    edges = (np.arange(-reach, reach + 1) - 0.5) / scale
    law = np.diff(np.concatenate([[0.0], stats.norm.cdf(edges), [1.0]]))
    observed = np.bincount(np.clip(drawn + reach + 1, 0, len(law) - 1), minlength=len(law))
    assert stats.chisquare(observed, law * count).pvalue > 1e-3


@pytest.mark.parametrize("scale", [2.0**30, 2.0**36])
def test_rounded_gaussian__low_bits_are_as_fair_as_high_ones(scale: float) -> None:
    """Noise of few random bits leaves values out, and what is left out tells what the sum was."""
    drawn = rounded_gaussian.draw(scale, 64_000, Seeded.root(2).keystream())
    assert stats.chisquare(np.bincount(drawn & 63, minlength=64)).pvalue > 1e-3
