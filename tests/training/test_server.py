"""Server optimisers and averages: closed forms, purity, checkpoints."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedblur.core import registry
from fedblur.core.errors import ConfigError
from fedblur.training.server import Adam, Averaging, Ema, Momentum, Server, ServerState, Sgd, Tail, published

UPDATES = [torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.0]), torch.tensor([-1.0, 4.0])]
SERVERS = [Sgd(), Momentum(), Adam(), Momentum(schedule="cosine"), Sgd(schedule="linear")]


def run(server: Server, updates: list[Tensor], noise_std: float = 0.0) -> list[ServerState]:
    """The states before the first round and after each."""
    states = [server.init(torch.tensor([10.0, 20.0]))]
    for t, update in enumerate(updates):
        states.append(server.step(states[-1], update, round_=t, rounds=len(updates), noise_std=noise_std))
    return states


def test_sgd__three_steps_by_hand() -> None:
    thetas = [state.theta.tolist() for state in run(Sgd(learning_rate=2.0), UPDATES)]
    assert thetas == [[10, 20], [12, 16], [13, 16], [11, 24]]


def test_momentum__three_steps_by_hand() -> None:
    states = run(Momentum(learning_rate=2.0, momentum=0.5), UPDATES)
    # m: (1, -2), (1, -1), (-0.5, 3.5)
    assert [state.theta.tolist() for state in states] == [[10, 20], [12, 16], [14, 14], [13, 21]]
    assert states[-1].buffers["server.momentum"].tolist() == [-0.5, 3.5]


def test_adam__three_steps_by_hand_without_noise() -> None:
    server = Adam(learning_rate=0.1, beta1=0.5, beta2=0.75)
    thetas = [float(state.theta[0]) for state in run(server, UPDATES)]
    # first coordinate, G = 1, 0.5, -1
    m1, v1 = 0.5, 0.25
    m2, v2 = 0.25 + 0.25, 0.1875 + 0.0625
    m3, v3 = 0.25 - 0.5, 0.1875 + 0.25
    expected = [10.0]
    for m, v, t in ((m1, v1, 1), (m2, v2, 2), (m3, v3, 3)):
        expected.append(expected[-1] + 0.1 * (m / (1 - 0.5**t)) / math.sqrt(v / (1 - 0.75**t)))
    assert thetas == pytest.approx(expected, abs=1e-5)
    assert thetas[1] == pytest.approx(10.1, abs=1e-5)  # the first step of Adam has size η_g


def test_adam__equals_torch_without_noise() -> None:
    reference = torch.nn.Parameter(torch.tensor([10.0, 20.0]))
    optimiser = torch.optim.Adam([reference], lr=0.1, betas=(0.9, 0.99), eps=1e-8)
    updates = list(torch.randn(20, 2, generator=torch.Generator().manual_seed(0)))
    for update in updates:
        reference.grad = -update
        optimiser.step()
    torch.testing.assert_close(run(Adam(learning_rate=0.1), updates)[-1].theta, reference.detach())


def noise_rounds(server: Adam, signal: float, noise_std: float, rounds: int = 300) -> ServerState:
    generator = torch.Generator().manual_seed(0)
    state = server.init(torch.zeros(20_000))
    for t in range(rounds):
        update = signal + noise_std * torch.randn(20_000, generator=generator)
        state = server.step(state, update, round_=t, rounds=rounds, noise_std=noise_std)
    return state


def test_adam__noise_alone_has_a_corrected_second_moment_near_zero() -> None:
    server, noise_std = Adam(), 0.03
    second = noise_rounds(server, 0.0, noise_std).buffers["server.second"]
    power = server.signal_power(second, 299, noise_std)
    assert abs(float(power.mean())) < 0.005 * noise_std**2
    assert float(second.mean()) > 0.9 * noise_std**2  # uncorrected, it is the noise


def test_adam__corrected_second_moment_finds_the_signal_in_the_noise() -> None:
    server, noise_std = Adam(), 0.03
    second = noise_rounds(server, 0.01, noise_std).buffers["server.second"]
    assert float(server.signal_power(second, 299, noise_std).mean()) == pytest.approx(1e-4, rel=0.1)


@pytest.mark.parametrize("rounds", [1, 3, 300])
def test_adam__floor_is_one_standard_error_under_noise_alone(rounds: int) -> None:
    server, noise_std = Adam(), 0.03
    second = noise_rounds(server, 0.0, noise_std, rounds).buffers["server.second"]
    scatter = float(server.signal_power(second, rounds - 1, noise_std).std())
    assert server.floor(rounds - 1, noise_std) == pytest.approx(scatter, rel=0.05)


def test_adam__noise_alone_cannot_make_a_large_step() -> None:
    states = [noise_rounds(Adam(learning_rate=1.0), 0.0, 0.03, rounds) for rounds in (1, 2, 20)]
    assert all(float(state.theta.abs().max()) < 4 * state.round for state in states)


def test_adam__is_free_of_scale() -> None:
    server = Adam(learning_rate=1.0)
    near, far = (noise_rounds(server, scale * 0.01, scale * 0.03, 20).theta for scale in (1.0, 64.0))
    torch.testing.assert_close(near, far)


def test_cosine__starts_at_the_learning_rate_and_ends_at_the_final_share() -> None:
    server = Sgd(learning_rate=4.0, schedule="cosine", final_share=0.25)
    assert server.rate(0, 100) == 4.0
    assert server.rate(50, 100) == pytest.approx(2.5)
    assert server.rate(99_999, 100_000) == pytest.approx(1.0, abs=1e-6)
    rates = [server.rate(t, 100) for t in range(100)]
    assert rates == sorted(rates, reverse=True)


def test_cosine__no_round_has_a_rate_of_zero() -> None:
    server = Sgd(schedule="cosine")
    assert min(server.rate(t, rounds) for rounds in (1, 2, 7, 1000) for t in range(rounds)) > 0


def test_cosine__three_steps_by_hand() -> None:
    thetas = [state.theta.tolist() for state in run(Sgd(schedule="cosine"), UPDATES)]
    # cos(0) = 1, cos(π/3) = 1/2, cos(2π/3) = -1/2: shares 1, 3/4, 1/4
    assert thetas[3] == pytest.approx([10 + 1 + 0.375 - 0.25, 20 - 2 + 0 + 1])


def test_linear__falls_by_the_same_in_every_round() -> None:
    server = Sgd(learning_rate=4.0, schedule="linear", final_share=0.25)
    assert [server.rate(t, 4) for t in range(4)] == [4.0, 3.25, 2.5, 1.75]
    thetas = [state.theta.tolist() for state in run(Sgd(schedule="linear"), UPDATES)]
    assert thetas[3] == pytest.approx([10 + 1 + 0.5 * 2 / 3 - 1 / 3, 20 - 2 + 0 + 4 / 3])  # shares 1, 2/3, 1/3


@pytest.mark.parametrize("round_", [-1, 3, 4])
def test_rate__a_round_outside_the_run_is_a_mistake(round_: int) -> None:
    with pytest.raises(ValueError, match="rounds count from 0"):
        Sgd().rate(round_, 3)


def test_step__an_update_of_another_shape_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"mean_update \(1,\) != theta \(2,\)"):
        run(Sgd(), [torch.zeros(1)])


@pytest.mark.parametrize("server", SERVERS, ids=repr)
def test_step__counts_rounds_and_stays_float32(server: Server) -> None:
    states = run(server, [update.double() for update in UPDATES])
    assert [state.round for state in states] == [0, 1, 2, 3]
    assert {tensor.dtype for state in states for tensor in state.tensors().values()} == {torch.float32}


def averaged(averaging: Averaging, thetas: list[Tensor]) -> list[ServerState]:
    """The states before the first round and after each, when the server moves along these iterates."""
    server = Sgd()
    states = [averaging.init(server.init(thetas[0]))]
    for t, (old, new) in enumerate(pairwise(thetas)):
        state = server.step(states[-1], new - old, round_=t, rounds=len(thetas) - 1, noise_std=0.0)
        states.append(averaging.update(state, round_=t, rounds=len(thetas) - 1))
    return states


def test_ema__three_steps_by_hand() -> None:
    states = averaged(Ema(decay=0.15), [torch.tensor([x]) for x in (1.0, 2.0, 4.0, 8.0)])
    # β: 1/10, min(.15, 2/11), min(.15, 3/12)
    one = 0.1 * 1 + 0.9 * 2
    two = 0.15 * one + 0.85 * 4
    three = 0.15 * two + 0.85 * 8
    assert [float(published(s, Ema())) for s in states] == pytest.approx([1, one, two, three])


def test_ema__equals_a_plain_loop() -> None:
    thetas = list(torch.randn(201, 5, generator=torch.Generator().manual_seed(0)))
    expected = thetas[0].double()
    for t, theta in enumerate(thetas[1:]):
        beta = min(0.9, (1 + t) / (10 + t))
        expected = beta * expected + (1 - beta) * theta.double()
    actual = published(averaged(Ema(decay=0.9), thetas)[-1], Ema())
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("share", "last"), [(0.25, 2), (0.5, 4), (1.0, 8), (0.01, 1)])
def test_tail__is_the_mean_of_the_last_share_and_the_iterate_before(share: float, last: int) -> None:
    thetas = list(torch.randn(9, 5, generator=torch.Generator().manual_seed(0)))
    states = averaged(Tail(share=share), thetas)
    torch.testing.assert_close(published(states[-1], Tail()), torch.stack(thetas[-last:]).mean(0))
    for state in states[: 9 - last + 1]:
        assert torch.equal(published(state, Tail()), state.theta)


def test_published__without_averaging_is_the_last_iterate() -> None:
    state = run(Momentum(), UPDATES)[-1]
    assert published(state, None) is state.theta


AVERAGES = [None, Ema(), Tail(share=1.0)]


def one_round(state: ServerState, server: Server, averaging: Averaging | None, update: Tensor) -> ServerState:
    t = state.round
    state = server.step(state, update, round_=t, rounds=6, noise_std=0.1)
    return state if averaging is None else averaging.update(state, round_=t, rounds=6)


@pytest.mark.parametrize("server", SERVERS, ids=repr)
@pytest.mark.parametrize("averaging", AVERAGES, ids=repr)
def test_step__inputs_are_unchanged_and_nothing_is_shared(server: Server, averaging: Averaging | None) -> None:
    theta = torch.tensor([10.0, 20.0])
    state = server.init(theta)
    state = state if averaging is None else averaging.init(state)
    for update in UPDATES:
        before = {name: tensor.clone() for name, tensor in state.tensors().items()}
        given = update.clone()
        after = one_round(state, server, averaging, given)
        assert torch.equal(given, update)
        assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())
        pointers = [t.data_ptr() for t in (*after.tensors().values(), given, theta)]
        assert len(set(pointers)) == len(pointers)
        state = after


@pytest.mark.parametrize("server", SERVERS, ids=repr)
@pytest.mark.parametrize("averaging", AVERAGES, ids=repr)
def test_checkpoint__a_resumed_run_is_the_same_bit_for_bit(
    server: Server, averaging: Averaging | None, tmp_path: Path
) -> None:
    state = server.init(torch.tensor([10.0, 20.0]))
    state = state if averaging is None else averaging.init(state)
    for update in UPDATES:
        state = one_round(state, server, averaging, update)
    save_file(state.tensors(), tmp_path / "state.safetensors")
    resumed = ServerState.from_tensors(load_file(tmp_path / "state.safetensors"), state.round)
    for update in UPDATES:
        state = one_round(state, server, averaging, update)
        resumed = one_round(resumed, server, averaging, update)
    assert resumed.round == state.round == 6
    assert resumed.tensors().keys() == state.tensors().keys()
    assert all(torch.equal(tensor, resumed.tensors()[name]) for name, tensor in state.tensors().items())


def test_buffers__names_say_whose_they_are() -> None:
    for server in SERVERS:
        names = Ema().init(server.init(torch.zeros(2))).buffers
        assert all(name.startswith(("server.", "averaging.")) for name in names)


def test_registry__knows_servers_and_averages() -> None:
    assert set(registry.parts("server")) >= {"sgd", "momentum", "adam"}
    assert set(registry.parts("averaging")) >= {"ema", "tail"}
    part = registry.build("server", {"name": "momentum", "learning_rate": 6, "schedule": "cosine"})
    assert part == Momentum(learning_rate=6.0, schedule="cosine")
    assert registry.build("server", registry.describe(part)) == part


@pytest.mark.parametrize(
    ("kind", "table", "message"),
    [
        (
            "server",
            {"name": "sgd", "learning_rate": 0},
            "server.learning_rate=0.0 must be positive and finite",
        ),
        ("server", {"name": "sgd", "learning_rate": -1.0}, "server.learning_rate=-1.0 must be positive"),
        ("server", {"name": "adam", "learning_rate": math.inf}, "server.learning_rate=inf must be positive"),
        ("server", {"name": "momentum", "learning_rate": math.nan}, "server.learning_rate=nan must be"),
        ("server", {"name": "momentum", "momentum": 1.0}, "server.momentum=1.0 must be in [0, 1)"),
        ("server", {"name": "momentum", "momentum": -0.1}, "server.momentum=-0.1 must be in [0, 1)"),
        ("server", {"name": "adam", "beta1": 1.5}, "server.beta1=1.5 must be in [0, 1)"),
        ("server", {"name": "adam", "beta2": 1.0}, "server.beta2=1.0 must be in [0, 1)"),
        ("server", {"name": "adam", "epsilon": 0.0}, "server.epsilon=0.0 must be positive"),
        ("server", {"name": "sgd", "schedule": "step"}, "server.sgd.schedule='step'"),
        (
            "server",
            {"name": "sgd", "schedule": "cosine", "final_share": 2.0},
            "server.final_share=2.0 must be in [0, 1]",
        ),
        (
            "server",
            {"name": "sgd", "final_share": 0.1},
            'server.final_share=0.1 needs server.schedule = "cosine" or "linear"',
        ),
        ("averaging", {"name": "ema", "decay": 1.0}, "averaging.decay=1.0 must be in [0, 1)"),
        ("averaging", {"name": "tail", "share": 0.0}, "averaging.share=0.0 must be in (0, 1]"),
    ],
)
def test_settings__out_of_range_is_one_line(kind: registry.Kind, table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.build(kind, table)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
