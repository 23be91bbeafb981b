"""THE round: the invariants of DESIGN §3 that live between the stages, each under its own name."""

import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedblur.core.config import Config, LocalTraining
from fedblur.core.errors import PrivacyError, RoundAborted
from fedblur.core.rng import Rng, Seeded, System
from fedblur.engines import LocalEngine, Simulated, Task
from fedblur.engines.cohort_sum import Diagnostics
from fedblur.learning.client import Block, ClientJob
from fedblur.learning.methods.lus import Lus
from fedblur.learning.module_function import Layout, as_function, initial_vector
from fedblur.privacy.accounting import make_plan
from fedblur.privacy.clipping import clip_l2
from fedblur.privacy.ledger import Budget, Ledger
from fedblur.privacy.mechanisms.gaussian import Gaussian
from fedblur.privacy.sampling import Poisson
from fedblur.training.round import Protocol, run_round
from fedblur.training.server import Sgd
from tests.worlds import CPU, packed

CLIENTS, RATE = 40, 0.25


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def protocol(tmp_path: Path, sigma: float = 1.0, clip_norm: float = 0.2, **changes) -> Protocol:
    net = module()
    layout = Layout.of(net)
    plan = make_plan(Poisson().sampler(CLIENTS, RATE), Gaussian(), rounds=5, delta=1e-2, noise_multiplier=sigma)
    base = Protocol(
        plan=plan,
        sums=Simulated(LocalEngine(packed([5] * CLIENTS), CPU, vectorise=True, block_size=6)),
        mechanism=Gaussian(),
        server=Sgd(),
        averaging=None,
        ledger=Ledger(tmp_path / "ledger.jsonl", Budget(plan.epsilon_target, plan.delta, "pld", 5)),
        forward=as_function(net),
        layout=layout,
        local=LocalTraining(steps=2, batch_size=5),
        methods=(),
        clip_norm=clip_norm,
    )
    return dataclasses.replace(base, **changes)


def first_state(p: Protocol):
    return p.server.init(initial_vector(module()))


class Loud:
    """A test double: every client sends the same huge update, and the engine notes whom it was asked for."""

    device = CPU

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self.asked: list[Tensor] = []

    def map_clients(self, job: ClientJob, ids: Tensor, rng: Rng) -> Iterator[Block]:
        self.asked.append(ids)
        if len(ids):
            bounded, norms = clip_l2(torch.ones(len(ids), self.dimension), job.clip_norm)
            yield Block(bounded, norms, norms)


def test_invariant_3__denominator_is_constant(tmp_path: Path) -> None:
    """Without noise the step is (number of clients)·S/(pN) in every direction: nothing is divided by len(cohort)."""
    loud = Loud(650)
    p = protocol(tmp_path, sigma=0.0, sums=Simulated(loud))
    state, rng = first_state(p), Seeded.root(3)
    sizes = set()
    for t in range(1, 5):
        after = run_round(p, state, rng.child("round", t)).state
        moved = float((after.theta - state.theta).double().norm())
        count = len(loud.asked[-1])
        assert moved == pytest.approx(count * 0.2 / (RATE * CLIENTS), rel=1e-4)
        sizes.add(count)
        state = after
    assert len(sizes) > 1


class Told:
    """A cohort sum that is known beforehand: whole numbers on the mechanism's grid."""

    def __init__(self, total: Tensor) -> None:
        self.answer, self.tasks = total, []

    def total(self, task: Task, rng: Rng) -> tuple[Tensor, Diagnostics]:
        self.tasks.append(task)
        return self.answer, Diagnostics(len(self.answer), task.job.clip_norm)


def test_round__asks_one_interface_for_the_sum_once_and_notices_nothing_else(tmp_path: Path) -> None:
    """The sums of an engine's clients and the same sum from elsewhere lead to the same model."""
    own = protocol(tmp_path)
    state, rng = first_state(own), Seeded.root(3).child("round", 1)
    noted = []

    class Noted(Simulated):
        def total(self, task: Task, rng: Rng) -> tuple[Tensor, Diagnostics]:
            noted.append(super().total(task, rng))
            return noted[-1]

    expected = run_round(dataclasses.replace(own, sums=Noted(own.sums.engine)), state, rng).state
    told = Told(noted[0][0])
    (tmp_path / "ledger.jsonl").unlink()
    again = run_round(dataclasses.replace(protocol(tmp_path), sums=told), state, rng).state
    assert torch.equal(again.theta, expected.theta)
    assert len(noted) == len(told.tasks) == 1
    assert torch.equal(told.tasks[0].cohort, own.plan.sampler.cohort(rng.child("cohort")))


def test_invariant_3__client_weights_cannot_be_expressed() -> None:
    keys = {f.name for f in dataclasses.fields(Config)} | {f.name for f in dataclasses.fields(LocalTraining)}
    assert not any("weight" in key and key != "weight_decay" for key in keys)
    assert "denominator" not in keys


def test_invariant_2__a_round_with_a_sparse_update_moves_every_coordinate(tmp_path: Path) -> None:
    p = protocol(tmp_path, methods=(Lus(0.95),))
    state = first_state(p)
    after = run_round(p, state, Seeded.root(0)).state
    assert int((after.theta == state.theta).sum()) == 0


def test_round__noise_on_the_sum_has_std_sigma_times_the_bound(tmp_path: Path) -> None:
    p = protocol(tmp_path, sigma=1.5)
    silent = dataclasses.replace(p, plan=dataclasses.replace(p.plan, noise_multiplier=0.0))
    state, rng = first_state(p), Seeded.root(1).child("round", 1)
    difference = run_round(p, state, rng).state.theta - run_round(silent, state, rng).state.theta
    assert float(difference.std()) == pytest.approx(1.5 * 0.2 / (RATE * CLIENTS), rel=0.1)


def test_invariant_6__the_ledger_row_is_on_disk_before_the_server_sees_the_sum(tmp_path: Path) -> None:
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Witness(Sgd):
        def direction(self, buffers, mean_update, round_, noise_std):
            seen.append(len(Ledger(tmp_path / "ledger.jsonl", p.ledger.budget).spends()))
            return mean_update, {}

    p = protocol(tmp_path, server=Witness())
    state = first_state(p)
    for t in (1, 2):
        state = run_round(p, state, Seeded.root(0).child("round", t)).state
    assert seen == [1, 2]


def test_invariant_6__written_then_forced_to_the_disk_then_released(tmp_path: Path, monkeypatch) -> None:
    order = []

    @dataclasses.dataclass(frozen=True)
    class Witness(Sgd):
        def direction(self, buffers, mean_update, round_, noise_std):
            order.append("release")
            return mean_update, {}

    p = protocol(tmp_path, server=Witness())
    write, fsync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda file, data: (order.append("write"), write(file, data))[1])
    monkeypatch.setattr(os, "fsync", lambda file: (order.append("fsync"), fsync(file))[1])
    run_round(p, first_state(p), System())
    assert order == ["write", "fsync", "release"]


def test_invariant_6__a_line_cut_short_is_counted_before_the_next_round(tmp_path: Path) -> None:
    """A crash while a round was paid for: that round may have been released, and the next one must not hide it."""
    p = protocol(tmp_path)
    state = run_round(p, first_state(p), System()).state
    run_round(p, state, System())
    p.ledger.path.write_bytes(p.ledger.path.read_bytes()[:-20])
    p = dataclasses.replace(p, ledger=Ledger(p.ledger.path, p.ledger.budget))
    run_round(p, state, System())
    assert len(p.ledger.spends()) == 3


def test_invariant_6__a_round_beyond_the_budget_asks_no_client(tmp_path: Path) -> None:
    """The ledger would refuse its payment too, but by then clients have trained, and real ones have sent."""
    loud = Loud(650)
    p = protocol(tmp_path, sums=Simulated(loud))
    p = dataclasses.replace(p, ledger=Ledger(tmp_path / "one.jsonl", dataclasses.replace(p.ledger.budget, rounds=1)))
    state = run_round(p, first_state(p), System()).state
    with pytest.raises(PrivacyError, match="the budget is spent"):
        run_round(p, state, System())
    assert len(loud.asked) == 1


def test_invariant_6__an_aborted_round_is_paid_for(tmp_path: Path, monkeypatch) -> None:
    p = protocol(tmp_path)
    monkeypatch.setattr(Gaussian, "accumulate", lambda *values: (_ for _ in ()).throw(RoundAborted("too few")))
    result = run_round(p, first_state(p), System())
    assert result.local_only["aborted"] == "too few"
    assert len(p.ledger.spends()) == 1


def test_round__cohorts_of_rounds_differ(tmp_path: Path) -> None:
    loud = Loud(650)
    p = protocol(tmp_path, sums=Simulated(loud))
    state = first_state(p)
    for _ in range(3):
        state = run_round(p, state, System()).state
    assert len({tuple(ids.tolist()) for ids in loud.asked}) == 3


def test_invariant_6__a_ledger_that_cannot_be_written_releases_nothing(tmp_path: Path, monkeypatch) -> None:
    p = protocol(tmp_path)
    stepped = []
    monkeypatch.setattr(Ledger, "spend", lambda *a, **k: (_ for _ in ()).throw(OSError("disk gone")))
    monkeypatch.setattr(Sgd, "direction", lambda *a, **k: stepped.append(1))
    with pytest.raises(OSError, match="disk gone"):
        run_round(p, first_state(p), Seeded.root(0))
    assert not stepped


def test_invariant_4__the_event_in_the_ledger_is_the_samplers_own(tmp_path: Path) -> None:
    p = protocol(tmp_path)
    run_round(p, first_state(p), Seeded.root(0))
    assert p.ledger.spends() == [(1, p.plan.sampler.event(p.mechanism.event(1.0)))]


def test_round__an_unseeded_round_is_never_the_same_twice(tmp_path: Path) -> None:
    p = protocol(tmp_path)
    state = first_state(p)
    a, b = (run_round(p, state, System()).state.theta for _ in range(2))
    assert not torch.equal(a, b)
    assert len(p.ledger.spends()) == 2


def test_pin_f__scaling_s_and_the_server_rate_against_each_other_changes_nothing(tmp_path: Path) -> None:
    """S → aS, η_g → η_g/a: the same trajectory when all clients are clipped and there is no penalty."""
    end = []
    for a in (1.0, 4.0):
        folder = tmp_path / str(a)
        folder.mkdir()
        p = protocol(folder, clip_norm=0.01 * a, server=Sgd(learning_rate=1.0 / a))
        state = first_state(p)
        for t in range(1, 6):
            result = run_round(p, state, Seeded.root(0).child("round", t))
            assert result.local_only["clipped_share"] == 1.0
            state = result.state
        end.append(state.theta)
    torch.testing.assert_close(end[0], end[1], rtol=1e-4, atol=1e-6)
    assert not torch.equal(end[0], initial_vector(module()))


def test_diagnostics__match_a_direct_calculation(tmp_path: Path) -> None:
    p = protocol(tmp_path, sigma=1.5, methods=(Lus(0.5),))
    state, rng = first_state(p), Seeded.root(2)
    report = run_round(p, state, rng).local_only
    ids = p.plan.sampler.cohort(rng.child("cohort"))
    job = ClientJob(p.forward, p.layout, p.layout.unflatten(state.theta), p.local, p.methods, math.inf)
    blocks = list(p.sums.engine.map_clients(job, ids, rng))
    raw = torch.cat([block.bounded.value for block in blocks]).double()
    norms, d, clip, sigma = raw.norm(dim=1), 650, 0.2, 1.5
    clipped = raw * (clip / norms).clamp(max=1)[:, None]
    assert report["cohort"] == len(ids)
    assert report["clipped_share"] == pytest.approx(float((norms > clip).double().mean()))
    assert report["clip_error_message"] == pytest.approx(float(((norms - clip).clamp(min=0) ** 2).mean()) / d, rel=1e-4)
    assert report["noise_error_message"] == pytest.approx(sigma**2 * clip**2 / len(ids))
    assert report["clip_error"] == pytest.approx(float((raw - clipped).mean(0).square().sum()), rel=1e-3)
    assert report["noise_error"] == pytest.approx(d * (sigma * clip / (RATE * CLIENTS)) ** 2)
    assert report["alpha_bar"] == pytest.approx(float((clip / norms).clamp(max=1).mean()), rel=1e-4)
    trained = torch.cat([block.trained_norms for block in blocks]).double()
    assert report["beta"] == pytest.approx(float((norms / trained).mean()), rel=1e-4)
    assert report["kappa"] == pytest.approx(float(clipped.mean(0).norm()) / clip, rel=1e-4)
    assert report["norm_quantiles"][2] == pytest.approx(float(norms.median()), rel=0.2)


def test_round__an_empty_cohort_still_releases_noise(tmp_path: Path) -> None:
    class Nobody(type(Poisson().sampler(CLIENTS, RATE))):
        def cohort(self, rng):
            return torch.empty(0, dtype=torch.int64)

    p = protocol(tmp_path)
    p = dataclasses.replace(p, plan=dataclasses.replace(p.plan, sampler=Nobody(CLIENTS, RATE)))
    state = first_state(p)
    result = run_round(p, state, Seeded.root(0))
    assert int((result.state.theta == state.theta).sum()) == 0
    assert result.local_only["kappa"] is None
