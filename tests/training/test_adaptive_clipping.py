"""Adaptive clipping: the joint release is one Gaussian with multiplier z, and the clip norm finds the quantile."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fedblur
from fedblur.core.config import from_dict
from fedblur.core.errors import ConfigError, FedBlurError
from fedblur.core.registry import parts
from fedblur.core.rng import Rng, Seeded
from fedblur.engines import Simulated
from fedblur.learning.client import Block, ClientJob, Trained, clip_block
from fedblur.privacy import events
from fedblur.privacy.accounting import make_plan
from fedblur.privacy.clipping import Message
from fedblur.privacy.events import PoissonSampled
from fedblur.privacy.ledger import Budget, Ledger
from fedblur.privacy.mechanisms.base import Release
from fedblur.privacy.mechanisms.correlated import Correlated
from fedblur.privacy.mechanisms.gaussian import Gaussian
from fedblur.privacy.sampling import Poisson
from fedblur.training.adaptive_clipping import Adaptive
from fedblur.training.round import run_round
from fedblur.training.server import Momentum
from tests.training.test_round import first_state, protocol
from tests.worlds import CPU


@pytest.mark.parametrize(("z", "vector"), [(0.924, 0.926), (0.0, 0.0)])
def test_adaptive__multiplier_of_the_vector_is_that_of_the_literature(z: float, vector: float) -> None:
    """EMNIST: pN = 136, σ_b = 6.8."""
    assert Adaptive().bit_std(136) == pytest.approx(6.8)
    assert Adaptive().vector_multiplier(z, 136) == pytest.approx(vector, abs=5e-4)


@given(z=st.floats(0.05, 5), clip_norm=st.floats(1e-4, 1e4), cohort=st.floats(60, 1e4))
def test_adaptive__the_joint_release_is_one_gaussian_with_multiplier_z(
    z: float, clip_norm: float, cohort: float
) -> None:
    """Noise over sensitivity of the message is z; its vector part has z_Δ·C, its bit part σ_b."""
    adaptive = Adaptive()
    weight = adaptive.bit_weight(clip_norm, z, cohort)
    noise = z * Message(bit_weight=weight).l2_bound(clip_norm)
    assert noise == pytest.approx(adaptive.vector_multiplier(z, cohort) * clip_norm, rel=1e-9)
    assert noise / weight == pytest.approx(adaptive.bit_std(cohort), rel=1e-9)
    assert z**-2 == pytest.approx((noise / clip_norm) ** -2 + (2 * noise / weight) ** -2, rel=1e-6)


def test_adaptive__released_noise_has_the_promised_sizes() -> None:
    adaptive, z, clip_norm, cohort = Adaptive(bit_noise=2.0), 1.5, 0.3, 8
    message = Message(bit_weight=adaptive.bit_weight(clip_norm, z, cohort))
    bounded, _ = message.encode(torch.zeros(cohort, 400), clip_norm)
    release = Release(message.width(400), message.l2_bound(clip_norm), z, cohort, CPU)
    vectors, bits = [], []
    for seed in range(400):
        total = Gaussian().accumulate([bounded], release, Seeded.root(seed))
        noise = Gaussian().draw(release, Seeded.root(seed))
        vector, bit = message.decode(Gaussian().release(total, release, noise()), 400)
        vectors.append(vector)
        bits.append(bit)
    expected = adaptive.vector_multiplier(z, cohort) * clip_norm
    assert float(torch.stack(vectors).double().std()) == pytest.approx(expected, rel=0.02)
    assert float(torch.tensor(bits).std()) == pytest.approx(2.0, rel=0.15)
    assert float(torch.tensor(bits).mean()) == pytest.approx(cohort / 2, abs=5 * 2.0 / 20)  # all norms are 0: b = 1


class Known:
    """A test double: client i always sends an update of norm `norms[i]`, and the engine notes the jobs it got."""

    device = CPU

    def __init__(self, norms: Tensor, dimension: int) -> None:
        self.norms, self.dimension = norms, dimension
        self.jobs: list[ClientJob] = []

    def map_clients(self, job: ClientJob, ids: Tensor, rng: Rng) -> Iterator[Block]:
        self.jobs.append(job)
        if len(ids):
            rows = torch.nn.functional.normalize(torch.randn(len(ids), self.dimension)) * self.norms[ids][:, None]
            yield clip_block(Trained(rows, self.norms[ids]), job)


def adaptive_protocol(tmp_path: Path, norms: Tensor, start: float, adaptive: Adaptive, rounds: int, z: float = 1.0):
    plan = make_plan(Poisson().sampler(len(norms), 0.1), Gaussian(), rounds=rounds, delta=1e-4, noise_multiplier=z)
    ledger = Ledger(tmp_path / "adaptive.jsonl", Budget(math.inf, 1e-4, "pld", rounds))
    base = protocol(tmp_path, clip_norm=start, clipping=adaptive)
    return dataclasses.replace(base, plan=plan, sums=Simulated(Known(norms, base.layout.total)), ledger=ledger)


def end_of(p, rounds: int) -> float:
    state = first_state(p)
    for t in range(1, rounds + 1):
        state = run_round(p, state, Seeded.root(7).child("round", t)).state
    return p.clipping.clip_norm(state, p.clip_norm)


@pytest.mark.parametrize(
    ("quantile", "factor"), [(0.5, 0.01), (0.5, 1.0), (0.5, 100.0), (0.8, 0.01), (0.8, 5.0), (0.2, 0.2)]
)
def test_adaptive__started_100_times_off_it_ends_within_20_percent(
    tmp_path: Path, quantile: float, factor: float
) -> None:
    """Issue 4, line 5: 100 rounds, pN = 100, σ = 1. A high quantile is slow to reach from above: η_C(1 − q) a round."""
    norms = torch.exp(torch.randn(1000, generator=torch.Generator().manual_seed(0)))  # a spread of 50-fold
    true = float(norms.quantile(quantile))
    p = adaptive_protocol(tmp_path, norms, factor * true, Adaptive(quantile), 100)
    assert end_of(p, 100) == pytest.approx(true, rel=0.2)


def test_adaptive__a_round_uses_one_clip_norm_and_the_next_its_successor(tmp_path: Path, monkeypatch) -> None:
    releases: list[Release] = []
    original = Gaussian.release
    monkeypatch.setattr(Gaussian, "release", lambda s, t, r, rng: (releases.append(r), original(s, t, r, rng))[1])
    norms = torch.full((1000,), 5.0)
    p = adaptive_protocol(tmp_path, norms, 1.0, Adaptive(), 5, z=1.0)
    state = first_state(p)
    for t in range(1, 4):
        used = p.clipping.clip_norm(state, p.clip_norm)
        result = run_round(p, state, Seeded.root(0).child("round", t))
        state = result.state
        assert p.sums.engine.jobs[-1].clip_norm == used == result.local_only["clip_norm"]  # clip and BLUR
        z_delta = p.clipping.vector_multiplier(1.0, 100)
        assert releases[-1].noise_std == pytest.approx(z_delta * used)  # noise
        assert p.clipping.clip_norm(state, p.clip_norm) > used  # all norms are above: it rises
    assert len({job.clip_norm for job in p.sums.engine.jobs}) == 3


def test_adaptive__the_count_is_divided_by_the_constant(tmp_path: Path) -> None:
    """Without noise b̃ = |P_t|·½/(pN) + ½ where all norms are below: |P_t| is not divided out."""
    p = adaptive_protocol(tmp_path, torch.full((1000,), 0.1), 1.0, Adaptive(), 5, z=0.0)
    state = run_round(p, first_state(p), Seeded.root(0)).state
    cohort = len(p.plan.sampler.cohort(Seeded.root(0).child("cohort")))
    assert cohort != 100
    expected = math.exp(-0.2 * (0.5 * cohort / 100 + 0.5 - 0.5))
    assert p.clipping.clip_norm(state, 1.0) == pytest.approx(expected, rel=1e-5)


def test_adaptive__the_event_in_the_ledger_is_what_it_is_without(tmp_path: Path) -> None:
    p = adaptive_protocol(tmp_path, torch.ones(1000), 1.0, Adaptive(), 5)
    run_round(p, first_state(p), Seeded.root(0))
    assert p.ledger.spends() == [(1, PoissonSampled(0.1, events.Gaussian(1.0)))]


def test_adaptive__stays_within_a_factor_of_its_start() -> None:
    state = Momentum().init(torch.zeros(3))
    for _ in range(300):
        state = Adaptive().update(state, bits=50.0, expected_cohort=100.0, start=1.0)
    assert Adaptive().clip_norm(state, 1.0) == 1e-6


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_adaptive__a_real_run_ends_near_its_true_median(tmp_path: Path, factor: float) -> None:
    table = {
        "clients": 359, "validation_share": 0.0, "rounds": 100, "sample_rate": 0.3, "epsilon": 8.0, "seed": 0,
        "clip_norm": 0.3 * factor, "clipping": "adaptive", "eval_every": 50,
        "local": {"steps": 3, "batch_size": 4, "learning_rate": 0.3},
    }  # fmt: skip
    run = fedblur.train(from_dict(table), out=tmp_path / "run")
    last = [row["local_only"] for row in run.rounds[-10:]]
    median = sum(row["norm_quantiles"][2] for row in last) / 10
    assert last[-1]["clip_norm"] == pytest.approx(median, rel=0.2)
    assert run.epsilon <= 8.0
    privacy = run.summary["privacy"]
    assert "adaptive" in privacy["clipping"]
    assert privacy["clip_norm"] == pytest.approx(last[-1]["clip_norm"], rel=0.2)  # not where it started
    z, vector = privacy["noise_multiplier"], privacy["signal_to_noise"]
    assert vector < math.sqrt(100) * privacy["expected_cohort"] / (z * math.sqrt(650))  # R counts z_Δ, not z


def test_adaptive__too_little_bit_noise_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    config = from_dict({"clipping": {"name": "adaptive", "bit_noise": 0.5}, "noise_multiplier": 1.0, "rounds": 2})
    with pytest.raises(ConfigError, match=r"clipping.bit_noise=0.5 is too little for noise_multiplier=1: .* above 0.5"):
        fedblur.train(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("bad", [{"quantile": 0.0}, {"quantile": 1.0}, {"rate": 0.0}, {"bit_noise": 0.0}])
def test_adaptive__settings_out_of_range_are_named(bad) -> None:
    name, value = next(iter(bad.items()))
    with pytest.raises(ConfigError, match=f"clipping.{name}={value}"):
        from_dict({"clipping": {"name": "adaptive", **bad}})


@pytest.mark.parametrize("mask", [None, "random", "momentum"])
def test_resume__is_bit_identical_with_adaptive_clipping_and_masks(tmp_path: Path, mask: str | None) -> None:
    table = {
        "rounds": 7, "seed": 3, "checkpoint_every": 2, "epsilon": 8.0, "sample_rate": 0.3, "server": "momentum",
        "clipping": "adaptive", "mask": mask, "bounding": "normalise", "method": "blur", "averaging": "ema",
    }  # fmt: skip
    whole = fedblur.train(from_dict(table), out=tmp_path / "whole")

    def stop_after_5(row) -> None:
        if row["round"] == 5:
            raise KeyError

    with pytest.raises(KeyError):
        fedblur.train(from_dict(table), out=tmp_path / "broken", watch=stop_after_5)
    resumed = fedblur.resume(tmp_path / "broken")
    assert (resumed.path / "model.safetensors").read_bytes() == (whole.path / "model.safetensors").read_bytes()
    assert [row["local_only"] for row in resumed.rounds] == [row["local_only"] for row in whole.rounds]
    assert len({row["local_only"]["clip_norm"] for row in resumed.rounds}) == 7


CORRELATED = {name for name, part in parts("mechanism").items() if issubclass(part, Correlated)}


@pytest.mark.parametrize("mechanism", sorted(CORRELATED))
def test_adaptive__is_refused_where_noise_of_several_rounds_is_tied_together_at_one_scale(
    tmp_path: Path, mechanism: str
) -> None:
    sampling = {"name": "min_separation", "rounds": 3}
    config = from_dict({"mechanism": mechanism, "sampling": sampling, "clipping": "adaptive", "rounds": 6})
    with pytest.raises(FedBlurError, match="clip"):
        fedblur.train(config, out=tmp_path / "run")


@pytest.mark.parametrize("mechanism", sorted(parts("mechanism").keys() - CORRELATED))
def test_adaptive__works_inside_every_other_mechanism_that_is_registered(tmp_path: Path, mechanism: str) -> None:
    """Vector and bit are one message, so a secure sum needs no second channel for the bit."""
    table = {
        "rounds": 12, "seed": 0, "epsilon": 8.0, "sample_rate": 0.3, "accountant": "rdp", "mechanism": mechanism,
        "clipping": "adaptive", "mask": "random", "clip_norm": 1e-3, "eval_every": 12,
    }  # fmt: skip
    run = fedblur.train(from_dict(table), out=tmp_path / "run")
    norms = [row["local_only"]["clip_norm"] for row in run.rounds]
    assert all(
        later > 1.05 * earlier for earlier, later in itertools.pairwise(norms)
    )  # every norm is above: exp(η_C/2)
    assert run.epsilon <= 8.0
