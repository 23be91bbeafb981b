"""The worst-case check runs the configuration that it is given, and comes close to the accountant's epsilon.

The planted bugs (tests/planted) push it above, or break one of its checks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedblur.experiments.audit.worst_case as worst_case
from fedblur.core.config import from_dict
from fedblur.core.errors import ConfigError
from fedblur.experiments.audit import Finding, WorstCase, check_worst_case
from fedblur.experiments.audit.worst_case import BLOCKS, Stage, unreachable_from_zero
from fedblur.training.machine import Machine
from fedblur.training.round import Protocol, run_round

FEW = 400


def check(repetitions: int = FEW, **settings: object) -> Finding:
    return check_worst_case(WorstCase(from_dict({"seed": 0, **settings})), repetitions)


@pytest.mark.slow
@pytest.mark.parametrize("releases", [3000, pytest.param(10_000, marks=pytest.mark.long)])
def test_worst_case__many_releases_bound_epsilon_at_60_percent_of_the_claim_or_more(releases: int) -> None:
    found = check_worst_case(WorstCase(replace(WorstCase().config, seed=0)), releases)
    assert found.repetitions >= releases
    assert 0.6 * found.claimed <= found.lower_bound <= found.claimed
    assert found.best in ("projection", "likelihood", "model")
    assert not found.broken


def test_worst_case__works_with_noise_from_the_operating_system() -> None:
    assert not check_worst_case(WorstCase(), 1000).broken


# 50 rounds among quiet clients show what runs in them; that all 400 raise no alarm is for make test-long.
@pytest.mark.parametrize("quiet", [50, pytest.param(400, marks=pytest.mark.long)])
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
    settings: dict[str, object], quiet: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every round that is run has all of the configuration's parts; nothing is found."""
    seen: list[Protocol] = []

    def watched(protocol: Protocol, state: object, rng: object) -> object:
        seen.append(protocol)
        return run_round(protocol, state, rng)

    monkeypatch.setattr(worst_case, "run_round", watched)
    monkeypatch.setattr(worst_case, "_QUIET_ROUNDS", quiet)
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


def stage(folder: Path, **settings: object) -> Stage:
    folder.mkdir(exist_ok=True)
    return Stage.of(WorstCase(from_dict({"seed": 0, **settings})), folder, Machine(device="cpu"))


def test_worst_case__epsilon_is_claimed_for_exactly_the_rounds_of_a_trial(tmp_path: Path) -> None:
    rounds = (1, 2, 50)  # of which 1, 2 and 4 are run
    kept = [stage(tmp_path / f"a{t}", rounds=t, epsilon=3.0, sample_rate=1.0).plan for t in rounds]
    assert all(2.99 < plan.epsilon() <= 3.0 for plan in kept)
    assert [plan.rounds for plan in kept] == [1, 2, 4]
    assert kept[0].noise_multiplier < kept[1].noise_multiplier < kept[2].noise_multiplier
    given = [stage(tmp_path / f"b{t}", rounds=t, noise_multiplier=2.0, sample_rate=1.0).plan for t in rounds]
    assert [plan.noise_multiplier for plan in given] == [2.0] * 3
    assert given[0].epsilon_target < given[1].epsilon_target < given[2].epsilon_target


@pytest.mark.parametrize(
    ("settings", "adjacency"),
    [
        ({"sampling": "fixed"}, "replace"),
        ({"mechanism": {"name": "skellam", "mode": "exact", "min_cohort": 5}}, "zero-out"),
    ],
)
def test_worst_case__where_a_client_is_absent_its_substitute_is_there(
    tmp_path: Path, settings: dict[str, object], adjacency: str
) -> None:
    """With fixed-size cohorts its opposite, with min_cohort a client who sends zeros: N is the same on both sides."""
    made = stage(tmp_path, accountant="rdp", rounds=1, sample_rate=0.5, **settings)
    ids = made._existing(torch.arange(0, BLOCKS, 2))
    assert adjacency in made.plan.adjacency
    assert len(ids) == made.clients == made.plan.sampler.clients
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
