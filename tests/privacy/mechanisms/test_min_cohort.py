"""`min_cohort`: the noise tells how many clients came, so sampling must not amplify (invariant 4: what is accounted is
what happens)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

import fedblur
from fedblur.core.config import from_dict
from fedblur.experiments.audit.listening import Overheard
from fedblur.privacy.accountants import ORDERS, renyi
from fedblur.privacy.accounting import PrivacyPlan, epsilon, make_plan
from fedblur.privacy.mechanisms.base import Conditions
from fedblur.privacy.mechanisms.ddgauss import DDGauss
from fedblur.privacy.planning import Setting, outlook, signal_to_noise
from fedblur.privacy.sampling import Poisson, Sampling
from fedblur.training.verify_ledger import read_books

N, P, M, SIGMA = 3400, 0.04, 90, 0.98


def plan(least: int | None, sampling: Sampling, rate: float = P) -> PrivacyPlan:
    sampler = sampling.sampler(N, rate)
    mechanism = DDGauss(mode="exact", min_cohort=least, bits=20).bind(Conditions(1000, 0.1, sampler.expected_cohort, N))
    return make_plan(sampler, mechanism, rounds=10, accountant="rdp", noise_multiplier=SIGMA)


def seen_pair(order: float, cohort: int) -> float:
    """Divergence of a client's data from no data where the size of the cohort is known and all others send −u.

    It comes with probability q = cohort/N, and then one of the others does not: +u instead of −u moves the sum by 2S,
    no data instead of −u by S. The noise is that of `cohort` shares sized for M.
    """
    q, std = cohort / N, SIGMA * np.sqrt(cohort / M)
    x = np.linspace(-60 * std, 60 * std, 400_001)
    with_data, without = (q * norm.pdf(x, mean, std) + (1 - q) * norm.pdf(x, 0, std) for mean in (2.0, 1.0))
    inside = without > 0
    ratio = np.exp(order * np.log(with_data[inside]) + (1 - order) * np.log(without[inside]))
    return float(np.log(np.trapezoid(ratio, x[inside])) / (order - 1))


@pytest.mark.parametrize("order", [2.0, 3.0, 8.0])
def test_min_cohort__accounts_for_a_cohort_whose_size_is_seen(order: float) -> None:
    at = ORDERS.index(order)
    seen = seen_pair(order, cohort=round(P * N))
    assert renyi(plan(M, Poisson()).event())[at] > seen
    hidden = renyi(plan(None, Poisson()).event())[at]
    assert hidden < seen / 2  # what was accounted for until 16 November 2026, and is right where nobody sees the size


def test_min_cohort__poisson_sampling_amplifies_nothing() -> None:
    found = plan(M, Poisson())
    assert found.event() == found.release
    assert found.epsilon() == epsilon(found.release, 10, found.delta, "rdp")
    assert "so sampling amplifies nothing" in found.sampler.description
    assert plan(M, Poisson(), 1.0).epsilon() == pytest.approx(plan(None, Poisson(), 1.0).epsilon(), rel=1e-4)


def test_min_cohort__a_run_spends_and_states_it(tmp_path: Path) -> None:
    mechanism = {"name": "ddgauss", "mode": "exact", "min_cohort": 20, "bits": 20}
    table = {"mechanism": mechanism, "accountant": "rdp", "rounds": 2, "noise_multiplier": 3.0, "epsilon": None}
    run = fedblur.train(from_dict(table), out=tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    privacy = summary["privacy"]
    config = {**table, "sample_rate": 1.0, "sampling": "full"}
    config["mechanism"] = mechanism | {"min_cohort": 359}
    everyone = fedblur.train(from_dict(config), out=tmp_path / "everyone")
    assert run.epsilon == pytest.approx(everyone.epsilon, rel=0.01)  # grids differ a little
    assert read_books(tmp_path / "run" / "ledger.jsonl").epsilon("rdp") == pytest.approx(run.epsilon)
    assert "so sampling amplifies nothing" in privacy["sampling"]
    given = from_dict(table)
    setting = Setting(
        359, given.sample_rate, 2, noise_multiplier=3.0, mechanism=given.mechanism, parameters=summary["parameters"]
    )
    assert privacy["signal_to_noise"] == pytest.approx(outlook(setting).signal_to_noise("rdp"))


def test_min_cohort__more_noise_than_is_accounted_counts_against_the_signal_in_a_plan_as_in_a_run() -> None:
    found = plan(M, Poisson())
    assert found.added_noise == pytest.approx(SIGMA * np.sqrt(P * N / M))
    assert signal_to_noise(found, 1000) == pytest.approx(np.sqrt(10) * P * N / (found.added_noise * np.sqrt(1000)))
    assert plan(None, Poisson()).added_noise == SIGMA
    bound = DDGauss(mode="exact", min_cohort=M).bind(Conditions(1000, 0.1, P * N, N))
    assert Overheard(bound).excess == bound.excess == found.excess
