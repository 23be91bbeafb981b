"""Noise matrices against jax-privacy and dp_accounting, to 1e-6. oracles/noise_matrices.py has made the figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedblur.privacy.accounting import epsilon
from fedblur.privacy.events import BltNoise, Event, InTurn, MinSeparated, ToeplitzNoise, TreeNoise
from fedblur.privacy.noise_matrices import Blt, NoiseMatrix, Toeplitz, Tree

ORACLE = json.loads((Path(__file__).parent / "oracles" / "noise_matrices.json").read_text(encoding="utf-8"))


def matrix_of(case: dict[str, Any]) -> NoiseMatrix:
    if "coefficients" in case:
        return Toeplitz(tuple(case["coefficients"]))
    return Tree(case["restart"]) if "restart" in case else Blt(tuple(case["decays"]), tuple(case["weights"]))


CASES = [
    pytest.param(case, id=f"{kind}-{i}") for kind in ("banded", "blt", "tree") for i, case in enumerate(ORACLE[kind])
]


@pytest.mark.parametrize("case", CASES)
def test_oracle__sensitivity(case: dict[str, Any]) -> None:
    matrix, rounds = matrix_of(case), case["rounds"]
    for separation, at_most, figure in case.get("separated", ()):
        assert matrix.sensitivity(rounds, separation, at_most) == pytest.approx(figure, rel=1e-6)
    for groups, figure in case["in_turn"]:
        assert matrix.sensitivity_in_turn(rounds, groups) == pytest.approx(figure, rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_oracle__error(case: dict[str, Any]) -> None:
    matrix, rounds = matrix_of(case), case["rounds"]
    each = (1 - 0.9 ** np.arange(1, rounds + 1)) / 0.1
    for name, column in (("sums", np.ones(rounds)), ("momentum", each)):
        weights = np.array([[column[t - s] if t >= s else 0.0 for s in range(rounds)] for t in range(rounds)])
        squared = matrix.gain(weights) ** 2
        assert [squared.mean(), squared[-1]] == pytest.approx(case["errors"][name], rel=1e-6)


@pytest.mark.parametrize("case", ORACLE["tree"], ids=lambda case: f"{case['restart']}-{case['rounds']}")
def test_oracle__tree(case: dict[str, Any]) -> None:
    tree, rounds = Tree(case["restart"]), case["rounds"]
    assert tree.sensitivity(rounds, rounds) == pytest.approx(case["single"], rel=1e-6)
    for separation, at_most, bound in case["bounds"]:  # jax-privacy bounds it from above: sums of each row's largest
        assert tree.sensitivity(rounds, separation, at_most) <= bound * (1 + 1e-6)


def test_oracle__tree_of_dp_accounting() -> None:
    for rounds, squared in ORACLE["tree, one participation"]:
        assert Tree(2048).sensitivity(rounds, rounds) ** 2 == pytest.approx(squared, rel=1e-6)


def epsilon_of_one_gaussian(noise_multiplier: float, delta: float) -> float:
    """Return ε of the Gaussian mechanism by its exact law: δ = Φ(1/2σ - εσ) - e^ε Φ(-1/2σ - εσ)."""
    half, sigma = 1 / (2 * noise_multiplier), noise_multiplier

    def excess(epsilon: float) -> float:
        return float(norm.cdf(half - epsilon * sigma) - math.exp(epsilon) * norm.cdf(-half - epsilon * sigma) - delta)

    return float(brentq(excess, 0, 50, xtol=1e-12))


@pytest.mark.parametrize("case", [case for case in CASES if case.values[0]["rounds"] == 40])
def test_oracle__epsilon_of_a_whole_run(case: dict[str, Any]) -> None:
    """The oracle's sensitivity and the exact law of a Gaussian, against what a ledger of such a run adds up to."""
    matrix, rounds, delta = matrix_of(case), case["rounds"], 1e-5
    inner: Event
    if isinstance(matrix, Toeplitz):
        inner = ToeplitzNoise(30.0, matrix.coefficients)
    elif isinstance(matrix, Tree):
        inner = TreeNoise(30.0, matrix.restart)
    else:
        assert isinstance(matrix, Blt)
        inner = BltNoise(30.0, matrix.decays, matrix.weights)
    for separation, at_most, figure in case.get("separated", [[rounds, None, case.get("single")]]):
        event = MinSeparated(separation, at_most or 0, "", inner)
        expected = epsilon_of_one_gaussian(30.0 / figure, delta)
        assert epsilon(event, rounds, delta) == pytest.approx(expected, rel=1e-6)
    for groups, figure in case["in_turn"]:
        expected = epsilon_of_one_gaussian(30.0 / figure, delta)
        assert epsilon(InTurn(groups, "", inner), rounds, delta) == pytest.approx(expected, rel=1e-6)


def test_oracle__has_every_kind() -> None:
    counts = [
        len(case.get("separated", case.get("bounds"))) + len(case["in_turn"]) for case in (c.values[0] for c in CASES)
    ]
    assert len(counts) == 17
    assert min(counts) >= 4
    assert sum(counts) > 100
