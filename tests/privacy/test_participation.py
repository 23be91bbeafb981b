"""Who takes part when, and what that costs: streams of releases, and samplers that keep to what is accounted for."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedblur.core.config import Config
from fedblur.core.errors import ConfigError, PrivacyError
from fedblur.core.registry import build
from fedblur.core.rng import make_rng
from fedblur.privacy import accounting, events, totals
from fedblur.privacy.accounting import ACCOUNTANTS, ZERO_OUT, adjacency, epsilon, make_plan, rounds_within
from fedblur.privacy.events import (
    BltNoise,
    Composed,
    CyclicSampled,
    DistributedDiscreteGaussian,
    Event,
    FixedSizeSampled,
    Gaussian,
    InTurn,
    MinSeparated,
    PoissonSampled,
    PrivateSelection,
    SelfComposed,
    ToeplitzNoise,
    TreeNoise,
    flatten,
    from_json,
    to_json,
)
from fedblur.privacy.mechanisms.gaussian import Gaussian as GaussianNoise
from fedblur.privacy.participation import (
    Attendance,
    CyclicSampler,
    InTurnSampler,
    MinSeparationSampler,
    Scheduled,
    cohort_of,
    group_of,
)
from fedblur.privacy.populations import Entry, composed
from fedblur.training.setup import plan_for

ONE, TWO = "11" * 16, "22" * 16


def separated(stream: str = ONE, separation: int = 20, at_most: int = 0, sigma: float = 2.0) -> MinSeparated:
    return MinSeparated(separation, at_most, stream, Gaussian(sigma))


def run(sampler: Scheduled, rounds: int, seed: int = 0) -> list[list[int]]:
    past, rng = Attendance(sampler.clients), make_rng(seed)
    return [cohort_of(sampler, past, t, t, rng.child(t)).tolist() for t in range(1, rounds + 1)]


def participations(cohorts: list[list[int]], clients: int) -> list[list[int]]:
    return [[t for t, cohort in enumerate(cohorts, 1) if client in cohort] for client in range(clients)]


# --- what a stream of releases costs ---


@pytest.mark.parametrize(("count", "times"), [(1, 1), (20, 1), (21, 2), (999, 50), (1000, 50), (1001, 51)])
def test_min_separated__costs_what_the_busiest_client_takes_part_in(count: int, times: int) -> None:
    assert flatten(separated(), count) == {Gaussian(2.0): times}
    assert flatten(separated(at_most=30), count) == {Gaussian(2.0): min(times, 30)}


def test_min_separated__is_the_most_that_any_allowed_pattern_has() -> None:
    """Against all patterns of nine releases."""
    for separation, at_most, count in itertools.product((1, 2, 3, 4), (0, 1, 2), range(1, 10)):
        allowed = [
            pattern
            for size in range(count + 1)
            for pattern in itertools.combinations(range(count), size)
            if (not at_most or size <= at_most) and all(b - a >= separation for a, b in itertools.pairwise(pattern))
        ]
        worst = max(map(len, allowed))
        assert flatten(separated(separation=separation, at_most=at_most), count) == {Gaussian(2.0): worst}


def test_in_turn__costs_one_turn_of_each_group() -> None:
    assert flatten(InTurn(10, ONE, Gaussian(2.0)), 31) == {Gaussian(2.0): 4}
    sampled = CyclicSampled(10, 0.4, ONE, Gaussian(2.0))
    assert flatten(sampled, 30) == {PoissonSampled(0.4, Gaussian(2.0)): 3}


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 40), st.integers(0, 5))
def test_stream__never_costs_less_for_more_releases(one: int, other: int, separation: int, at_most: int) -> None:
    few, many = sorted((one, other))
    for event in (
        separated(separation=separation, at_most=at_most),
        InTurn(separation, ONE, Gaussian(2.0)),
        CyclicSampled(separation, 0.3, ONE, Gaussian(2.0)),
    ):
        (less,), (more,) = flatten(event, few).values(), flatten(event, many).values()
        assert less <= more


def test_stream__nesting_makes_no_difference() -> None:
    """Releases of one stream are counted before their cost is looked up: 15 + 15 of 20 are two turns, not 1 + 1 + …"""
    whole = flatten(separated(), 30)
    assert whole == {Gaussian(2.0): 2}
    assert flatten(Composed((SelfComposed(separated(), 15), SelfComposed(separated(), 15)))) == whole
    assert flatten(SelfComposed(Composed((separated(), SelfComposed(separated(), 2))), 10)) == whole
    assert totals.together([separated()] * 30) == Composed((SelfComposed(separated(), 30),))


def test_stream__two_runs_never_count_as_one() -> None:
    """Ten releases of each of two runs: a client may be in one of either, and together they would be in one."""
    both = totals.together([separated(ONE)] * 10 + [separated(TWO)] * 10)
    assert both is not None
    assert flatten(both) == {Gaussian(2.0): 2}
    for accountant in ACCOUNTANTS:
        assert epsilon(both, 1, 1e-5, accountant) == epsilon(Gaussian(2.0), 2, 1e-5, accountant)
        assert totals.spent(both, 1e-5, accountant) == epsilon(Gaussian(2.0), 2, 1e-5, accountant)


def test_stream__a_copy_that_went_on_elsewhere_counts_apart() -> None:
    copies = [events.apart(separated(ONE), ledger) for ledger in ("one", "other") for _ in range(10)]
    both = totals.together(copies)
    assert both is not None
    assert flatten(both) == {Gaussian(2.0): 2}
    assert events.apart(Gaussian(2.0), "one") == Gaussian(2.0)


def test_population__ledgers_count_apart() -> None:
    """A population knows ledgers by the id in their first line; two of them are two runs, whatever their streams."""
    one = Entry(
        ledger="aa" * 8, path="", kind="run", user="", started="", last="", delta=1e-5, randomness="operating system",
        event=to_json(separated(ONE)), allowed=10, spent=5, lines=6, head="", before="",
    )  # fmt: skip
    total = composed([one, replace(one, ledger="bb" * 8)])
    assert total is not None
    assert flatten(total) == {Gaussian(2.0): 2}
    with pytest.raises(PrivacyError, match="names no stream"):
        composed([replace(one, event=to_json(separated("")))])


def test_stream__one_name_for_two_kinds_is_refused() -> None:
    with pytest.raises(PrivacyError, match="two kinds of releases are said to be of one run"):
        flatten(Composed((separated(sigma=2.0), separated(sigma=3.0))))


def test_stream__a_planned_release_is_never_added_to_others() -> None:
    planned = separated("")
    assert epsilon(planned, 40, 1e-5) == epsilon(Gaussian(2.0), 2, 1e-5)  # a plan may be asked what it costs
    for refused in (
        lambda: totals.together([planned]),
        lambda: events.apart(planned, "one"),
        lambda: events.demand_stream(planned),
    ):
        with pytest.raises(PrivacyError, match="names no stream"):
            refused()


def test_stream__survives_json_and_refuses_what_it_is_not() -> None:
    for event in (separated(at_most=3), InTurn(7, TWO, Gaussian(1.0)), CyclicSampled(7, 0.25, ONE, Gaussian(1.0))):
        assert from_json(json.loads(json.dumps(to_json(event)))) == event
    table = to_json(separated())
    for key, value, message in (
        ("separation", 0, "must be 1 or more"),
        ("separation", 2.0, "must be int"),
        ("at_most", -1, "must be 1 or more, and at_most=-1"),
        ("stream", "a run", "hexadecimal"),
        ("inner", to_json(PoissonSampled(0.1, Gaussian(1.0))), "has no bound where clients take turns"),
        ("inner", to_json(DistributedDiscreteGaussian(9.0, 1.0, 3, 2, "tight")), "has no bound where clients take"),
    ):
        with pytest.raises(PrivacyError, match=message):
            from_json({**table, key: value})
    with pytest.raises(PrivacyError, match="lacks the field 'stream'"):
        from_json({key: value for key, value in table.items() if key != "stream"})


def test_stream__inside_anything_else_is_refused() -> None:
    for event in (
        PoissonSampled(0.1, separated()),
        PoissonSampled(1.0, separated()),
        FixedSizeSampled(10, 2, separated()),
        PrivateSelection((SelfComposed(separated(), 10),), 1.0, 3.0),
    ):
        for accountant in ACCOUNTANTS:
            with pytest.raises(PrivacyError):
                epsilon(event, 1, 1e-5, accountant)
    with pytest.raises(PrivacyError, match="a private search cannot try runs whose clients"):
        adjacency(PrivateSelection((separated(),), 1.0, 3.0))


def test_adjacency__of_a_stream_and_of_a_total_is_the_weaker_one() -> None:
    sampled = CyclicSampled(5, 0.4, TWO, Gaussian(2.0))
    assert adjacency(separated()) == adjacency(InTurn(5, TWO, Gaussian(2.0))) == ZERO_OUT
    assert adjacency(sampled) == accounting.ZERO_OUT_IN_GROUP
    assert adjacency(Composed((PoissonSampled(0.1, Gaussian(2.0)), separated()))) == ZERO_OUT
    assert adjacency(Composed((PoissonSampled(0.1, Gaussian(2.0)), sampled))) == accounting.ZERO_OUT_IN_GROUP
    assert adjacency(Composed((separated(), sampled))) == ZERO_OUT
    with pytest.raises(PrivacyError, match="protect different neighbours"):
        adjacency(Composed((separated(), FixedSizeSampled(10, 2, Gaussian(1.0)))))


def test_rounds_within__is_the_last_release_that_the_busiest_client_allows() -> None:
    budget = epsilon(Gaussian(2.0), 3, 1e-5)
    assert rounds_within(separated(), budget, 1e-5, at_most=1000) == 60
    assert rounds_within(separated(at_most=3), budget, 1e-5, at_most=1000) == 1000
    assert rounds_within(separated(sigma=0.0), budget, 1e-5, at_most=1000) == 0


def test_zcdp_and_adaptive_totals__count_what_the_stream_costs() -> None:
    total = totals.together([separated()] * 50)
    assert accounting.zcdp(total) == pytest.approx(3 / 8)
    orders = totals.orders_for(8.0, 1e-5)
    alone = totals.together([Gaussian(2.0)] * 3)
    assert totals.spent_adaptively(total, orders, 1e-5) == totals.spent_adaptively(alone, orders, 1e-5)


def test_plan__independent_noise_without_any_sampling_assumption() -> None:
    """σ is that of ⌈T/b⌋ releases on everyone, not that of Poisson sampling at the same rate."""
    sampler = build("sampling", {"name": "min_separation", "rounds": 20}).sampler(3400, 0.04)
    plan = make_plan(sampler, GaussianNoise(), rounds=1000, epsilon=8.0, delta=1e-5)
    assert plan.noise_multiplier == accounting.calibrate(Gaussian, 50, 8.0, 1e-5)
    poisson = accounting.calibrate(lambda s: PoissonSampled(0.04, Gaussian(s)), 1000, 8.0, 1e-5)
    assert plan.noise_multiplier > 4 * poisson
    assert plan.adjacency == ZERO_OUT
    assert plan.expected_cohort == 136
    assert plan.epsilon() <= 8.0
    assert plan.in_stream(ONE).event() == MinSeparated(20, 0, ONE, Gaussian(plan.noise_multiplier))
    assert plan.in_stream(ONE).stream == ONE
    assert plan.in_stream(None) is plan


# --- correlated noise ---

UNIT = 2**20
BANDED = ToeplitzNoise(2.0, (UNIT // 2, UNIT // 3, UNIT // 4))
NOISES = (BANDED, BltNoise(2.0, (900_000, 300_000), (400_000, 200_000)), TreeNoise(2.0, 4))


def longest(noise: Any, rounds: int, allowed: Callable[[tuple[int, ...]], bool]) -> float:
    """Return the largest ‖Σ C[:, t]‖ over all patterns of rounds that are allowed."""
    matrix = noise.matrix.matrix(rounds)
    patterns = (p for size in range(rounds + 1) for p in itertools.combinations(range(rounds), size))
    return max(float(np.linalg.norm(matrix[:, list(p)].sum(axis=1))) for p in patterns if allowed(p))


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.kind)
@pytest.mark.parametrize(("separation", "at_most"), [(1, 0), (2, 0), (3, 2), (4, 1), (9, 0)])
def test_correlated__costs_one_gaussian_of_the_worst_pattern(noise: Any, separation: int, at_most: int) -> None:
    for rounds in (1, 3, 7, 9):
        worst = longest(
            noise,
            rounds,
            lambda p: (not at_most or len(p) <= at_most) and all(b - a >= separation for a, b in itertools.pairwise(p)),
        )
        ((release, count),) = flatten(MinSeparated(separation, at_most, ONE, noise), rounds).items()
        assert isinstance(release, Gaussian)
        assert count == 1
        assert release.noise_multiplier == pytest.approx(2.0 / worst, rel=1e-8)
        assert release.noise_multiplier <= 2.0 / worst


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.kind)
def test_correlated__in_turn_and_cyclic_cost_their_own_patterns(noise: Any) -> None:
    for rounds in (1, 4, 9):
        turns = longest(noise, rounds, lambda p: len({t % 4 for t in p}) <= 1)
        ((release, count),) = flatten(InTurn(4, ONE, noise), rounds).items()
        assert count == 1
        assert release.noise_multiplier == pytest.approx(2.0 / turns, rel=1e-8)  # type: ignore[attr-defined]
    if noise is BANDED:
        column = longest(noise, 9, lambda p: len(p) == 1)
        ((sampled, count),) = flatten(CyclicSampled(4, 0.3, ONE, noise), 9).items()
        assert count == 3
        assert isinstance(sampled, PoissonSampled)
        assert sampled.rate == 0.3
        assert sampled.inner.noise_multiplier == pytest.approx(2.0 / column, rel=1e-8)  # type: ignore[attr-defined]


@pytest.mark.parametrize("noise", NOISES[:2], ids=lambda noise: noise.kind)
def test_cyclic__noise_that_reaches_the_next_turn_is_refused(noise: Any) -> None:
    """Amplification is proven where no column of C reaches into the same group's next turn."""
    with pytest.raises(PrivacyError, match="no amplification by sampling is proven"):
        flatten(CyclicSampled(3, 0.3, ONE, noise), 2)


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.kind)
@pytest.mark.parametrize("of", [lambda n: MinSeparated(3, 0, ONE, n), lambda n: InTurn(3, ONE, n)])
def test_correlated__never_costs_less_for_more_releases(noise: Any, of: Callable[[Any], Event]) -> None:
    sigmas = [next(iter(flatten(of(noise), rounds))).noise_multiplier for rounds in range(1, 20)]  # type: ignore[attr-defined]
    assert sigmas == sorted(sigmas, reverse=True)


def test_correlated__epsilon_is_exact() -> None:
    """Against δ(ε) of two Gaussians by quadrature."""
    event = MinSeparated(3, 0, ONE, BANDED)
    ((release, _),) = flatten(event, 9).items()
    mu, spent = 1 / release.noise_multiplier, epsilon(event, 9, 1e-5)  # type: ignore[attr-defined]
    x = np.linspace(-12, 12 + mu, 2_000_001)
    ahead, behind = np.exp(-((x - mu) ** 2) / 2), np.exp(-(x**2) / 2)
    delta = np.maximum(ahead - math.exp(spent) * behind, 0).sum() * (x[1] - x[0]) / math.sqrt(2 * math.pi)
    assert delta == pytest.approx(1e-5, rel=1e-4)


def test_correlated__alone_is_no_release() -> None:
    for noise in NOISES:
        for event in (noise, PoissonSampled(0.1, noise), PoissonSampled(1.0, noise), FixedSizeSampled(10, 2, noise)):
            with pytest.raises(PrivacyError, match="depends on when each client takes part"):
                epsilon(event, 1, 1e-5)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "tree_noise", "noise_multiplier": 1.0, "restart": 3}, "power of two"),
        ({"kind": "toeplitz_noise", "noise_multiplier": 1.0, "coefficients": [0.5]}, "coefficients"),
        ({"kind": "toeplitz_noise", "noise_multiplier": -1.0, "coefficients": [5]}, "must be 0 or more"),
        ({"kind": "blt_noise", "noise_multiplier": 1.0, "decays": [5], "weights": []}, "one of each per buffer"),
    ],
)
def test_correlated__what_no_matrix_is_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        from_json(table)
    for noise in NOISES:
        assert from_json(json.loads(json.dumps(to_json(noise)))) == noise


# --- who is chosen ---


@pytest.mark.parametrize(("separation", "at_most", "rounds"), [(7, 0, 30), (2, 2, 25)])
def test_min_separation__nobody_comes_too_early_or_too_often(separation: int, at_most: int, rounds: int) -> None:
    sampler = MinSeparationSampler(60, ONE, 4, separation, at_most)
    sampler.demand_enough(rounds)
    cohorts = run(sampler, rounds)
    assert {len(cohort) for cohort in cohorts} == {4}
    gaps = [b - a for each in participations(cohorts, 60) for a, b in itertools.pairwise(each)]
    assert min(gaps) == separation  # it happens, and nothing less does
    if at_most:
        assert max(map(len, participations(cohorts, 60))) == 2


def test_min_separation__draws_uniformly_among_those_who_may() -> None:
    sampler, counts = MinSeparationSampler(12, ONE, 3, 2, 0), np.zeros(12)
    for seed in range(400):
        past = Attendance(12)
        past.note(1, 1, np.array([0, 1, 2]))
        counts[cohort_of(sampler, past, 2, 2, make_rng(seed))] += 1
    assert counts[:3].sum() == 0
    assert counts[3:].sum() == 1200
    assert np.abs(counts[3:] - 400 / 3).max() < 4.5 * math.sqrt(400 * (1 / 3) * (2 / 3))


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 6), st.integers(1, 40), st.integers(0, 99))
def test_min_separation__a_plan_that_passes_never_runs_dry(
    size: int, separation: int, at_most: int, rounds: int, spare: int
) -> None:
    needed = size * separation
    clients = needed + (spare if spare < 50 else (rounds - 1) * size // max(at_most, 1))
    sampler = MinSeparationSampler(clients, ONE, size, separation, at_most)
    try:
        sampler.demand_enough(rounds)
    except ConfigError:
        return
    assert len(run(sampler, rounds)) == rounds


def test_min_separation__too_few_clients_are_refused_with_the_figures() -> None:
    part = build("sampling", {"name": "min_separation", "rounds": 20})
    with pytest.raises(ConfigError, match="cohorts of 136 .* need 2,720 clients, and there are 2,700"):
        part.sampler(2700, 136 / 2700)
    worn = build("sampling", {"name": "min_separation", "rounds": 5, "at_most": 2}).sampler(100, 0.1)
    with pytest.raises(ConfigError, match=r"need 100 clients \(50 may have taken part 2 times.*are 94.*raise at_most"):
        MinSeparationSampler(94, "", 10, 5, 2).demand_enough(11)
    with pytest.raises(ConfigError, match="raise at_most"):
        make_plan(worn, GaussianNoise(), rounds=50, noise_multiplier=1.0)
    make_plan(worn, GaussianNoise(), rounds=11, noise_multiplier=1.0)


def test_min_separation__a_release_that_was_not_paid_keeps_its_cohort() -> None:
    sampler, past = MinSeparationSampler(60, ONE, 4, 7, 0), Attendance(60)
    first = cohort_of(sampler, past, 1, 1, make_rng(None))
    again = cohort_of(sampler, past, 1, 1, make_rng(None))
    assert first.tolist() == again.tolist()
    assert past.times.sum() == 4


def test_min_separation__numbers_of_releases_have_no_gaps() -> None:
    sampler, past = MinSeparationSampler(60, ONE, 4, 7, 0), Attendance(60)
    with pytest.raises(PrivacyError, match="release 2 comes after release 0"):
        cohort_of(sampler, past, 2, 2, make_rng(0))


def test_scheduled__a_client_who_may_not_take_part_is_turned_away() -> None:
    class Careless(MinSeparationSampler):
        def chosen(self, number: int, past: Attendance, rng: Any) -> Any:
            return np.arange(self.size)

    sampler, past = Careless(60, ONE, 4, 7, 0), Attendance(60)
    cohort_of(sampler, past, 1, 1, make_rng(0))
    with pytest.raises(PrivacyError, match="a client was chosen who may not take part yet"):
        cohort_of(sampler, past, 2, 2, make_rng(0))
    assert past.latest == 1


def test_scheduled__says_when_a_client_may_come_again() -> None:
    sampler, past = MinSeparationSampler(60, ONE, 4, 7, 2), Attendance(60)
    past.note(1, 1, np.array([3]))
    assert sampler.returns(3, 2, past) == 8
    assert sampler.returns(3, 9, past) == 9
    assert sampler.returns(4, 2, past) == 2
    for number in range(2, 8):
        past.note(number, number, np.array([], dtype=np.int64))
    past.note(8, 8, np.array([3]))
    assert sampler.returns(3, 20, past) is None
    for turns in (InTurnSampler(60, ONE, 7), CyclicSampler(60, ONE, 7, 0.5)):
        for client, number in itertools.product(range(10), (1, 2, 9)):
            first = turns.returns(client, number, past)
            assert first is not None
            waits = [turns.may(later, past)[client] for later in range(number, first + 1)]
            assert waits == [False] * (first - number) + [True]


def test_in_turn__each_client_takes_part_every_g_rounds_and_everyone_does() -> None:
    sampler = InTurnSampler(500, ONE, 7)
    cohorts = run(sampler, 21)
    for each in participations(cohorts, 500):
        assert len(each) == 3
        assert {b - a for a, b in itertools.pairwise(each)} == {7}
    sizes = [len(cohort) for cohort in cohorts[:7]]
    assert sum(sizes) == 500
    assert abs(np.mean(sizes) - sampler.expected_cohort) < 1e-9
    assert np.std(sizes) < 3 * sampler.cohort_spread


def test_cyclic__coins_inside_the_group_whose_turn_it_is() -> None:
    sampler = CyclicSampler(5000, ONE, 5, 0.3)
    cohorts = run(sampler, 40)
    groups = group_of(np.arange(5000), 5)
    for t, cohort in enumerate(cohorts, 1):
        assert set(groups[cohort]) == {t % 5}
    assert np.mean([len(cohort) for cohort in cohorts]) == pytest.approx(300, rel=0.05)
    assert np.std([len(cohort) for cohort in cohorts]) == pytest.approx(sampler.cohort_spread, rel=0.35)
    assert isinstance(sampler.event(Gaussian(1.0)), CyclicSampled)
    assert isinstance(sampler.seen().event(Gaussian(1.0)), InTurn)  # no amplification where the size is seen


def test_group_of__depends_on_the_client_alone() -> None:
    assert group_of(np.arange(100), 7).tolist() == group_of(np.arange(1000), 7)[:100].tolist()
    assert np.bincount(group_of(np.arange(70_000), 7)).min() > 9600
    assert group_of(np.arange(5), 10).tolist() == [5, 5, 0, 3, 8]  # for good: after an update of FedBlur too


def test_scheduled__draws_nothing_outside_of_a_run() -> None:
    with pytest.raises(PrivacyError, match="depend on the number of the release"):
        MinSeparationSampler(60, ONE, 4, 7, 0).cohort(make_rng(0))


@pytest.mark.parametrize(
    ("sampling", "rate", "message"),
    [
        ({"name": "in_turn", "groups": 10}, 0.2, "must be 1/groups = 0.1"),
        ({"name": "cyclic", "groups": 10}, 0.2, "is more than a group of 10"),
        ({"name": "min_separation", "rounds": 2}, 0.004, "rounds to a cohort of 0"),
    ],
)
def test_rate__must_fit_the_schedule(sampling: dict[str, Any], rate: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("sampling", sampling).sampler(100, rate)


@pytest.mark.parametrize(
    "sampling",
    [{"name": "min_separation", "rounds": 0}, {"name": "in_turn", "groups": 0}, {"name": "cyclic", "groups": 0},
     {"name": "min_separation", "at_most": -1}],
)  # fmt: skip
def test_settings__are_checked(sampling: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="sampling"):
        build("sampling", sampling)


def test_config__discrete_noise_is_refused_by_name() -> None:
    config = Config(sampling={"name": "min_separation"}, mechanism="ddgauss", accountant="rdp", noise_multiplier=1.0)
    with pytest.raises(PrivacyError, match="DistributedDiscreteGaussian has no bound where clients take turns"):
        plan_for(config, 100, 50)


def test_config__votes_have_no_schedule() -> None:
    with pytest.raises(ConfigError, match="sampling='in_turn' does not apply to ae-dpfl: all clients vote"):
        Config(method="ae-dpfl", sampling="in_turn")


def test_invariant_4__a_schedule_accounts_for_itself() -> None:
    wanted: list[tuple[dict[str, Any], type[Event]]] = [
        ({"name": "min_separation", "rounds": 5}, MinSeparated),
        ({"name": "in_turn", "groups": 10}, InTurn),
        ({"name": "cyclic", "groups": 5}, CyclicSampled),
    ]
    for table, kind in wanted:
        sampler = build("sampling", table).sampler(100, 0.1)
        assert isinstance(sampler, Scheduled)
        assert isinstance(sampler.in_stream(ONE).event(Gaussian(1.0)), kind)
        assert sampler.expected_cohort == 10
        assert not sampler.independent
