"""What a server makes of its rounds, and matrices that put little noise into it: against jax-privacy, and perturbed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedblur.core.config import Config
from fedblur.core.errors import ConfigError, PrivacyError
from fedblur.privacy.noise_matrices import UNIT, Blt, Toeplitz, Tree
from fedblur.training import noise_planning
from fedblur.training.noise_planning import (
    Workload,
    noise_in_models,
    optimised,
    server_workload,
    square_root,
)
from fedblur.training.server import Adam, Averaging, Ema, Momentum, Server, Sgd, Tail, published

ORACLE = Path(__file__).parents[1] / "privacy" / "oracles" / "noise_matrices.json"
SUMS = np.tril(np.ones((60, 60)))
SERVERS: list[tuple[Server, Averaging | None]] = [
    (Sgd(), None),
    (Momentum(schedule="cosine"), None),
    (Momentum(learning_rate=0.3, schedule="linear", final_share=0.2), Ema(0.9)),
    (Sgd(), Tail(0.5)),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDBLUR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(noise_planning, "_MEMO", {})
    return tmp_path / "cache"


# --- what a server makes of its rounds ---


@pytest.mark.parametrize(("server", "averaging"), SERVERS, ids=str)
def test_server_workload__gives_the_models_that_the_server_publishes(
    server: Server, averaging: Averaging | None
) -> None:
    means = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    state = server.init(torch.zeros(3, dtype=torch.float64))
    state = averaging.init(state) if averaging else state
    workload = server_workload(server, averaging, 12)
    assert workload.linear
    assert workload.note == ""
    for t in range(12):
        state = server.step(state, means[t], round_=t, rounds=12, noise_std=0.1)
        state = averaging.update(state, round_=t, rounds=12) if averaging else state
        expected = torch.from_numpy(workload.weights[t]) @ means
        assert torch.allclose(published(state, averaging), expected, rtol=1e-9, atol=1e-12)


def test_server_workload__plain_steps_are_sums_over_rounds() -> None:
    assert np.array_equal(server_workload(Sgd(), None, 9).weights, np.tril(np.ones((9, 9))))


@dataclass(frozen=True)
class Normed(Sgd):
    """A step of length 1, whatever the mean's length."""

    def direction(
        self, buffers: Mapping[str, Tensor], mean_update: Tensor, round_: int, noise_std: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return mean_update / mean_update.norm(), {}


@pytest.mark.parametrize("server", [Adam(), Normed()], ids=str)
def test_server_workload__steps_that_are_not_linear_stand_for_plain_sums(server: Server) -> None:
    workload = server_workload(server, None, 9)
    assert not workload.linear
    assert "not linear" in workload.note
    assert np.array_equal(workload.weights, np.tril(np.ones((9, 9))))


# --- matrices ---


def test_loss__is_that_of_the_matrix_and_its_gradient_is_right() -> None:
    weights = server_workload(Momentum(schedule="cosine"), None, 40).weights
    rng = np.random.default_rng(0)
    for separation, at_most in ((5, None), (8, 2), (3, 1)):
        matrix = Toeplitz(tuple(int(UNIT * value) for value in np.sort(rng.random(6))[::-1]))
        loss = noise_planning._Loss(weights, separation, at_most)
        c = matrix.series(40)
        value, gradient = loss(c)
        assert np.exp(value / 2) == pytest.approx(
            noise_in_models(matrix, weights, separation, at_most) * np.sqrt(40), rel=1e-8
        )
        numeric = [(loss(c + step)[0] - loss(c - step)[0]) / 2e-6 for step in 1e-6 * np.eye(7)]
        assert gradient == pytest.approx(np.array(numeric), abs=1e-7)


@pytest.mark.parametrize("case", json.loads(ORACLE.read_text(encoding="utf-8"))["optimised"], ids=str)
def test_optimised__is_at_least_as_good_as_that_of_jax_privacy(case: dict[str, int | float | list[float]]) -> None:
    """Its bands are fitted for one participation and plain sums, its buffers for all participations."""
    rounds, separation = int(case["rounds"]), int(case["separation"])  # type: ignore[arg-type]
    sums = np.tril(np.ones((rounds, rounds)))
    banded = optimised("banded", sums, separation, 1)
    assert noise_in_models(banded, sums, separation, 1) <= case["banded, one participation"] * (1 + 1e-4)  # type: ignore[operator]
    blt = optimised("blt", sums, separation)
    assert noise_in_models(blt, sums, separation) <= case["blt, all"][0] * (1 + 1e-3)  # type: ignore[index]


@pytest.mark.parametrize("kind", ["banded", "blt"])
@pytest.mark.parametrize("case", SERVERS, ids=str)
def test_optimised__is_better_than_its_neighbours(kind: noise_planning.Kind, case: tuple[Server, Averaging]) -> None:
    weights = server_workload(*case, 60).weights
    matrix = optimised(kind, weights, 6)
    best = noise_in_models(matrix, weights, 6)
    assert best < 0.75 * noise_in_models(Toeplitz(()), weights, 6)
    assert best <= noise_in_models(square_root(weights, 6), weights, 6) * (1.0 if kind == "banded" else 1.1)
    step = UNIT // 50
    if isinstance(matrix, Toeplitz):
        assert matrix.bands == 6
        for k in range(5):
            for sign in (-step, step):
                moved = tuple(c + sign * (k == i) for i, c in enumerate(matrix.coefficients))
                if list(moved) == sorted((UNIT, *moved), reverse=True)[1:]:
                    assert best <= noise_in_models(Toeplitz(moved), weights, 6) * (1 + 1e-6)
    else:
        assert isinstance(matrix, Blt)
        for decay, weight in ((step, 0), (-step, 0), (0, -step)):
            decays = tuple(min(max(d + decay, 1), UNIT - 1) for d in matrix.decays)
            moved_weights = tuple(max(w + weight, 1) for w in matrix.weights)
            assert best <= noise_in_models(Blt(decays, moved_weights), weights, 6) * (1 + 1e-6)


def test_optimised__bands_never_grow_and_may_be_more_than_the_rounds_between() -> None:
    for weights in (SUMS, SUMS @ SUMS @ SUMS, server_workload(Momentum(), Ema(), 60).weights):
        narrow, wide = (optimised("banded", weights, 5, bands=bands) for bands in (5, 15))
        assert noise_in_models(wide, weights, 5) <= noise_in_models(narrow, weights, 5) * 1.001
        assert wide.columns_overlap(5)
        for matrix in (narrow, wide):
            assert isinstance(matrix, Toeplitz)
            assert np.all(np.diff(matrix.series(60)) <= 0)


def test_optimised__tree_restarts_where_it_puts_least_noise() -> None:
    tree = optimised("tree", SUMS, 7)
    assert isinstance(tree, Tree)
    assert noise_in_models(tree, SUMS, 7) == min(noise_in_models(Tree(2**j), SUMS, 7) for j in range(7))
    assert 1 < tree.restart < 64
    for bands in (15, 16, 17):  # no more rounds than these are tied together: amplification is proven for such trees
        short = optimised("tree", SUMS, 20, 1, bands=bands)
        assert isinstance(short, Tree)
        assert short.restart == (8 if bands == 15 else 16)


def test_optimised__buffers_are_as_many_as_take_off_noise() -> None:
    once = optimised("blt", SUMS, 60, 1)
    assert isinstance(once, Blt)
    assert len(once.decays) > 1
    one = optimised("blt", SUMS, 60, 1, buffers=1)
    assert noise_in_models(once, SUMS, 60, 1) < 0.999 * noise_in_models(one, SUMS, 60, 1)
    every = optimised("blt", SUMS, 1)  # a client in all rounds: independent noise is best
    assert isinstance(every, Blt)
    assert len(every.decays) == 1
    assert noise_in_models(every, SUMS, 1) == pytest.approx(noise_in_models(Toeplitz(()), SUMS, 1), rel=1e-3)


def test_square_root__squares_to_the_workload_where_it_never_grows() -> None:
    root = square_root(SUMS, 5).series(5)
    assert root == pytest.approx([1, 1 / 2, 3 / 8, 5 / 16, 35 / 128], abs=1e-6)
    momentum = square_root(server_workload(Momentum(), None, 60).weights, 5).series(5)
    assert np.convolve(momentum, momentum)[:5] == pytest.approx(np.cumsum(0.9 ** np.arange(5)), abs=1e-5)
    grows = server_workload(Momentum(), Ema(), 60).weights
    assert square_root(grows, 5) == square_root(SUMS, 5)


def test_optimised__refuses_no_bands() -> None:
    with pytest.raises(ConfigError, match="bands=0"):
        optimised("banded", SUMS, 5, bands=0)
    with pytest.raises(ConfigError, match="buffers=0"):
        optimised("blt", SUMS, 5, buffers=0)


@pytest.mark.parametrize("mechanism", ["tree", "banded", "blt"])
@pytest.mark.parametrize(("rounds", "separation"), [(1, 6), (3, 6), (20, 1), (20, 6)])
@pytest.mark.parametrize("sampling", ["min_separation", "cyclic"])
def test_settled__gives_numbers_whose_event_can_be_accounted(
    mechanism: str, rounds: int, separation: int, sampling: str
) -> None:
    rule = {"rounds": separation} if sampling == "min_separation" else {"groups": separation}
    part = {"name": sampling, **rule}
    config = Config(clients=60, sample_rate=0.1, rounds=rounds, epsilon=8.0, sampling=part, mechanism=mechanism)
    done = noise_planning.settled(config)
    assert not done.mechanism.open
    assert noise_planning.settled(done) == done
    event = done.sampling.sampler(60, 0.1).event(done.mechanism.event(2.0))
    if sampling == "cyclic" and (mechanism == "blt" or (mechanism, separation) == ("banded", 1)):
        with pytest.raises(PrivacyError, match="no amplification by sampling is proven"):
            event.resolved(rounds)
    else:
        release, count = event.resolved(rounds)
        assert count >= 1
        assert getattr(release, "inner", release).noise_multiplier <= 2.0


# --- the cache ---


@pytest.mark.parametrize("kind", ["tree", "banded", "blt"])
def test_optimised__is_kept_and_a_damaged_file_is_not_used(
    kind: noise_planning.Kind, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[int] = []
    real = noise_planning._fitted
    monkeypatch.setattr(noise_planning, "_fitted", lambda *given: fitted.append(1) or real(*given))
    first = optimised(kind, SUMS, 4)
    assert optimised(kind, SUMS, 4) is first
    (path,) = cache.glob("noise-*.json")

    noise_planning._MEMO.clear()
    assert optimised(kind, SUMS, 4) == first
    assert len(fitted) == 1

    noise_planning._MEMO.clear()
    path.write_text("{}")
    with pytest.warns(UserWarning, match="its content is not what was written"):
        assert optimised(kind, SUMS, 4) == first
    assert len(fitted) == 2


def test_optimised__every_fact_has_a_file_of_its_own(cache: Path) -> None:
    optimised("banded", SUMS, 4)
    optimised("banded", SUMS, 4, 2)
    optimised("banded", SUMS, 5, bands=4)
    optimised("banded", 2 * SUMS, 4)
    optimised("banded", SUMS[:30, :30], 4)
    assert len(list(cache.glob("noise-*.json"))) == 5


def test_workload__is_what_optimised_takes() -> None:
    assert optimised("banded", Workload(SUMS, linear=True).weights, 3)
