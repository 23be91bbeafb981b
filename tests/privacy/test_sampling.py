"""Who takes part: the cohorts that are drawn are those that the event describes."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from fedblur.core.errors import ConfigError
from fedblur.core.registry import build, parts
from fedblur.core.rng import Seeded, System
from fedblur.privacy.accounting import make_plan
from fedblur.privacy.events import FixedSizeSampled, Gaussian, PoissonSampled
from fedblur.privacy.mechanisms.gaussian import Gaussian as GaussianMechanism
from fedblur.privacy.sampling import Fixed, Full, Poisson, Sampler
from tests.worlds import calls

RNG = Seeded.root(7)


def cohorts(sampler: Sampler, rounds: int) -> list[torch.Tensor]:
    return [sampler.cohort(RNG.child("round", t)) for t in range(rounds)]


def test_poisson__cohort_sizes_are_binomial() -> None:
    sizes = [len(c) for c in cohorts(Poisson().sampler(50, 0.2), 4000)]
    edges = np.arange(5, 16)  # pooled tails, so that every bin expects enough
    counts = np.histogram(np.clip(sizes, 5, 15), bins=np.append(edges, 16))[0]
    law = stats.binom(50, 0.2)
    expected = np.array([law.cdf(5), *(law.pmf(k) for k in range(6, 15)), law.sf(14)]) * len(sizes)
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_poisson__clients_join_independently_and_equally_often() -> None:
    sampler = Poisson().sampler(20, 0.3)
    joined = np.zeros((4000, 20))
    for row, cohort in zip(joined, cohorts(sampler, 4000)):
        row[cohort.numpy()] = 1
    assert stats.chisquare(joined.sum(0)).pvalue > 1e-3
    correlation = np.corrcoef(joined.T) - np.eye(20)
    assert np.abs(correlation).max() < 5 / np.sqrt(4000)


def test_fixed__size_is_exact_and_clients_equally_likely() -> None:
    sampler = Fixed().sampler(30, 0.2)
    drawn = cohorts(sampler, 3000)
    assert {len(c) for c in drawn} == {6}
    assert all(len(set(c.tolist())) == 6 for c in drawn)
    assert stats.chisquare(np.bincount(torch.cat(drawn).numpy(), minlength=30)).pvalue > 1e-3


def test_fixed__everyone_at_rate_one() -> None:
    assert Fixed().sampler(9, 1.0).cohort(RNG).tolist() == list(range(9))


def test_full__everyone_every_round() -> None:
    assert Full().sampler(9, 1.0).cohort(RNG).tolist() == list(range(9))


@pytest.mark.parametrize("name", ["poisson", "fixed", "full"])
def test_cohort__sorted_int64_ids(name: str) -> None:
    ids = build("sampling", name).sampler(100, 1.0 if name == "full" else 0.25).cohort(RNG)
    assert ids.dtype == torch.int64
    assert ids.tolist() == sorted(set(ids.tolist()))
    assert 0 <= int(ids.min()) <= int(ids.max()) < 100


class Uniform:
    """A stream of which only `uniform` may be used; it gives what it is told."""

    private = True

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def uniform(self, count: int) -> NDArray[np.float64]:
        assert count == len(self.values)
        return np.array(self.values)


def test_cohort__comes_from_uniform_draws_only() -> None:
    stream = Uniform([0.9, 0.1, 0.5, 0.2, 0.7])
    assert Poisson().sampler(5, 0.5).cohort(stream).tolist() == [1, 3]  # type: ignore[arg-type]
    assert Fixed().sampler(5, 0.6).cohort(stream).tolist() == [1, 2, 3]  # type: ignore[arg-type]


def test_poisson__nobody_joins_with_more_than_the_sampling_rate() -> None:
    """⌊p·2^53⌋ of the 2^53 equally likely draws are below the chance, not one more."""
    for rate in (0.1, 0.04, 1 / 3):
        below = math.floor(Fraction(rate) * 2**53)
        stream = Uniform([(below - 1) * 2.0**-53, below * 2.0**-53, (below + 1) * 2.0**-53])
        assert Poisson().sampler(3, rate).cohort(stream).tolist() == [0]  # type: ignore[arg-type]


def test_cohort__unseeded_rounds_differ() -> None:
    sampler = Poisson().sampler(1000, 0.5)
    assert not torch.equal(sampler.cohort(System()), sampler.cohort(System()))


def test_poisson__a_million_clients_take_no_more_calls_than_a_thousand() -> None:
    few, many = (Poisson().sampler(clients, 0.001) for clients in (1000, 1_000_000))
    few.cohort(System())
    assert calls(many.cohort, System()) <= 2 * calls(few.cohort, System()) < 200


@pytest.mark.parametrize("rate", [1.3, 0.0, -0.1, float("nan")])
@pytest.mark.parametrize("name", ["poisson", "fixed", "full"])
def test_sampler__rate_out_of_range_is_refused(name: str, rate: float) -> None:
    with pytest.raises(ConfigError, match=rf"^sample_rate={rate:g} must be in \(0, 1\]$"):
        build("sampling", name).sampler(100, rate)


def test_sampler__no_clients_are_refused() -> None:
    with pytest.raises(ConfigError, match="clients=0"):
        Poisson().sampler(0, 0.5)


def test_fixed__empty_cohort_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rounds to a cohort of 0; set sample_rate to 0\.01 or more"):
        Fixed().sampler(100, 0.004)


def test_full__needs_rate_one() -> None:
    with pytest.raises(ConfigError, match=r"sample_rate=0\.5 must be 1"):
        Full().sampler(100, 0.5)


def test_invariant_3__denominator_is_a_constant_of_the_sampler() -> None:
    assert Poisson().sampler(3400, 0.04).expected_cohort == pytest.approx(136)
    assert Poisson().sampler(3400, 0.04).cohort_spread == pytest.approx(11.43, abs=0.01)
    assert Fixed().sampler(3400, 0.0401).expected_cohort == 136
    assert Full().sampler(3400, 1.0).expected_cohort == 3400


def test_invariant_4__sampling_and_accounting_come_from_one_object() -> None:
    inner = Gaussian(1.5)
    coins = [name for name, part in parts("sampling").items() if not getattr(part, "scheduled", False)]
    assert {"poisson", "fixed", "full"} <= {*coins}  # those that follow a schedule: test_participation.py
    for name in coins:
        sampler = build("sampling", name).sampler(200, 1.0 if name == "full" else 0.1)
        plan = make_plan(sampler, GaussianMechanism(), rounds=5, accountant="rdp", noise_multiplier=1.5)
        event, sizes = plan.event(), [len(c) for c in cohorts(plan.sampler, 300)]
        assert event == plan.sampler.event(inner)
        assert plan.expected_cohort == sampler.expected_cohort
        if isinstance(event, PoissonSampled):
            assert np.mean(sizes) / 200 == pytest.approx(event.rate, rel=0.03)
            binomial = math.sqrt(200 * event.rate * (1 - event.rate))  # a fixed size would have no spread
            assert np.std(sizes) == pytest.approx(binomial, rel=0.2)
        elif isinstance(event, FixedSizeSampled):
            assert set(sizes) == {event.cohort}
            assert event.population == 200
        else:
            assert event == inner
            assert set(sizes) == {200}


def test_description__says_how_clients_are_chosen() -> None:
    assert Poisson().sampler(3400, 0.04).description == (
        "Poisson: each of 3,400 clients joins a round with probability 0.04"
    )
    assert "136 of 3,400" in Fixed().sampler(3400, 0.04).description
    assert "all 3,400" in Full().sampler(3400, 1).description


def test_fixed__draws_again_where_the_last_in_and_the_first_out_are_equal() -> None:
    """Ordered by id, such a pair would favour the lower one; equal draws on one side of the edge do no harm."""

    class Twice(Uniform):
        def child(self, *path: str | int) -> Uniform:
            assert path == ("again",)
            return Uniform([0.5, 0.4, 0.3, 0.2, 0.1])

    tied = Twice([0.1, 0.5, 0.5, 0.2, 0.7])
    assert Fixed().sampler(5, 0.6).cohort(tied).tolist() == [2, 3, 4]  # type: ignore[arg-type]
    assert Fixed().sampler(5, 0.8).cohort(tied).tolist() == [0, 1, 2, 3]  # type: ignore[arg-type]


def test_poisson__joins_with_a_probability_of_at_most_p() -> None:
    """A draw is a multiple of 2^-53: the one just below ⌊p·2^53⌋ joins, and that one itself does not."""
    for rate in (0.04, 0.06, 0.1, 1 / 3, 2.0**-52 * 1.5):
        least = math.floor(rate * 2**53) * 2.0**-53
        assert least <= rate
        draws = Uniform([least - 2.0**-53, least])
        assert Poisson().sampler(2, rate).cohort(draws).tolist() == [0]  # type: ignore[arg-type]
