"""Sensitivities against all patterns of participation, and gains against inverse matrices and simulated noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pytest

from fedblur.core.errors import PrivacyError
from fedblur.privacy.noise_matrices import LARGEST, ROUND_UP, UNIT, Blt, NoiseMatrix, Toeplitz, Tree

FALLING = Toeplitz((UNIT // 2, 3 * UNIT // 8, 5 * UNIT // 16, UNIT // 4, UNIT // 5, 0, 0))
SIGNED = Toeplitz((5 * UNIT // 4, -UNIT // 3, UNIT // 7))  # 4 bands
BUFFERS = Blt((UNIT - UNIT // 50, UNIT // 2), (UNIT // 3, UNIT // 4))
MATRICES = [
    Toeplitz(()), FALLING, Toeplitz((UNIT,) * 11), SIGNED, Blt((UNIT - 1,), (UNIT,)), BUFFERS,
    *(Tree(2**j) for j in range(6)),
]  # fmt: skip


def patterns(rounds: int, separation: int, at_most: int, first: int = 0) -> Iterator[tuple[int, ...]]:
    """Yield all sets of rounds in which a client may take part, the empty one included."""
    yield ()
    if at_most:
        for chosen in range(first, rounds):
            for rest in patterns(rounds, separation, at_most - 1, chosen + separation):
                yield (chosen, *rest)


@lru_cache(maxsize=200)
def indicators(rounds: int, separation: int, at_most: int) -> np.ndarray:
    return np.array([np.isin(np.arange(rounds), pattern) for pattern in patterns(rounds, separation, at_most)], float)


def norms(matrix: NoiseMatrix, clients: np.ndarray) -> np.ndarray:
    """Bound ‖Σ C[:, t] u_t‖ for each row of rounds; with entries of one sign it is reached by equal u_t."""
    gram = matrix.matrix(clients.shape[1]).T @ matrix.matrix(clients.shape[1])
    return np.sqrt(np.einsum("ps,st,pt->p", clients, np.abs(gram), clients, optimize=True))


def brute_force(matrix: NoiseMatrix, rounds: int, separation: int, at_most: int) -> float:
    return float(norms(matrix, indicators(rounds, separation, at_most)).max())


def in_turn(matrix: NoiseMatrix, rounds: int, groups: int) -> float:
    return float(norms(matrix, np.eye(groups)[np.arange(rounds) % groups].T).max())


def allowed(matrix: NoiseMatrix, separation: int) -> bool:
    return matrix is not SIGNED or separation >= SIGNED.bands


@pytest.mark.parametrize("matrix", MATRICES, ids=str)
@pytest.mark.parametrize("rounds", [1, 2, 5, 8, 11, 12])
def test_sensitivity__is_that_of_the_worst_of_all_patterns(matrix: NoiseMatrix, rounds: int) -> None:
    for separation in {1, 2, 3, 4, 5, 7, rounds, rounds + 3}:
        if not allowed(matrix, separation):
            continue
        most = -(-rounds // separation)
        for at_most in {1, 2, 3, most} - set(range(most + 1, 4)):
            exact = brute_force(matrix, rounds, separation, at_most)
            assert matrix.sensitivity(rounds, separation, at_most) == pytest.approx(exact * ROUND_UP, rel=1e-12)
        unlimited = brute_force(matrix, rounds, separation, most)
        for at_most in (None, most, most + 5):
            assert matrix.sensitivity(rounds, separation, at_most) == pytest.approx(unlimited * ROUND_UP, rel=1e-12)


@pytest.mark.parametrize("restart", [4, 8, 16, 32])
@pytest.mark.parametrize("separation", [3, 5, 7])
def test_tree__sensitivity_is_that_of_the_worst_pattern_of_many_rounds(restart: int, separation: int) -> None:
    tree = Tree(restart)
    for rounds in (19, 24):
        for at_most in (2, 8):
            exact = brute_force(tree, rounds, separation, min(at_most, -(-rounds // separation)))
            assert tree.sensitivity(rounds, separation, at_most) == pytest.approx(exact * ROUND_UP, rel=1e-12)


@pytest.mark.parametrize("matrix", MATRICES, ids=str)
def test_sensitivity_in_turn__is_that_of_the_worst_group(matrix: NoiseMatrix) -> None:
    for rounds in (1, 6, 12, 30):
        for groups in (1, 2, 3, 4, 5, 8, 40):
            if allowed(matrix, groups):
                exact = in_turn(matrix, rounds, groups)
                assert matrix.sensitivity_in_turn(rounds, groups) == pytest.approx(exact * ROUND_UP, rel=1e-12)


def test_sensitivity_in_turn__coefficients_that_grow_may_overlap() -> None:
    growing = Toeplitz((UNIT // 4, 2 * UNIT, UNIT))
    assert growing.sensitivity_in_turn(9, 3) == pytest.approx(in_turn(growing, 9, 3) * ROUND_UP, rel=1e-12)
    with pytest.raises(PrivacyError, match="some grow, or exceed 1"):
        growing.sensitivity(9, 3)


def test_sensitivity__refuses_coefficients_whose_worst_pattern_is_not_known() -> None:
    for coefficients in ((UNIT + 1,), (UNIT // 2, UNIT // 2 + 1)):  # each one step beyond the theorem
        with pytest.raises(PrivacyError, match="use at most 1 bands, or coefficients that never grow"):
            Toeplitz(coefficients).sensitivity(9, 1)
        Toeplitz(coefficients).sensitivity(9, 3)  # columns do not overlap
    for call in (SIGNED.sensitivity, SIGNED.sensitivity_in_turn):
        with pytest.raises(PrivacyError, match="some are negative"):
            call(9, 3)


@pytest.mark.parametrize("matrix", MATRICES, ids=str)
def test_sensitivity__never_falls_with_more_rounds_or_more_times(matrix: NoiseMatrix) -> None:
    for separation in (4, 6):
        by_rounds = [matrix.sensitivity(rounds, separation) for rounds in range(70)]
        assert by_rounds == sorted(by_rounds)
        assert by_rounds[0] == 0
        by_times = [matrix.sensitivity(64, separation, times) for times in range(1, 20)]
        assert by_times == sorted(by_times)
        in_turn = [matrix.sensitivity_in_turn(rounds, separation) for rounds in range(70)]
        assert in_turn == sorted(in_turn)
        assert in_turn[-1] <= by_rounds[-1]


@pytest.mark.parametrize("matrix", MATRICES, ids=str)
def test_gain__is_the_norm_of_the_inverse_matrix_times_the_weights(matrix: NoiseMatrix) -> None:
    weights = np.random.default_rng(0).standard_normal((3, 4, 21))
    inverse = np.linalg.inv(matrix.matrix(21))
    expected = np.linalg.norm(weights @ inverse, axis=-1)
    assert matrix.gain(weights) == pytest.approx(expected, rel=1e-9)
    assert float(matrix.gain(weights[0, 0])) == pytest.approx(expected[0, 0], rel=1e-9)


@pytest.mark.parametrize("restart", [1, 2, 8, 64])
def test_tree__noise_of_a_round_is_a_signed_sum_of_nodes(restart: int) -> None:
    tree, rounds = Tree(restart), 23
    inverse = np.eye(rounds)
    for round_ in range(1, rounds + 1):
        inverse[round_ - 1, [child - 1 for child in tree.children(round_)]] = -1
        for child in tree.children(round_):
            assert tree.parents(rounds)[child - 1] == round_
    assert np.array_equal(inverse @ tree.matrix(rounds), np.eye(rounds))
    prefix = np.abs(np.tril(np.ones((restart, restart))) @ np.linalg.inv(tree.matrix(restart))).round().sum(axis=1)
    assert prefix.tolist() == [r.bit_count() for r in range(1, restart + 1)]  # nodes whose rounds are 1 to r


@pytest.mark.parametrize("matrix", [FALLING, SIGNED, BUFFERS, Tree(8)], ids=str)
def test_noise__drawn_round_by_round_has_the_gain(matrix: NoiseMatrix) -> None:
    """Noise n_t = z_t - Σ_k c_k n_{t-k}, as a server draws it: the sum over rounds scatters by `gain`."""
    draws, rounds = 40_000, 12
    z = np.random.default_rng(1).standard_normal((rounds, draws))
    c = matrix.matrix(rounds)
    noise = np.zeros_like(z)
    for t in range(rounds):
        noise[t] = z[t] - c[t, :t] @ noise[:t]
    for weights in (np.ones(rounds), np.arange(rounds, 0.0, -1)):
        gain = float(matrix.gain(weights))
        assert np.std(weights @ noise) == pytest.approx(gain, rel=6 / math.sqrt(2 * draws))


@pytest.mark.parametrize("matrix", [FALLING, BUFFERS, Tree(8)], ids=str)
def test_noise__hides_the_worst_client_like_one_gaussian_of_the_sensitivity(matrix: NoiseMatrix) -> None:
    """The best test between a client's data and none scatters by 1 and moves by the sensitivity: simulated, d = 1."""
    draws, rounds, separation = 40_000, 11, 3
    clients = indicators(rounds, separation, 4)
    client = clients[norms(matrix, clients).argmax()]
    noise = np.linalg.inv(matrix.matrix(rounds)) @ np.random.default_rng(2).standard_normal((rounds, draws))
    covariance = np.cov(noise)  # of what a server would release, estimated without C
    direction = np.linalg.solve(covariance, client)
    moved, scatter = direction @ client, np.std(direction @ noise)
    assert moved / scatter == pytest.approx(matrix.sensitivity(rounds, separation), rel=0.03)


def test_columns_overlap__counts_bands() -> None:
    assert not SIGNED.columns_overlap(4)
    assert SIGNED.columns_overlap(3)
    assert not Tree(8).columns_overlap(8)
    assert Tree(8).columns_overlap(7)
    assert BUFFERS.columns_overlap(1000)
    for matrix in (SIGNED, Tree(4)):
        gram = matrix.matrix(30).T @ matrix.matrix(30)
        assert not np.triu(gram, 4).any()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Toeplitz((0.5,)), "0.5"),  # type: ignore[arg-type]
        (lambda: Toeplitz((True,)), "True"),
        (lambda: Toeplitz((LARGEST + 1,)), str(LARGEST + 1)),
        (lambda: Toeplitz((LARGEST // 2, -LARGEST // 2, 1)), f"{LARGEST + 1} together"),
        (lambda: Blt((UNIT,), (1,)), f"from 1 to {UNIT - 1}"),
        (lambda: Blt((0,), (1,)), "decays has 0"),
        (lambda: Blt((1,), (0,)), "weights has 0"),
        (lambda: Blt((1, 2), (1,)), "one of each per buffer"),
        (lambda: Blt((), ()), "one of each per buffer"),
        (lambda: Blt((1, 2), (UNIT, 1)), "at most"),
        (lambda: Tree(0), "restart has 0"),
        (lambda: Tree(12), "power of two"),
        (lambda: Tree(8).sensitivity(-1, 1), "rounds=-1"),
        (lambda: Tree(8).sensitivity(5, 0), "separation=0"),
        (lambda: FALLING.sensitivity(5, 1, 0), "at_most=0"),
        (lambda: FALLING.sensitivity_in_turn(5, 0), "groups=0"),
    ],
)
def test_matrices__refuse_what_is_no_matrix(make: object, words: str) -> None:
    with pytest.raises(PrivacyError, match=words):
        make()  # type: ignore[operator]
