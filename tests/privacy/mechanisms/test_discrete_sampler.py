"""Discrete Gaussian and Poisson: the proof's bounds in 50 digits, and cases that floats must not decide."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from mpmath import mpf
from scipy import stats

from fedblur.core.errors import PrivacyError
from fedblur.core.rng import Seeded
from fedblur.privacy.mechanisms import discrete_sampler
from fedblur.privacy.mechanisms.ddgauss import DiscreteGaussian, sample_discrete_gaussian
from fedblur.privacy.mechanisms.rounded_gaussian import MARGIN, OPEN, ROUNDING, TAIL, TOTAL
from fedblur.privacy.mechanisms.skellam import Poisson, sample_poisson, sample_skellam
from tests.privacy.mechanisms.test_rounded_gaussian import ONES, ZEROS, Told, last_true

GAUSSIANS = [DiscreteGaussian(tau) for tau in (0.3, 2.5, 16.1, 1000.7, 2.0**24 * 1.1)]
POISSONS = [Poisson(mean) for mean in (1e-9, 0.1, 9.99, 200.0, 300.25, 4e7, 2.0**47)]
LAWS = [*GAUSSIANS, *POISSONS]
BINS = discrete_sampler.BINS
every = pytest.mark.parametrize("law", LAWS, ids=str)


def height(law: discrete_sampler.Law, n: int) -> mpf:
    """P(n)/P(mode), apart from the code's own arithmetic."""
    if isinstance(law, DiscreteGaussian):
        return mpmath.exp(-(mpf(n) ** 2) / (2 * mpf(law.tau) ** 2))
    assert isinstance(law, Poisson)
    if n < 0:
        return mpf(0)
    logs = (n - law.mode) * mpmath.log(mpf(law.mean)) - mpmath.loggamma(n + 1) + mpmath.loggamma(law.mode + 1)
    return mpmath.exp(logs)


def numbers(law: discrete_sampler.Law) -> list[int]:
    """Where heights are checked: bins' edges, near the mode, and at random."""
    first, rng = discrete_sampler.table(law).first, np.random.default_rng(0)
    at_random = rng.integers(first[0], first[-1] + law.width, 60)
    return [*first[::41].tolist(), *(law.mode + k for k in range(-20, 21)), *at_random.tolist()]


@every
def test_heights__are_good_to_half_the_margin_and_to_2_to_minus_100(law: discrete_sampler.Law) -> None:
    with mpmath.workdps(80):
        for n in numbers(law):
            exact, found = height(law, n), float(law.heights(np.array([float(n)]))[0])
            assert abs(mpf(found) - exact) <= mpf(law.margin) / 2 * exact + mpf(2) ** -100
            decimal = mpf(str(law.height(n, 50)))
            assert abs(decimal - exact) <= mpf(10) ** -50 * exact


@every
def test_table__weights_are_above_the_largest_height_and_sure_is_below_the_least(law: discrete_sampler.Law) -> None:
    table = discrete_sampler.table(law)
    assert sum(table.weights) == TOTAL
    assert list(table.first) == [law.mode + law.width * (i - BINS // 2) for i in range(BINS)]
    with mpmath.workdps(50):
        for i in [*range(0, BINS, 17), BINS // 2 - 1, BINS // 2]:
            ends = [height(law, int(table.first[i]) + by) for by in (0, law.width - 1)]
            assert table.weights[i] >= table.top * max(ends)
            least = table.top * min(ends) / table.weights[i]
            assert table.sure[i] == 0 or table.sure[i] * (1 + 2.0**-52) + 2.0**-64 <= least


@every
def test_table__bins_have_their_weights_in_whole_numbers(law: discrete_sampler.Law) -> None:
    table, implied = discrete_sampler.table(law), [0] * BINS
    for column in range(BINS):
        implied[column] += int(table.cut[column])
        implied[int(table.alias[column])] += TOTAL // BINS - int(table.cut[column])
    assert tuple(implied) == table.weights


@every
def test_tail__beyond_the_bins_is_below_the_share_that_is_paid_for(law: discrete_sampler.Law) -> None:
    with mpmath.workdps(50):
        if isinstance(law, DiscreteGaussian):
            assert (BINS // 2 - 1) * law.width + 1 > 32 * law.tau - law.width
            assert BINS // 2 * law.width >= 32 * law.tau + 1
            assert 2 * mpmath.exp(-mpf(512)) < TAIL
        else:
            assert isinstance(law, Poisson)
            t = BINS // 2 * law.width - 1  # from the mode, which is less than 1 from the mean
            bound = 2 * mpmath.exp(-(mpf(t) ** 2) / (2 * (mpf(law.mean) + mpf(t) / 3)))
            assert bound < TAIL


@pytest.mark.parametrize("law", [DiscreteGaussian(0.5), DiscreteGaussian(2.5), Poisson(0.1), Poisson(4.2)], ids=str)
def test_law__implied_by_the_code_is_exact_to_1e_12(law: discrete_sampler.Law) -> None:
    """Weight × accepted share of every number, as found by bisection of what the code accepts."""
    table = discrete_sampler.table(law)
    assert law.width == 1
    bins = np.arange(BINS // 2 - 20, BINS // 2 + 21)

    def accepts(r: np.ndarray) -> np.ndarray:
        words = np.stack([bins.astype(np.uint64) << np.uint64(54), np.full(len(bins), 2**63, dtype=np.uint64), r])
        values, accepted = discrete_sampler._propose(words, Told(*ZEROS), law=law)  # type: ignore[arg-type]
        assert np.array_equal(values, table.first[bins])
        return accepted

    share = last_true(accepts, len(bins), 48)
    found = np.array([float(mpf(table.weights[i]) / TOTAL) for i in bins]) * share
    with mpmath.workdps(50):
        exact = [height(law, int(n)) for n in table.first[bins]]
        exact = [float(h / mpmath.fsum(exact)) for h in exact]
    assert np.abs(found / found.sum() - exact).max() < 1e-12


@pytest.mark.parametrize("law", [DiscreteGaussian(1000.7), Poisson(4e7)], ids=str)
def test_decide__a_case_on_the_edge_hangs_on_further_bits(law: discrete_sampler.Law) -> None:
    table, wide = discrete_sampler.table(law), law.width
    for i in (300, 500, 515, 700):
        u = 2**63
        with mpmath.workdps(60):
            n = int(table.first[i]) + (u * wide >> 64)
            r = int(table.top * height(law, n) / table.weights[i] * 2**64)
        assert discrete_sampler.decide(law, i, u, r, Told(0, 0)) == (n, True)  # type: ignore[arg-type]
        assert discrete_sampler.decide(law, i, u, r, Told(0, 2**64 - 1)) == (n, False)  # type: ignore[arg-type]
        words = np.array([[i << 54], [u], [r]], dtype=np.uint64)
        for last, expected in ((0, True), (2**64 - 1, False)):
            assert discrete_sampler._propose(words, Told(0, last), law=law)[1][0] == expected  # type: ignore[arg-type]
        start = -(-(3 << 64) // wide) - 1  # the last word before the bin's fourth number: its further bits decide
        words = np.array([[i << 54], [start], [0]], dtype=np.uint64)
        for lane, step in ((ZEROS, 2), (ONES, 3)):
            values, _ = discrete_sampler._propose(words, Told(*lane), law=law)  # type: ignore[arg-type]
            assert values[0] == table.first[i] + step


@every
def test_draw__chi_square(law: discrete_sampler.Law) -> None:
    count = 100_000
    draws = discrete_sampler.draw(law, count, Seeded.root(1).keystream())
    reach = min(law.width, 60)
    edges = np.unique(law.mode + np.arange(-40, 41) * max(1, law.width) * 2) if law.width > 4 else None
    n = np.arange(law.mode - 12 * reach * 16, law.mode + 12 * reach * 16 + 60)
    if edges is None:
        chances = law.heights(n.astype(float))
        expected = chances / chances.sum() * count
        observed = np.bincount(draws - n[0], minlength=len(n))
    else:
        std = law.tau if isinstance(law, DiscreteGaussian) else None
        cdf = (
            stats.norm.cdf((edges - 0.5) / std) if std else stats.poisson.cdf(edges - 1, law.mean)  # type: ignore[attr-defined]
        )
        expected = np.diff(np.concatenate([[0], cdf, [1]])) * count
        observed = np.bincount(np.searchsorted(edges, draws, side="right"), minlength=len(expected))
    pool = np.floor(np.cumsum(expected) / 100).astype(int).clip(max=int(count / 100) - 1)
    seen, due = np.bincount(pool, observed), np.bincount(pool, expected)
    seen, due = seen[due > 0], due[due > 0]
    assert len(due) == 1 or stats.chisquare(seen, due * seen.sum() / due.sum()).pvalue > 1e-3
    assert seen.sum() == count


def test_draw__is_the_same_for_every_number_of_threads_and_has_no_noise_at_0() -> None:
    source = Seeded.root(3).keystream()
    for sample, scale in ((sample_discrete_gaussian, 300.0), (sample_skellam, 1e4), (sample_poisson, 55.5)):
        one, two, four = (sample(scale, 70_001, source, threads) for threads in (1, 2, 4))
        assert np.array_equal(one, two)
        assert np.array_equal(one, four)
        assert sample(0.0, 3, source).tolist() == [0, 0, 0]
        for wrong in (-1.0, float("nan"), 2.0**52):
            with pytest.raises(PrivacyError, match="must be between 0 and"):
                sample(wrong, 3, source)


def test_constants__are_those_of_the_proof() -> None:
    assert (MARGIN, OPEN, ROUNDING, TAIL) == (2.0**-40, 2.0**-62, 2.0**-48, 2.0**-737)
    assert all(law.margin == MARGIN for law in GAUSSIANS)
    assert all(law.margin == 2.0**-20 for law in POISSONS)
