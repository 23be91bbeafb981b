"""Public masks: which coordinates a round is about is known to everyone, so noise is needed nowhere else."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

import fedblur
from fedblur.core.config import from_dict
from fedblur.core.errors import ConfigError
from fedblur.core.rng import Seeded, System
from fedblur.engines import LocalEngine, Simulated
from fedblur.learning.methods.blur import Blur
from fedblur.training.public_mask import MomentumMask, RandomMask
from fedblur.training.round import run_round
from fedblur.training.server import Momentum, ServerState, Sgd
from tests.training.test_round import first_state, module, protocol
from tests.worlds import CPU, packed


def state_at(round_: int, momentum: torch.Tensor) -> ServerState:
    return ServerState(torch.zeros_like(momentum), {"server.momentum": momentum}, round_)


@pytest.mark.parametrize("mask", [RandomMask(0.3), MomentumMask(0.3)])
def test_invariant_2__noise_is_dense_unless_the_support_is_public(tmp_path: Path, mask) -> None:
    """Every coordinate of the support is noisy and no other: and the support is computed without any client."""
    p = protocol(tmp_path, server=Momentum(), mask=mask)
    state = first_state(p)
    support = mask.support(state)
    after = run_round(p, state, Seeded.root(0)).state
    moved = torch.nonzero(after.theta != state.theta).flatten()
    assert torch.equal(moved, support)
    assert len(support) == 195


def test_mask__noise_has_the_promised_size_on_the_support(tmp_path: Path) -> None:
    p = protocol(tmp_path, sigma=1.5, mask=RandomMask(0.5))
    silent = dataclasses.replace(p, plan=dataclasses.replace(p.plan, noise_multiplier=0.0))
    state, rng = first_state(p), Seeded.root(1).child("round", 1)
    noisy = run_round(p, state, rng)
    difference = (noisy.state.theta - run_round(silent, state, rng).state.theta)[p.mask.support(state)]
    assert float(difference.std()) == pytest.approx(1.5 * 0.2 / 10, rel=0.15)
    assert noisy.local_only["coordinates"] == 325
    assert noisy.local_only["noise_norm"] == pytest.approx(1.5 * 0.2 * math.sqrt(325) / 10)


class Spy(LocalEngine):
    """Notes the job that clients were given."""

    def map_clients(self, job, ids, rng):
        self.job = job
        return super().map_clients(job, ids, rng)


@pytest.mark.parametrize("mask", [RandomMask(0.3), MomentumMask(0.3)])
def test_mask__depends_on_released_values_and_the_public_seed_alone(tmp_path: Path, mask) -> None:
    """Other clients, other local training, other private randomness: from the same state the same support."""
    p = protocol(tmp_path, server=Momentum(), mask=mask)
    state = run_round(p, first_state(p), Seeded.root(0)).state
    supports = []
    for sizes in ([5] * 40, [9] * 40):
        spy = Spy(packed(sizes), CPU, vectorise=True, block_size=6)
        run_round(dataclasses.replace(p, sums=Simulated(spy), methods=(Blur(),)), state, System())
        supports.append(spy.job.message.support)
    assert torch.equal(supports[0], supports[1])
    assert torch.equal(supports[0], mask.support(state))


def test_mask__its_seed_is_apart_from_noise_and_cohorts(tmp_path: Path) -> None:
    """Another mask seed changes the support and neither who takes part nor the noise that is drawn."""
    p = protocol(tmp_path, sigma=1.0, mask=RandomMask(0.5, seed=0))
    other = dataclasses.replace(p, mask=RandomMask(0.5, seed=1))
    state, rng = first_state(p), Seeded.root(0)
    assert not torch.equal(p.mask.support(state), other.mask.support(state))
    a, b = (run_round(q, state, rng).local_only for q in (p, other))
    assert a["cohort"] == b["cohort"]
    assert a["trained_norm_quantiles"] == b["trained_norm_quantiles"]


def test_mask__of_everything_is_no_mask_bit_for_bit(tmp_path: Path) -> None:
    p = protocol(tmp_path, mask=RandomMask(1.0))
    plain = dataclasses.replace(p, mask=None)
    state, rng = first_state(p), Seeded.root(0)
    assert torch.equal(run_round(p, state, rng).state.theta, run_round(plain, state, rng).state.theta)


def test_random_mask__comes_in_blocks_and_covers_everything_in_time() -> None:
    mask = RandomMask(0.25, block=16)
    seen = torch.zeros(650)
    for round_ in range(60):
        support = mask.support(state_at(round_, torch.zeros(650)))
        seen[support] += 1
        assert int((support.diff() != 1).sum()) <= 163 // 16 + 1  # runs of 16, whole but for one
    assert int(seen.min()) > 0
    assert float(seen.mean()) == pytest.approx(60 * 163 / 650)


def test_momentum_mask__takes_the_largest_and_explores() -> None:
    momentum = torch.zeros(1000)
    momentum[::50] = torch.arange(1, 21).float() * torch.tensor([1.0, -1.0]).repeat(10)
    mask = MomentumMask(0.03, explore=1 / 3)
    support = set(mask.support(state_at(4, momentum)).tolist())
    assert {*range(0, 1000, 50)} <= support  # 20 of the 30 are the largest in size, of either sign
    assert len(support) == 30
    assert support != set(mask.support(state_at(5, momentum)).tolist())


def test_momentum_mask__the_first_round_is_random() -> None:
    mask = MomentumMask(0.2, seed=5)
    first = mask.support(state_at(0, torch.zeros(500)))
    assert torch.equal(first, RandomMask(0.2, seed=5).support(state_at(0, torch.zeros(500))))


def test_mask__momentum_of_unsent_coordinates_fades_and_goes_on_moving_them(tmp_path: Path) -> None:
    """As the module says: an update of 0, so m ← βm, and a released value moves the model by η/(1 − β) in all."""
    server = Momentum(learning_rate=0.5, momentum=0.9)
    p = protocol(tmp_path, server=server, mask=RandomMask(0.2))
    state = first_state(p)
    state = run_round(p, state, Seeded.root(0).child("round", 1)).state
    after = run_round(p, state, Seeded.root(0).child("round", 2)).state
    unsent = torch.ones(650, dtype=torch.bool)
    unsent[p.mask.support(state)] = False
    before, now = state.buffers["server.momentum"][unsent], after.buffers["server.momentum"][unsent]
    torch.testing.assert_close(now, 0.9 * before)
    torch.testing.assert_close((after.theta - state.theta)[unsent], 0.5 * now, atol=1e-6, rtol=1e-3)


def test_mask__a_run_sends_k_coordinates_and_has_the_same_r(tmp_path: Path) -> None:
    table = {"rounds": 2, "seed": 0, "mask": {"name": "random", "share": 0.25}}
    masked, dense = (
        fedblur.train(from_dict(t), out=tmp_path / str(i)).summary
        for i, t in enumerate((table, {**table, "mask": None}))
    )
    assert masked["parameters"] == dense["parameters"] == dense["sent_coordinates"] == 650
    assert masked["sent_coordinates"] == 163
    assert masked["privacy"]["signal_to_noise"] == dense["privacy"]["signal_to_noise"]  # a quarter of both is heard
    assert masked["privacy"]["epsilon"] == dense["privacy"]["epsilon"]
    assert "public mask" in masked["privacy"]["support"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"mask": "momentum"}, 'mask = "momentum" needs server = "momentum"'),
        ({"mask": "random", "server": "adam"}, 'mask and server = "adam" do not go together'),
        ({"mask": {"name": "random", "share": 0.0}}, "mask.share=0.0 must be in"),
        ({"mask": {"name": "random", "block": 0}}, "mask.block=0 must be at least 1"),
        ({"mask": {"name": "random", "seed": -1}}, "mask.seed=-1 must be 0 or more"),
        ({"mask": {"name": "momentum", "explore": 0.0}, "server": "momentum"}, "mask.explore=0.0 must be in"),
    ],
)
def test_mask__what_does_not_fit_is_refused(table, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(table)


def test_mask__sgd_leaves_unsent_coordinates_where_they_were(tmp_path: Path) -> None:
    p = protocol(tmp_path, server=Sgd(), mask=RandomMask(0.1))
    state = first_state(p)
    for t in range(1, 4):
        support = p.mask.support(state)
        after = run_round(p, state, Seeded.root(0).child("round", t)).state
        assert torch.equal(torch.nonzero(after.theta != state.theta).flatten(), support)
        state = after
    assert not torch.equal(state.theta, p.server.init(fedblur.learning.module_function.initial_vector(module())).theta)
