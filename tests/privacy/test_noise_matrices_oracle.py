"""Noise matrices against jax-privacy and dp_accounting, to 1e-6. oracles/noise_matrices.py has made the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


def test_oracle__has_every_kind() -> None:
    counts = [
        len(case.get("separated", case.get("bounds"))) + len(case["in_turn"]) for case in (c.values[0] for c in CASES)
    ]
    assert len(counts) == 17
    assert min(counts) >= 4
    assert sum(counts) > 100
