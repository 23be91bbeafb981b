"""Correlated noise as a run draws it, against what its event claims: simulated, coordinate by coordinate."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedblur.core.rng import Seeded
from fedblur.privacy.events import Gaussian, InTurn, MinSeparated
from fedblur.privacy.mechanisms.base import Conditions, Release
from fedblur.privacy.mechanisms.correlated import Banded, Blt, Correlated, SeededNoise, Tree
from fedblur.privacy.mechanisms.gaussian import FixedPoint
from tests.privacy.test_noise_matrices import indicators

ROUNDS, SEPARATION, DRAWS, SIGMA, CLIP = 11, 3, 20_000, 2.0, 0.5
PARTS = [
    Banded(),
    Banded(coefficients=(0.9, 0.6, 0.5, 0.5)),
    Blt(2, decays=(0.95, 0.5), weights=(0.3, 0.2)),
    Tree(4),
    Tree(16),
]


@pytest.fixture(scope="module", params=PARTS, ids=str)
def drawn(request: pytest.FixtureRequest) -> tuple[Correlated, np.ndarray]:
    """The part with all of its numbers, and its noise [rounds, draws] in units of the clip norm."""
    conditions = Conditions(DRAWS, CLIP, expected_cohort=4, clients=30, rounds=ROUNDS, separation=SEPARATION)
    mechanism = request.param.bind(conditions).started(SeededNoise(Seeded.root(11)))
    noise = []
    for number in range(1, ROUNDS + 1):
        release = Release(DRAWS, CLIP, SIGMA, 4, torch.device("cpu"), number=number)
        noise.append(mechanism.draw(release, Seeded.root(0))().double().numpy() * FixedPoint.of(release).step / CLIP)
    return mechanism.part, np.stack(noise)


def test_noise__hides_the_worst_client_as_its_event_says(drawn: tuple[Correlated, np.ndarray]) -> None:
    """The best test of whether a client's data are in: how far they move what is released, over its scatter."""
    part, noise = drawn
    inverse = np.linalg.inv(np.cov(noise))
    clients = indicators(ROUNDS, SEPARATION, ROUNDS)
    told_apart = np.sqrt(np.einsum("ps,st,pt->p", clients, inverse, clients))
    release, count = MinSeparated(SEPARATION, 0, "", part.event(SIGMA)).resolved(ROUNDS)
    assert isinstance(release, Gaussian)
    assert count == 1
    assert told_apart.max() == pytest.approx(1 / release.noise_multiplier, rel=0.03)

    turns = np.eye(SEPARATION)[np.arange(ROUNDS) % SEPARATION].T
    told_apart = np.sqrt(np.einsum("ps,st,pt->p", turns, inverse, turns))
    release, _ = InTurn(SEPARATION, "", part.event(SIGMA)).resolved(ROUNDS)
    assert isinstance(release, Gaussian)
    assert told_apart.max() == pytest.approx(1 / release.noise_multiplier, rel=0.03)


def test_noise__in_a_sum_over_rounds_has_the_gain_of_its_matrix(drawn: tuple[Correlated, np.ndarray]) -> None:
    part, noise = drawn
    matrix = part.event(SIGMA).matrix  # type: ignore[attr-defined]
    for weights in (np.ones(ROUNDS), 0.9 ** np.arange(ROUNDS), np.eye(ROUNDS)[4]):
        assert np.std(weights @ noise) == pytest.approx(SIGMA * float(matrix.gain(weights)), rel=0.03)
