"""Correlated noise in whole numbers: it is C⁻¹z, and rounding moves it between neighbours by less than `error`."""

import copy

import numpy as np
import pytest

from fedblur.core.errors import PrivacyError
from fedblur.privacy.mechanisms.noise_recursion import FIXED, Banded, Buffered, Tree, weighted

ONE = 2**FIXED
HALVES = (ONE // 2, ONE * 3 // 8, ONE * 5 // 16)  # of the square root of a sum
DECAYS, WEIGHTS = (1_040_000, 900_001, 300_007), (20_003, 150_000, 353_000)
ROUNDS = 40


def column(recursion) -> np.ndarray:
    """c_0, c_1 … of a Toeplitz matrix, from its settings."""
    if isinstance(recursion, Banded):
        return np.array([1.0, *(c / ONE for c in recursion.coefficients), *[0.0] * ROUNDS])[:ROUNDS]
    decays, weights = np.array(recursion.decays) / ONE, np.array(recursion.weights) / ONE
    return np.array([1.0, *(float((weights * decays**k).sum()) for k in range(ROUNDS - 1))])


def matrix(recursion) -> np.ndarray:
    """C, from its definition."""
    if isinstance(recursion, Tree):
        found = np.zeros((ROUNDS, ROUNDS))
        for t in range(ROUNDS):
            here = t % recursion.restart + 1
            found[t, t + 1 - (here & -here) : t + 1] = 1
        return found
    c = column(recursion)
    return np.array([[c[t - s] if t >= s else 0.0 for s in range(ROUNDS)] for t in range(ROUNDS)])


KINDS = [
    lambda: Banded(HALVES),
    lambda: Buffered(DECAYS, WEIGHTS),
    lambda: Tree(16),
    lambda: Tree(64),
]
NAMES = ["banded", "buffered", "tree", "one tree"]


@pytest.mark.parametrize("make", KINDS, ids=NAMES)
def test_recursion__noise_is_the_inverse_of_the_matrix_times_fresh_noise(make) -> None:
    fresh = np.random.default_rng(0).integers(-(2**33), 2**33, (ROUNDS, 50))
    recursion = make()
    noise = np.stack([recursion.next(z) for z in fresh])
    expected = np.linalg.solve(matrix(make()), fresh.astype(float))
    assert np.abs(noise - expected).max() <= 4 * recursion.error


@pytest.mark.parametrize("make", KINDS, ids=NAMES)
def test_recursion__rounding_moves_neighbours_by_less_than_its_error(make) -> None:
    """The proof's step: with n + Δ for n, the part that is taken off moves by CΔ − Δ, up to less than `error`."""
    rng = np.random.default_rng(1)
    c, most = matrix(make()), 0.0
    for trial in range(20):
        size = 2 ** int(rng.integers(1, 40))
        noise = rng.integers(-size, size, (ROUNDS, 200))
        moved = rng.integers(-size, size, (ROUNDS, 200)) * (rng.random((ROUNDS, 1)) < 0.2)
        taken = [off(make(), values) for values in (noise, noise + moved)]
        exact = (c - np.eye(ROUNDS)) @ moved.astype(np.longdouble)
        most = max(most, float(np.abs((taken[1] - taken[0]).astype(np.longdouble) - exact).max()))
        assert most < make().error or most == make().error == 0, trial
    assert most >= 0.5 * make().error  # the bound is near to what happens


def off(recursion, noise: np.ndarray) -> np.ndarray:
    """w_t, given that the noise came out as this: fresh noise is chosen to make it so."""
    found = []
    for wanted in noise:
        found.append(-copy.deepcopy(recursion).next(np.zeros_like(wanted)))
        recursion.next(wanted + found[-1])
    return np.stack(found)


def test_weighted__is_the_nearest_whole_number_of_the_exact_sum() -> None:
    rng = np.random.default_rng(2)
    weights, values = rng.integers(0, ONE, 7).tolist(), [rng.integers(-(2**50), 2**50, 100) for _ in range(7)]
    for bits in (FIXED, FIXED + 10):
        found = weighted(weights, values, bits)
        for i in range(100):
            exact = sum(int(w) * int(v[i]) for w, v in zip(weights, values, strict=True))
            assert int(found[i]) == (2 * exact + 2**bits) // 2 ** (bits + 1)


def test_recursion__fresh_noise_is_left_as_it_was() -> None:
    for make in KINDS:
        recursion, fresh = make(), np.arange(-5, 6)
        for _ in range(5):
            recursion.next(fresh)
            assert (fresh == np.arange(-5, 6)).all()


def test_recursion__noise_that_64_bits_cannot_hold_is_refused() -> None:
    for recursion in (Banded((ONE,)), Buffered((ONE - 1,), (ONE // 2,))):
        with pytest.raises(PrivacyError, match="64 bits"):
            recursion.next(np.array([2**51]))
