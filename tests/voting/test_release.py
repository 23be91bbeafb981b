"""Noise on votes: the σ_v that an epsilon needs, exact accounting, labels that depend on nothing but noisy counts."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from fedblur.core.errors import PrivacyError
from fedblur.core.rng import Seeded, System
from fedblur.privacy.accountants import gaussian_epsilon
from fedblur.privacy.accounting import adjacency, epsilon, make_plan
from fedblur.privacy.events import Gaussian, SelfComposed, Votes, from_json, to_json
from fedblur.privacy.ledger import Budget, Ledger
from fedblur.privacy.sampling import FullSampler
from fedblur.voting import release
from fedblur.voting.release import UNANSWERED, VOTE_STEP, Tally, VoteNoise, bounded, release_labels

QUERIES = (1, 100, 500, 1000, 2000, 5000, 10000)
PUBLISHED = {  # σ_v at δ = 1/N, to the digits that are printed
    (3400, 2): ("1.603", "16.0", "35.8", "50.7", "71.7", "113", "160"),
    (3400, 4): ("0.897", "9.0", "20.1", "28.4", "40.1", "63.4", "89.7"),
    (3400, 6): ("0.646", "6.5", "14.4", "20.4", "28.9", "45.7", "64.6"),
    (3400, 8): ("0.514", "5.1", "11.5", "16.3", "23.0", "36.4", "51.4"),
    (1000, 2): ("1.445", "14.5", "32.3", "45.7", "64.6", "102", "145"),
    (1000, 8): ("0.480", "4.8", "10.7", "15.2", "21.5", "33.9", "48"),
    (500, 2): ("1.351", "13.5", "30.2", "42.7", "60.4", "95.5", "135"),
    (500, 8): ("0.460", "4.6", "10.3", "14.5", "20.6", "32.5", "46"),
}
# The same to four digits, by the formula δ = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) solved apart from this code.
SINGLE = {
    (3400, 2): 1.6031, (3400, 4): 0.89706, (3400, 6): 0.64566, (3400, 8): 0.51439,
    (1000, 2): 1.4452, (1000, 8): 0.48001, (500, 2): 1.3510, (500, 8): 0.45953,
}  # fmt: skip


def vote_noise(clients: int, eps: float, queries: int) -> float:
    event = make_plan(FullSampler(clients), VoteNoise(queries), rounds=1, epsilon=eps).event()
    assert isinstance(event, Votes)
    return event.noise_std


@pytest.mark.parametrize(("clients", "eps"), PUBLISHED)
def test_sigma_v__is_what_the_table_says(clients: int, eps: float) -> None:
    for queries, printed in zip(QUERIES, PUBLISHED[clients, eps], strict=True):
        digits = len(printed.partition(".")[2])
        assert f"{vote_noise(clients, eps, queries):.{digits}f}" == printed


@pytest.mark.parametrize(("clients", "eps"), SINGLE)
def test_sigma_v__agrees_to_three_digits_with_the_formula(clients: int, eps: float) -> None:
    for queries in QUERIES:
        exact = SINGLE[clients, eps] * math.sqrt(queries)
        assert vote_noise(clients, eps, queries) == pytest.approx(exact, rel=2e-4)


# --- accounting ---


@pytest.mark.parametrize(("mu", "delta"), [(0.05, 1e-3), (0.6, 1e-5), (1.0, 1 / 437), (3.0, 1e-6), (12.0, 1e-4)])
def test_gaussian_epsilon__matches_quadrature(mu: float, delta: float) -> None:
    eps = gaussian_epsilon(mu, delta)

    def gap(x: float) -> float:
        return max(0.0, stats.norm.pdf(x, mu) - math.exp(eps) * stats.norm.pdf(x))

    leak = integrate.quad(gap, eps / mu + mu / 2, mu + 40, limit=200)[0]
    assert leak == pytest.approx(delta, rel=1e-5)


def test_gaussian_epsilon__edges() -> None:
    assert gaussian_epsilon(0.0, 1e-5) == 0
    assert gaussian_epsilon(1e-6, 1e-5) == 0  # δ(0) is below delta already
    assert 600 < gaussian_epsilon(30.0, 1e-9) < math.inf


def test_votes__are_one_gaussian_mechanism() -> None:
    event = Votes(400, 30.0, 0, 0.0)
    assert event.noise_multiplier == pytest.approx(30 / 20)
    for accountant in ("pld", "rdp"):
        assert epsilon(event, 1, 1e-3, accountant) == pytest.approx(epsilon(Gaussian(1.5), 1, 1e-3, accountant))
        apart = SelfComposed(Gaussian(30.0), 400)  # 400 releases of sensitivity 1
        assert epsilon(event, 1, 1e-3, accountant) == pytest.approx(epsilon(apart, 1, 1e-3, accountant), rel=1e-9)
    assert adjacency(event) == "add or remove one client"


def test_votes__checks_are_paid_for() -> None:
    event = Votes(200, 30.0, 800, 90.0)
    assert event.noise_multiplier**-2 == pytest.approx(200 / 30**2 + 800 / 90**2)
    assert epsilon(event, 1, 1e-3) > epsilon(Votes(200, 30.0, 0, 0.0), 1, 1e-3)


@pytest.mark.parametrize("noise", [VoteNoise(500), VoteNoise(200, 800, 3.0), VoteNoise(1, 1, 0.5)])
def test_plan__stays_within_epsilon_and_wastes_little(noise: VoteNoise) -> None:
    plan = make_plan(FullSampler(437), noise, rounds=1, epsilon=2.0)
    assert 2.0 * (1 - 1e-3) < plan.epsilon() <= 2.0
    assert plan.release.noise_multiplier == pytest.approx(plan.noise_multiplier)


def test_plan__without_noise_is_not_private() -> None:
    plan = make_plan(FullSampler(437), VoteNoise(500), rounds=1, epsilon=math.inf)
    assert plan.event().noise_std == 0
    assert epsilon(plan.event(), 1, 1e-3) == math.inf


def test_ledger__holds_votes_and_reads_them_back(tmp_path) -> None:
    plan = make_plan(FullSampler(437), VoteNoise(200, 400, 3.0), rounds=1, epsilon=2.0)
    ledger = Ledger(tmp_path / "ledger.jsonl", Budget(2.0, plan.delta, "pld", 1))
    ledger.demand_room(1, plan.event(), replay=False)
    ledger.spend(1, plan.event(), replay=True)
    ledger.spend(1, plan.event(), replay=True)  # the very same labels: one release
    assert ledger.spends() == [(1, plan.event())]
    assert ledger.epsilon() == plan.epsilon()
    with pytest.raises(PrivacyError, match="the budget is spent"):
        ledger.demand_room(1, plan.event(), replay=False)


def test_votes__survive_json_and_nonsense_is_refused() -> None:
    event = Votes(500, 29.8, 1000, 89.4)
    assert from_json(json.loads(json.dumps(to_json(event)))) == event
    for make in (lambda: Votes(0, 1.0, 0, 0.0), lambda: Votes(1, -1.0, 0, 0.0), lambda: Votes(1, 1.0, 1, math.nan)):
        with pytest.raises(PrivacyError):
            make()


# --- counting: sensitivity ---


def test_invariant__one_client_moves_a_query_by_at_most_1() -> None:
    good = torch.tensor([[1.0, 0, 0], [0.5, 0.25, 0.25], [0, 0, 0]])
    assert torch.equal(bounded(good), (good / VOTE_STEP).long())
    bad = torch.tensor([[1.0, 1, 0], [math.nan, 0, 0], [math.inf, 0, 0], [2, 0, 0], [1 + 1e-6, 0, 0]])
    assert float(bounded(bad).abs().max()) == 0


def test_invariant__votes_are_rounded_towards_zero_and_their_length_is_compared_in_whole_numbers() -> None:
    votes = torch.tensor([[0.75 * VOTE_STEP, -0.75 * VOTE_STEP], [1.5 * VOTE_STEP, -2.5 * VOTE_STEP]]).double()
    assert bounded(votes).tolist() == [[0, 0], [1, -2]]
    assert bounded(torch.tensor([[1.0, 0.9 * VOTE_STEP]], dtype=torch.float64)).tolist() == [[2**20, 0]]
    longer = torch.tensor([[1.0, VOTE_STEP], [1.0, 2.0**-10]], dtype=torch.float64)  # by next to nothing
    assert bounded(longer).tolist() == [[0, 0], [0, 0]]
    units = torch.nn.functional.normalize(torch.randn(500, 7, dtype=torch.float64), dim=1)
    assert max(sum(k * k for k in row) for row in bounded(units * (1 - 1e-12)).tolist()) <= 2**40


def test_labels__noise_is_never_rounded_down(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def listen(scale: float, count: int, source: object) -> np.ndarray:
        asked.append(scale)
        return np.zeros(count, dtype=np.int64)

    monkeypatch.setattr(release.rounded_gaussian, "draw", listen)
    release_labels(counts_of(1.0, 5), Votes(5, 1.1, 5, 3.3), 0.0, Seeded.root(0))
    assert [scale > std / VOTE_STEP for scale, std in zip(asked, (1.1, 3.3), strict=True)] == [True, True]
    assert asked == pytest.approx([1.1 / VOTE_STEP, 3.3 / VOTE_STEP], rel=1e-14)


def test_tally__sums_votes_and_measures_on_held_out_samples_only() -> None:
    votes = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2, 2], [0, 0, 2, 1]]), 3).double()
    tally = Tally.empty(2, 3, torch.device("cpu")).add(votes, torch.tensor([2, 1]))
    assert (tally.counts * VOTE_STEP).tolist() == [[2, 0, 0], [1, 1, 0]]
    assert tally.accuracies.tolist() == [0.5, 1.0]
    assert tally.clients == 2


# --- labels ---


def counts_of(margin: float, samples: int, classes: int = 10) -> torch.Tensor:
    counts = torch.zeros(samples, classes, dtype=torch.int64)
    counts[torch.arange(samples), torch.arange(samples) % classes] = round(margin / VOTE_STEP)
    return counts


def test_labels__are_the_plurality_without_noise() -> None:
    labels = release_labels(counts_of(1.0, 50), Votes(50, 0.0, 0, 0.0), 0.0, Seeded.root(0))
    assert torch.equal(labels, torch.arange(50) % 10)


@pytest.mark.parametrize("rng", [Seeded.root(0), System()], ids=["seeded", "private"])
def test_labels__noise_has_the_promised_size(rng) -> None:
    """Two classes: the label is right with probability Φ(margin / (σ√2))."""
    labels = release_labels(counts_of(20.0, 20_000, 2), Votes(20_000, 20.0, 0, 0.0), 0.0, rng)
    right = float((labels == torch.arange(20_000) % 2).double().mean())
    assert right == pytest.approx(stats.norm.cdf(1 / math.sqrt(2)), abs=0.015)


def test_labels__a_margin_of_four_deviations_is_safe() -> None:
    counts = counts_of(4 * math.sqrt(2) * 30, 1000)
    labels = release_labels(counts, Votes(1000, 30.0, 0, 0.0), 0.0, Seeded.root(1))
    assert torch.equal(labels, counts.argmax(1))


def test_confident_voting__answers_where_voters_agree_and_never_more_than_paid_for() -> None:
    counts = counts_of(300.0, 100)
    counts[::2] //= 10  # every other sample is contested
    labels = release_labels(counts, Votes(40, 5.0, 100, 10.0), 150.0, Seeded.root(0))
    answered = torch.nonzero(labels != UNANSWERED).flatten()
    assert answered.tolist() == list(range(1, 80, 2))  # the first 40 of the 50 that pass
    assert torch.equal(labels[answered], counts.argmax(1)[answered])


def test_confident_voting__the_check_is_noisy() -> None:
    counts = counts_of(100.0, 20_000, 2)
    labels = release_labels(counts, Votes(20_000, 1.0, 20_000, 50.0), 150.0, Seeded.root(0))
    share = float((labels != UNANSWERED).double().mean())
    assert share == pytest.approx(stats.norm.sf(1.0), abs=0.01)
