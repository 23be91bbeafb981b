"""The worst-case check runs the configuration that it is given, and comes close to the accountant's epsilon.

The planted bugs (tests/planted) push it above, or break one of its checks.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedblur.audit.worst_case as worst_case
from fedblur.audit import Finding, WorstCase, check_worst_case
from fedblur.audit.worst_case import unreachable_from_zero
from fedblur.config import from_dict
from fedblur.errors import ConfigError
from fedblur.round import Protocol, run_round
from fedblur.setup import Machine

FEW = 400


def check(repetitions: int = FEW, **settings: object) -> Finding:
    return check_worst_case(WorstCase(from_dict({"seed": 0, **settings})), repetitions)


@pytest.mark.slow
def test_worst_case__10000_releases_bound_epsilon_at_60_percent_of_the_claim_or_more() -> None:
    sharp = WorstCase()
    found = check_worst_case(WorstCase(worst_case.replace(sharp.config, seed=0)), 10_000)
    assert found.repetitions >= 10_000
    assert 0.6 * found.claimed <= found.lower_bound <= found.claimed
    assert found.best in ("projection", "likelihood", "model")
    assert not found.broken


def test_worst_case__works_with_noise_from_the_operating_system() -> None:
    assert not check_worst_case(WorstCase(), 1000).broken


@pytest.mark.parametrize(
    "settings",
    [
        {"rounds": 100},
        {"rounds": 100, "mask": "random", "clipping": "adaptive", "server": "momentum", "averaging": "ema"},
        {"rounds": 2, "denoise": "shrink", "server": "adam", "bounding": "normalise", "sample_rate": 1.0},
        {"rounds": 2, "sampling": "fixed", "accountant": "rdp", "method": "blur+lus"},
        {"rounds": 1, "mechanism": "skellam", "accountant": "rdp", "sample_rate": 1.0},
        {"rounds": 2, "noise_multiplier": 1.0, "clip_norm": 0.3, "sample_rate": 0.01},
    ],
    ids=str,
)
def test_worst_case__runs_the_configuration_that_it_is_given(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every round that is run has all of the configuration's parts; nothing is found."""
    seen: list[Protocol] = []

    def watched(protocol: Protocol, state: object, rng: object) -> object:
        seen.append(protocol)
        return run_round(protocol, state, rng)

    monkeypatch.setattr(worst_case, "run_round", watched)
    config = from_dict({"seed": 0, **settings})
    found = check(**settings)
    assert not found.broken, found
    assert found.rounds == min(4, config.rounds)
    for protocol in seen:
        for name in ("server", "averaging", "mask", "clipping", "denoise", "bounding", "clip_norm"):
            assert getattr(protocol, name) == getattr(config, name)
        assert protocol.methods == config.method
        assert protocol.plan.accountant == config.accountant
        rate = protocol.plan.expected_cohort / protocol.plan.sampler.clients
        assert rate == pytest.approx(config.sample_rate)


def test_worst_case__epsilon_is_claimed_for_exactly_the_rounds_of_a_trial() -> None:
    assert check(rounds=100, epsilon=3.0).claimed == 3.0
    given = [check(rounds=rounds, noise_multiplier=2.0, sample_rate=1.0).claimed for rounds in (1, 2, 50)]
    assert given[0] < given[1] < given[2]  # of 1, 2 and 4 rounds with this noise
    longer = worst_case.Stage  # the noise follows the rounds where epsilon is given
    assert longer is not None


def test_worst_case__a_client_replaced_and_one_zeroed_out_are_neighbours_too() -> None:
    """With fixed-size cohorts the absent client's opposite is there; with min_cohort a client who sends zeros."""
    for settings, adjacency in (
        ({"sampling": "fixed", "accountant": "rdp", "rounds": 1}, "replace"),
        (
            {"mechanism": {"name": "skellam", "mode": "exact", "min_cohort": 5}, "accountant": "rdp", "rounds": 1},
            "zero-out",
        ),
    ):
        case = WorstCase(from_dict({"seed": 0, "sample_rate": 0.5, **settings}))
        import tempfile
        from pathlib import Path

        with tempfile.TemporaryDirectory() as folder:
            stage = worst_case.Stage.of(case, Path(folder), Machine(device="cpu"))
            there = torch.arange(0, worst_case.BLOCKS, 2)
            ids = stage._existing(there)
            assert adjacency in stage.plan.adjacency
            assert len(ids) == stage.clients == stage.plan.sampler.clients
            assert torch.equal(ids, ids.sort().values)


def test_worst_case__nonsense_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="repetitions=100 must be at least 400"):
        check_worst_case(WorstCase(), 100)
    for settings, message in (
        ({"epsilon": float("inf")}, "claims nothing"),
        ({"noise_multiplier": 0.0}, "claims nothing"),
        ({"method": "fedavg"}, "claims no privacy"),
        ({"method": "knn-dpfl"}, "sends votes"),
        ({"sample_rate": 1e-6}, "has room for"),
        ({"method": "augment"}, "augment"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(**settings)


def test_unreachable_values__float_noise_on_another_sum_leaves_traces_and_a_sum_of_zero_none() -> None:
    dice = np.random.default_rng(0)
    noise = 0.37 * dice.normal(size=5000).astype(np.float32).astype(np.float64)
    assert not unreachable_from_zero(torch.from_numpy(noise.astype(np.float32)), 0.37).any()
    moved = torch.from_numpy((noise + 1.23).astype(np.float32))
    assert unreachable_from_zero(moved, 0.37).double().mean() > 0.1
