"""The rounded Gaussian against its law: as implied by the code, by 50-digit arithmetic, and by sampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from mpmath import mpf
from scipy import stats

from fedblur.core.errors import PrivacyError
from fedblur.core.rng import Seeded
from fedblur.privacy.accounting import _CUT_OFF, _LARGEST_EXPONENT, largest_epsilon
from fedblur.privacy.mechanisms import rounded_gaussian as law
from fedblur.privacy.mechanisms.rounded_gaussian import MARGIN, OPEN, ROUNDING, TAIL, TOTAL, aliases

BINS, PER_UNIT = law.BINS, law.PER_UNIT
DIGITS = 50
COLUMN = TOTAL // BINS
SIGN = COLUMN  # the bit of word 0


class Told:
    """A lane that gives the words it is told, and the last of them for ever."""

    def __init__(self, *words: int) -> None:
        self.given, self.told = 0, words

    def words(self, count: int) -> np.ndarray:
        places = range(self.given, self.given + count)
        self.given += count
        return np.array([self.told[min(place, len(self.told) - 1)] for place in places], dtype=np.uint64)


ZEROS, ONES = (0,), (2**64 - 1,)


def of_bin(i: np.ndarray | int) -> np.ndarray:
    """Word 0 for these bins and the sign +: each bin has a column of its own that begins with it."""
    return np.asarray(i, dtype=np.uint64) << np.uint64(55)


def propose(i: np.ndarray | int, u: np.ndarray | int, r: np.ndarray | int, scale: float, lane: Told | None = None):
    parts = np.broadcast_arrays(of_bin(i), np.asarray(u, dtype=np.uint64), np.asarray(r, dtype=np.uint64))
    return law._propose(np.stack([np.atleast_1d(part) for part in parts]), lane or Told(*ZEROS), scale=scale)


def phi(x: mpf) -> mpf:
    """Φ, good in the lower tail too."""
    return mpmath.erfc(-x / mpmath.sqrt(2)) / 2


def rounded(n: int, s: mpf) -> mpf:
    """P(n), without the difference of numbers close to 1."""
    n = abs(n)
    return phi(-(n - mpf(1) / 2) / s) - phi(-(n + mpf(1) / 2) / s)


def last_true(holds: Callable[[np.ndarray], np.ndarray], size: int, bits: int) -> np.ndarray:
    """The share of 2^64 up to which a condition holds that falls from true to false, to this many bits."""
    low = np.zeros(size, dtype=np.uint64)
    for bit in range(63, 63 - bits, -1):
        tried = low + np.uint64(2**bit)
        low = np.where(holds(tried), tried, low)
    return low.astype(np.float64) * 2.0**-64


# --- the law that the code implies ---


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_law__implied_by_the_code_is_the_rounded_gaussian_to_1e_12(scale: float) -> None:
    """No sampling: bisect where the code's values and acceptances change, and integrate over what lies between."""
    bins = np.arange(140)  # up to x = 8.75
    start, _ = propose(bins, 0, 0, scale)
    end, _ = propose(bins, 2**64 - 1, 0, scale)
    assert ((end - start == 0) | (end - start == 1)).all()  # one step in a bin at most, at these scales
    step = last_true(lambda u: propose(bins, u, 0, scale, Told(*ONES))[0] == start, len(bins), 50)
    step[end == start] = 1.0

    nodes, weights = np.polynomial.legendre.leggauss(8)
    at, weight = (nodes + 1) / 2, weights / 2
    pieces = [(start, np.zeros_like(step), step), (end, step, np.ones_like(step))]
    u = np.concatenate([first[:, None] + (last - first)[:, None] * at for _, first, last in pieces])
    i = np.repeat(np.tile(bins, 2)[:, None], len(at), 1)
    words = np.minimum(u * 2.0**64, 2.0**64 - 2**11).astype(np.uint64).ravel()
    accepted = last_true(lambda r: propose(i.ravel(), words, r, scale)[1], i.size, 44).reshape(i.shape) @ weight

    chance = np.array([float(mpf(w) / TOTAL) for w in law.table().weights])[bins]
    found = np.zeros(int(end.max()) + 1)
    for (value, first, last), share in zip(pieces, np.split(accepted, 2), strict=True):
        np.add.at(found, value, chance * share * (last - first))
    found[1:] /= 2  # a sign each; zero has both
    found /= found[0] + 2 * found[1:].sum()
    exact = np.array([float(rounded(n, mpf(scale))) for n in range(len(found))])
    assert np.abs(found - exact).max() < 1e-12


def test_law__bins_have_their_weights_in_whole_numbers() -> None:
    table = law.table()
    implied = [0] * BINS
    for column in range(BINS):
        own = int(table.cut[column])
        assert 0 < own <= COLUMN
        implied[column] += own
        implied[int(table.alias[column])] += COLUMN - own
    assert tuple(implied) == table.weights
    assert sum(implied) == TOTAL == 2**63


def test_law__word_0_chooses_the_bins_of_its_table() -> None:
    """On both sides of every cut, with either sign, and nothing else in the word counts."""
    table, scale = law.table(), 2.0**30
    for offset in (-1, 0):
        inside = table.cut.astype(object) + offset < COLUMN
        columns = np.flatnonzero(inside)
        word = (columns.astype(np.uint64) << np.uint64(55)) | (table.cut[columns] + np.uint64(offset % 2**64))
        for sign in (0, SIGN):
            words = np.stack([word | np.uint64(sign), np.full_like(word, 2**63), np.zeros_like(word)])
            values, _ = law._propose(words, Told(*ZEROS), scale=scale)
            bins = columns if offset else table.alias[columns]
            assert np.array_equal(values, (1 if not sign else -1) * np.rint(scale * (bins + 0.5) / PER_UNIT))


def test_law__a_bin_is_never_accepted_with_more_than_certainty() -> None:
    """W_i ≥ M·h(i/16), which is where h is largest in the bin; and what is taken for sure is below the least."""
    with mpmath.workdps(DIGITS):
        table = law.table()
        for i, weight in enumerate(table.weights):
            assert weight >= table.top * mpmath.exp(-mpf(i * i) / (2 * PER_UNIT**2))
            least = table.top * mpmath.exp(-mpf((i + 1) ** 2) / (2 * PER_UNIT**2)) / weight
            assert table.sure[i] == 0 or table.sure[i] * (1 + 2.0**-52) + 2.0**-64 <= least
        rate = 2 * table.top * mpmath.sqrt(mpmath.pi / 2) * PER_UNIT / mpf(2 * TOTAL)
        assert 0.97 < rate < 1  # of proposals that are accepted


def test_tail__of_the_implied_law_is_the_gaussians_to_1e_9() -> None:
    """Quadrature over bins: weight × accepted share, with the rational numbers that decide."""
    with mpmath.workdps(DIGITS):
        table, masses = law.table(), []
        for i in range(BINS):
            accepted = mpmath.quad(
                lambda u, i=i: table.top * mpmath.exp(-(((i + u) / PER_UNIT) ** 2) / 2) / table.weights[i], [0, 1]
            )
            masses.append(mpf(table.weights[i]) / TOTAL * accepted)
        for t in (1, 4, 6, 10, 20, 31):
            implied = mpmath.fsum(masses[t * PER_UNIT :]) / mpmath.fsum(masses)
            assert abs(implied / (2 * phi(mpf(-t)) - 2 * phi(mpf(-32))) - 1) < 1e-9


@pytest.mark.parametrize("i", [0, 3, 60, 144, 150, 300, 511])
def test_tail__is_reached_and_accepted_with_its_own_probability(i: int) -> None:
    """Forced words, far beyond what sampling sees: r just below M·h(x)/W_i is accepted and just above it is not."""
    scale, u, bits = 2.0**20, 12345678901234567890, 960
    with mpmath.workdps(400):
        table = law.table()
        x = (i + mpf(u) / 2**64) / PER_UNIT  # u's further bits are zeros
        limit = int(table.top * mpmath.exp(-x * x / 2) / table.weights[i] * 2**bits)
    for by, expected in ((-(2 ** (bits - 900)), True), (2 ** (bits - 900), False)):
        r = limit + by
        pairs = [part for k in range(1, bits // 64) for part in (0, r >> (bits - 64 * (k + 1)) & (2**64 - 1))]
        value, accepted = propose(i, u, r >> (bits - 64), scale, Told(*pairs))
        assert accepted[0] == expected
        assert value[0] == round(scale * (i + u / 2**64) / PER_UNIT) or not expected


# --- cases that floats must not decide ---


def edge(i: int, u: int) -> int:
    """The first 64 bits of M·h(x)/W_i."""
    with mpmath.workdps(DIGITS):
        table = law.table()
        return int(table.top * mpmath.exp(-(((i + mpf(u) / 2**64) / PER_UNIT) ** 2) / 2) / table.weights[i] * 2**64)


@pytest.mark.parametrize("i", [1, 7, 31, 90, 140])
def test_decide__an_acceptance_on_the_edge_hangs_on_further_bits(i: int) -> None:
    """The edge lies between r's 64 bits and the next, so the bits that follow decide: these were in no float."""
    for u in (0, 1, 2**63, 2**64 - 2):
        r = edge(i, u)
        assert propose(i, u, r, 3.0, Told(0, 0))[1][0]
        assert not propose(i, u, r, 3.0, Told(0, 2**64 - 1))[1][0]


def test_decide__a_rounding_on_the_edge_hangs_on_further_bits() -> None:
    for scale in (1.0, 3.0, 1000.0, 2.0**20 * 1.1, 2.0**30 * 1.7):
        for i in (3, 17, 40):
            half = math.ceil(scale * i / PER_UNIT) + Fraction(1, 2)
            share = half / Fraction(scale) * PER_UNIT - i  # where in the bin s·x = half
            if not 0 < share < 1:
                continue
            u = int(share * 2**64)  # its first 64 bits
            rest = int(share * 2**128) - (u << 64)
            below = propose(i, u, 0, scale, Told(max(rest - 1, 0), 0))[0][0]
            above = propose(i, u, 0, scale, Told(min(rest + 1, 2**64 - 1), 0))[0][0]
            assert (below, above) == (math.floor(half), math.ceil(half)) or rest == 0


def test_decide__agrees_with_50_digits_on_forced_unclear_proposals() -> None:
    """Random bins and places, r within 2^-40 of the edge or on it, and all bits that follow at random."""
    rng, wrong = np.random.default_rng(0), 0
    table, scale = law.table(), 2.0**20 * 1.37
    for _ in range(300):
        i = int(rng.integers(1, 145))
        u, more_u, more_r = (int(word) for word in rng.integers(0, 2**64, 3, dtype=np.uint64))
        near = int(rng.choice([0, 0, 1, -1, 1000, -1000]))
        r = max(edge(i, u) + near, 0)
        value, accepted = law.decide(i, u, r, scale, Told(more_u, more_r))  # type: ignore[arg-type]
        with mpmath.workdps(DIGITS + 20):
            x = (i + mpf((u << 64) + more_u) / mpf(2) ** 128) / PER_UNIT
            limit = table.top * mpmath.exp(-x * x / 2) / table.weights[i]
            wrong += accepted != (mpf((r << 64) + more_r) / mpf(2) ** 128 < limit)
            wrong += accepted and value != int(mpmath.floor(mpf(scale) * x + 0.5))
    assert wrong == 0


def test_propose__agrees_with_50_digits_on_clear_proposals_too() -> None:
    rng, table, scale = np.random.default_rng(1), law.table(), 2.0**20 * 1.37
    i = rng.integers(0, 100, 500)
    u, r = rng.integers(0, 2**64, (2, 500), dtype=np.uint64)
    values, accepted = propose(i, u, r, scale)
    with mpmath.workdps(DIGITS):
        for k in range(500):
            x = (int(i[k]) + mpf(int(u[k])) / 2**64) / PER_UNIT
            limit = table.top * mpmath.exp(-x * x / 2) / table.weights[int(i[k])]
            assert accepted[k] == (mpf(int(r[k])) / 2**64 < limit)
            assert values[k] == int(mpmath.floor(mpf(scale) * x + 0.5))


# --- every constant of the proof (docs/exact-noise.md) ---


def test_constant__tail_is_above_what_is_cut_off() -> None:
    with mpmath.workdps(DIGITS):
        gaussian, discrete = 2 * phi(mpf(-32)), 2 * mpmath.exp(-mpf(512))
        assert BINS == 32 * PER_UNIT
        assert gaussian < mpf(2) ** -743 < discrete < mpf(TAIL) == mpf(2) ** -737


@pytest.mark.parametrize("delta", [0.5, 1e-5, 1e-10, 2.0**-100])
def test_constant__the_cut_off_is_paid_for_by_its_share_of_delta(delta: float) -> None:
    """D·(1 + e^ε)·TAIL ≤ δ·2^-40 for D = 2^64 draws up to the largest epsilon, and that is no more than needed."""
    with mpmath.workdps(DIGITS):
        cost = mpf(2) ** 64 * (1 + mpmath.exp(mpf(largest_epsilon(delta)) * (1 + mpf(2) ** -50))) * mpf(TAIL)
        assert mpf(delta) * mpf(_CUT_OFF) / 4 < cost <= mpf(delta) * mpf(_CUT_OFF)
    assert _CUT_OFF == 2.0**-40
    assert _LARGEST_EXPONENT == 632


def adversarial() -> tuple[np.ndarray, np.ndarray]:
    """Bins and words where roundings are worst: ends of bins, of binades of x, all ones after the 53rd bit."""
    rng = np.random.default_rng(2)
    i = np.concatenate([rng.integers(0, BINS, 4000), np.repeat([0, 1, 2, 3, 127, 128, 255, 256, 510, 511], 40)])
    u = rng.integers(0, 2**64, len(i), dtype=np.uint64)
    special = [0, 1, 2**10, 2**11 - 1, 2**11, 2**11 + 1, 2**53 - 1, 2**53 + 1, 2**63, 2**63 + 2**10, 2**64 - 1]
    u[4000:] = np.resize(np.array([*special, *(2**64 - 2**k for k in range(1, 13))], dtype=np.uint64), 400)
    u[1000:2000] |= np.uint64(2**11 - 1)
    u[2000:3000] = (u[2000:3000] & ~np.uint64(2**11 - 1)) | np.uint64(2**10)  # a tie
    return i, u


def test_constant__margin_is_twice_the_error_of_an_acceptance_in_floats() -> None:
    i, u = adversarial()
    floats = law.chance(law.place(i, u), i)
    table, worst = law.table(), mpf(0)
    with mpmath.workdps(DIGITS):
        for k in range(len(i)):
            x = (int(i[k]) + mpf(int(u[k])) / 2**64) / PER_UNIT
            for y in (x, x + mpf(2) ** -68):  # what the bits after the 64th leave open
                exact = table.top * mpmath.exp(-y * y / 2) / table.weights[int(i[k])]
                worst = max(worst, abs(mpf(float(floats[k])) / exact - 1))
    assert worst < mpf(2) ** -41 == mpf(MARGIN) / 2


def test_constant__open_is_above_what_64_bits_leave_open() -> None:
    _, r = adversarial()
    floats = r * 2.0**-64
    for word, value in zip(r.tolist(), floats.tolist(), strict=True):
        error = max(abs(Fraction(value) - Fraction(word + end, 2**64)) for end in (0, 1))
        assert error <= Fraction(value) / 2**52 + Fraction(OPEN) / 4
    assert OPEN == 2.0**-62


@pytest.mark.parametrize("scale", [0.3, 3.0, 2.0**20 * 1.1, 2.0**33, 2.0**40])
def test_constant__rounding_is_above_the_error_of_s_times_x_in_floats(scale: float) -> None:
    i, u = adversarial()
    floats = scale * law.place(i, u)
    for k in range(len(i)):
        for end in (0, 1):
            exact = Fraction(scale) * Fraction((int(i[k]) << 64) + int(u[k]) + end, PER_UNIT << 64)
            allowed = Fraction(ROUNDING) / 8 * Fraction(float(floats[k])) + Fraction(law.REST) / 16 * Fraction(scale)
            assert abs(Fraction(float(floats[k])) - exact) <= allowed


@pytest.mark.parametrize("bits", [64, 128, 320])
def test_decide__its_bounds_of_a_height_hold_and_are_narrow(bits: int) -> None:
    rng = np.random.default_rng(4)
    with mpmath.workdps(200):
        for numerator in (*(int(n) for n in rng.integers(1, 2**63, 50)), 0, 1, 2**63):
            x = Fraction(numerator, 2**58)  # up to 32
            exact = mpmath.exp(-((mpf(x.numerator) / x.denominator) ** 2) / 2)
            low, high = (law._height(x, bits, down=down) for down in (True, False))
            low, high = (mpf(bound.numerator) / bound.denominator for bound in (low, high))
            assert low < exact < high < low * (1 + mpf(2) ** (-bits - 20))


def test_aliases__divide_any_weights_exactly() -> None:
    rng = np.random.default_rng(3)
    for size in (2, 8, 1024):
        weights = [int(w) + 1 for w in rng.integers(0, 2**40, size) ** 2 >> 60]
        weights[0] += TOTAL - sum(weights)
        cut, alias = aliases(weights)
        implied = list(cut)
        for column in range(size):
            implied[alias[column]] += TOTAL // size - cut[column]
        assert implied == weights


# --- draws ---


@pytest.mark.parametrize("scale", [0.5, 3.0, 2.0**10, 2.0**20 * 1.3, 2.0**30 * 1.9])
def test_draw__chi_square_and_moments(scale: float) -> None:
    count = 1_000_000
    draws = law.draw(scale, count, Seeded.root(1).keystream())
    cells = np.unique(np.rint(stats.norm.ppf(np.linspace(0, 1, 401)[1:-1]) * scale)) + 0.5
    expected = np.diff(stats.norm.cdf(np.concatenate([[-np.inf], cells / scale, [np.inf]]))) * count
    observed = np.bincount(np.searchsorted(cells, draws), minlength=len(expected))
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    n = np.arange(-20, 21)
    variance = scale**2 + 1 / 12
    if scale < 1:
        variance = float(n**2 @ (stats.norm.cdf((n + 0.5) / scale) - stats.norm.cdf((n - 0.5) / scale)))
    x = draws / math.sqrt(variance)
    assert abs(x.mean()) < 4.5 / math.sqrt(count)
    assert abs(x.var() - 1) < 4.5 * math.sqrt(2.1 / count)
    if scale > 1:
        assert abs((x**4).mean() - 3) < 4.5 * math.sqrt(96 / count) + 0.02 / scale**2
        assert abs((x**3).mean()) < 4.5 * math.sqrt(15 / count)


def test_draw__low_bits_are_fair() -> None:
    """At 2^20 steps the last eight bits of a draw say nothing about its size, nor of the one after it."""
    draws = law.draw(2.0**20, 500_000, Seeded.root(2).keystream())
    low = draws & 255
    assert stats.chisquare(np.bincount(low, minlength=256)).pvalue > 1e-3
    table = np.zeros((4, 8))
    np.add.at(table, (np.digitize(np.abs(draws) / 2**20, [0.3, 0.7, 1.2]), low >> 5), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3
    assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 4.5 / math.sqrt(len(draws))


def test_draw__tails_as_far_as_sampling_sees() -> None:
    draws = np.abs(law.draw(2.0**20, 8_000_000, Seeded.root(3).keystream(), 2)) / 2.0**20
    for t in (3.0, 4.0, 4.5, 5.0):
        expected = len(draws) * 2 * stats.norm.sf(t)
        found = int((draws > t).sum())
        assert stats.poisson.ppf(1e-4, expected) <= found <= stats.poisson.ppf(1 - 1e-4, expected)


@pytest.mark.parametrize("scale", [1.5, 2.0**20 * 1.3])
def test_draw__is_the_same_for_every_number_of_threads(scale: float) -> None:
    one, two, four = (law.draw(scale, 100_003, Seeded.root(4).keystream(), threads) for threads in (1, 2, 4))
    assert np.array_equal(one, two)
    assert np.array_equal(one, four)
    assert np.array_equal(law.begin(scale, 100_003, Seeded.root(4).keystream())().numpy(), one)


def test_draw__lanes_do_not_repeat_each_other() -> None:
    draws = law.draw(2.0**40, 4 * 2**15, Seeded.root(5).keystream())
    assert len(np.unique(draws)) == len(draws)


def test_draw__what_was_rejected_is_drawn_from_new_words() -> None:
    asked: list[np.ndarray] = []

    class Listening:
        inner = Seeded.root(6).keystream().lane(0)

        def words(self, count: int) -> np.ndarray:
            asked.append(self.inner.words(count))
            return asked[-1]

    class Source:
        def lane(self, number: int) -> Listening:
            return Listening()

    draws = law.draw(2.0**40, 5000, Source())  # type: ignore[arg-type]
    assert len(asked) > 2
    assert len(np.unique(np.concatenate(asked))) == sum(map(len, asked))
    values, accepted = law._propose(asked[0].reshape(3, 5000), Told(*ZEROS), scale=2.0**40)  # type: ignore[arg-type]
    assert np.array_equal(draws[accepted], values[accepted])
    assert len(asked[1]) == 3 * int((~accepted).sum())
    again, kept = law._propose(asked[1].reshape(3, -1), Told(*ZEROS), scale=2.0**40)  # type: ignore[arg-type]
    assert np.array_equal(draws[~accepted][kept], again[kept])


def test_draw__edges() -> None:
    source = Seeded.root(0).keystream()
    assert law.draw(0.0, 5, source).tolist() == [0] * 5
    assert law.draw(1e-300, 5, source).tolist() == [0] * 5
    assert len(law.draw(2.0, 0, source)) == 0
    for scale in (-1.0, math.nan, 2.0**41, math.inf):
        with pytest.raises(PrivacyError, match="between 0 and 2\\^40"):
            law.draw(scale, 5, source)
