"""Votes in whole numbers: no client moves a query by more than one vote, exactly; no label is given unpaid."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from fedblur.core.rng import Seeded
from fedblur.privacy.events import Votes
from fedblur.voting.release import UNANSWERED, VOTE_STEP, bounded, release_labels


def lengths(whole: torch.Tensor) -> list[int]:
    """Squared norms in Python's whole numbers."""
    return [sum(value**2 for value in row) for row in whole.reshape(-1, whole.shape[-1]).tolist()]


def test_bounded__no_vote_is_longer_than_one_in_whole_numbers() -> None:
    """Votes on the simplex, on the sphere and beyond it."""
    noise = torch.randn(2000, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sphere = noise / noise.norm(dim=1, keepdim=True)
    for votes in (torch.softmax(3 * noise, dim=1), sphere, 1.4 * sphere, noise.sign(), sphere.float()):
        whole = bounded(votes)
        assert whole.dtype == torch.int64
        assert max(lengths(whole)) <= VOTE_STEP**-2
        assert bool((whole.abs() <= votes.double().abs() / VOTE_STEP).all())  # towards zero


@pytest.mark.parametrize("vote", [[1.0, 1.0, 0.0], [1.0, 0.01, 0.0], [2.0, 0.0, 0.0], [math.nan, 0.0, 0.0]])
def test_bounded__a_vote_that_is_longer_counts_as_zero(vote: list[float]) -> None:
    assert bounded(torch.tensor([vote])).tolist() == [[0, 0, 0]]
    assert bounded(torch.tensor([[1.0, 0.0, 0.0]])).tolist() == [[2**20, 0, 0]]


def counts_of(margin: float, samples: int, classes: int) -> torch.Tensor:
    """Whole numbers of VOTE_STEP; class i mod `classes` leads by `margin` votes."""
    counts = torch.zeros(samples, classes, dtype=torch.int64)
    counts[torch.arange(samples), torch.arange(samples) % classes] = int(margin / VOTE_STEP)
    return counts


def test_labels__noise_in_votes_has_the_size_that_is_accounted() -> None:
    """Two classes: the label is right with probability Φ(margin / (σ√2))."""
    labels = release_labels(counts_of(20.0, 20_000, 2), Votes(20_000, 20.0, 0, 0.0), 0.0, Seeded.root(0))
    right = float((labels == torch.arange(20_000) % 2).double().mean())
    assert right == pytest.approx(stats.norm.cdf(1 / math.sqrt(2)), abs=0.015)


def test_labels__never_more_than_were_paid_for() -> None:
    """Everyone agrees on all 100 samples, and 40 answers are in the event."""
    labels = release_labels(counts_of(300.0, 100, 4), Votes(40, 5.0, 100, 10.0), 150.0, Seeded.root(0))
    assert torch.nonzero(labels != UNANSWERED).flatten().tolist() == list(range(40))
