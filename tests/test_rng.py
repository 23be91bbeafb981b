"""Invariant 9: OS entropy unless a seed is given; streams are named and independent."""

import os

import numpy as np
import pytest
import torch
from scipy import stats

from fedblur.rng import Seeded, System, make_rng

CPU = torch.device("cpu")


def test_invariant_9__no_seed_means_os_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = os.urandom
    monkeypatch.setattr(os, "urandom", lambda n: calls.append(n) or real(n))
    rng = make_rng(None)
    assert rng.private
    rng.child("noise").normal(1000, CPU)
    rng.child("cohort").uniform(10)
    assert sum(calls) >= 8 * 1010
    assert not torch.equal(rng.normal(50, CPU), rng.normal(50, CPU))


def test_invariant_9__a_seed_is_reproducible_and_not_private() -> None:
    a, b = make_rng(7), make_rng(7)
    assert not a.private
    assert torch.equal(a.child("round", 3).normal(9, CPU), b.child("round", 3).normal(9, CPU))
    assert not torch.equal(a.child("round", 3).normal(9, CPU), a.child("round", 4).normal(9, CPU))
    assert not torch.equal(a.normal(9, CPU), make_rng(8).normal(9, CPU))


@pytest.mark.parametrize("rng", [System(), Seeded.root(1)])
def test_rng__normal_is_standard_normal(rng) -> None:
    draws = rng.normal(200_001, CPU).double().numpy()
    assert len(draws) == 200_001
    assert stats.kstest(draws, "norm").pvalue > 1e-4
    assert abs(draws.var() - 1) < 0.02
    assert np.isfinite(draws).all()


@pytest.mark.parametrize("rng", [System(), Seeded.root(1)])
def test_rng__uniform_is_in_the_half_open_interval(rng) -> None:
    draws = rng.uniform(100_000)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert stats.kstest(draws, "uniform").pvalue > 1e-4


def test_rng__paths_do_not_collide() -> None:
    root = Seeded.root(0)
    seeds = {root.child("round", t, "client", c).seed() for t in range(50) for c in range(50)}
    assert len(seeds) == 2500
    assert root.child("a", "b").key != root.child("a").key


@pytest.mark.parametrize("name", ["client", "share"])
def test_seeded__many_seeds_are_those_of_the_children(name) -> None:
    root = Seeded.root(3).child("round", 7)
    assert root.seeds(name, [0, 17, -1]) == [root.child(name, i).seed() for i in (0, 17, -1)]
