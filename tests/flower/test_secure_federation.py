"""Rounds with a secure sum, in one process: what the server sees, dropouts at every question, aborted rounds."""

from __future__ import annotations

import base64
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message
from flwr.common.secure_aggregation.crypto.shamir import create_shares
from scipy import stats

from fedblur.core.errors import ConfigError
from fedblur.flower import masking, node_training, secure_sum_client, wire
from fedblur.flower.secure_sum_server import SecureRound
from fedblur.privacy.accounting import calibrate, epsilon
from fedblur.privacy.events import Gaussian
from fedblur.training.loop import Run
from tests.flower.world import (
    SECURE,
    LoopGrid,
    Lost,
    deployment,
    federated,
    kind_of,
    paid_rounds,
    simulated,
    weights,
)


class Losing:
    """Loses the replies of some nodes to some question of some rounds."""

    def __init__(self, **lost: tuple[int, ...]) -> None:
        self.lost = lost  # "masked2" = (101,): node 101 is gone from question "masked" of round 2 on, for that round
        self.gone: set[tuple[str, int]] = set()

    def __call__(self, question: Message, reply: Message) -> Message:
        round_, node = question.metadata.group_id, question.metadata.dst_node_id
        if node in self.lost.get(f"{kind_of(question)}{round_}", ()):
            self.gone.add((round_, node))
        if (round_, node) in self.gone:
            raise Lost
        return reply


def run_with(tmp_path: Path, meddle=None, clients: int = 4, **changes) -> tuple[Run, LoopGrid]:
    task = deployment(tmp_path, clients, **({"mechanism": SECURE} | changes))
    grid = LoopGrid(task, clients, "secure-sum", meddle)
    return federated(task, grid, tmp_path / "run", "secure-sum", deadline=0.3), grid


# --- the sum ---


def test_secure_sum__is_the_simulators_bit_for_bit(tmp_path: Path) -> None:
    """Masks cancel exactly: the sum is the plain sum of what clients would have sent."""
    run, grid = run_with(tmp_path)
    plain = simulated(deployment(tmp_path, 4, mechanism=SECURE), tmp_path / "plain")
    assert torch.equal(weights(run), weights(plain))
    assert [row["accuracy"] for row in run.rounds] == [row["accuracy"] for row in plain.rounds]
    assert run.summary["privacy"]["releases"] == 3
    assert Counter(map(kind_of, grid.asked)) == dict.fromkeys(("keys", "shares", "masked", "unmask"), 12)


def test_server_view__holds_no_unmasked_update(tmp_path: Path) -> None:
    """All that the server receives, in a round with a dropout: uniform vectors, and too few shares to open one."""
    truth: dict[int, np.ndarray] = {}
    run, grid = run_with(tmp_path, Losing(masked1=(103,)), rounds=1, model={"name": "mlp"})
    vectors = [reply for reply in grid.received if "masked" in reply.content.array_records[wire.ARRAYS]]
    assert len(vectors) == 3
    for reply in vectors:
        data = reply.content.array_records[wire.ARRAYS]["masked"].data
        truth[reply.metadata.src_node_id] = masking.unpack(data, SECURE["bits"])
    for node, vector in truth.items():  # as uniform as anything can be, and unlike each other
        assert stats.kstest(vector / 2 ** SECURE["bits"], "uniform").pvalue > 1e-4, node
    pairs = np.corrcoef(np.stack(list(truth.values())).astype(float))
    assert np.abs(pairs - np.eye(3)).max() < 5 / math.sqrt(len(vector))
    kinds = [set(reply.content.config_records[wire.HEAD]) for reply in grid.received]
    assert set().union(*kinds) == {"round", "nonce", "mask", "seal", "sealed", "commitment", "seeds", "keys"}
    unmasking = [
        r.content.config_records[wire.HEAD] for r in grid.received if "seeds" in r.content.config_records[wire.HEAD]
    ]
    assert [(len(said["seeds"]), len(said["keys"])) for said in unmasking] == [(3, 1)] * 3  # either, never both
    assert "aborted" not in run.rounds[0]["local_only"]


def test_secure_sum__a_private_run_is_as_accurate_as_the_simulators_seeds(tmp_path: Path) -> None:
    changes = {"rounds": 12, "noise_multiplier": 0.3, "eval_every": 12, "mechanism": SECURE}
    spread = []
    for seed in range(5):
        (tmp_path / f"s{seed}").mkdir()
        spread.append(
            simulated(deployment(tmp_path / f"s{seed}", 4, seed=seed, **changes), tmp_path / f"p{seed}").accuracy
        )
    run, _ = run_with(tmp_path, seed=None, **changes)
    assert run.summary["privacy"]["warning"] is None
    assert abs(run.accuracy - np.mean(spread)) < 4 * np.std(spread, ddof=1) + 0.01
    assert run.accuracy > 0.4


# --- dropouts ---


class Spy:
    """What nodes put into the sum, and what the server got out of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: dict[tuple[int, int], np.ndarray] = {}
        self.got: dict[int, np.ndarray] = {}
        noisy, total = node_training.noisy, SecureRound.total

        def spied_noisy(task, node, node_id, round_, told, arrays, number):
            vector, bits = noisy(task, node, node_id, round_, told, arrays, number)
            self.given[round_, number] = vector.copy()
            return vector, bits

        def spied_total(this, sampled):
            result = total(this, sampled)
            self.got[this.round_] = result[0].copy()
            return result

        monkeypatch.setattr(node_training, "noisy", spied_noisy)
        monkeypatch.setattr(SecureRound, "total", spied_total)


@pytest.mark.parametrize(
    ("question", "inside"), [("keys", False), ("shares", False), ("masked", False), ("unmask", True), ("none", True)]
)
def test_dropout__the_sum_is_exactly_that_of_the_survivors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: str, inside: bool
) -> None:
    """Node 100 + t is lost at some question of round t. Who is lost after its vector came is still in the sum."""
    spy = Spy(monkeypatch)
    run, _ = run_with(tmp_path, Losing(**{f"{question}{t}": (100 + t,) for t in (1, 2, 3)}))
    assert all("aborted" not in row["local_only"] for row in run.rounds)
    assert run.summary["privacy"]["releases"] == 3
    for t in (1, 2, 3):
        members = [number for number in range(4) if inside or number != t]
        plain = sum(spy.given[t, number].astype(np.int64) for number in members) % 2 ** SECURE["bits"]
        assert np.array_equal(spy.got[t], plain)


@pytest.mark.parametrize("question", ["keys", "shares", "masked"])
def test_dropout__too_few_survivors_abort_before_anything_is_unmasked(tmp_path: Path, question: str) -> None:
    lost = {f"{question}{t}": (100, 101) for t in (1, 3)}
    run, grid = run_with(tmp_path, Losing(**lost), clients=4, rounds=3)
    assert ["aborted" in row["local_only"] for row in run.rounds] == [True, False, True]
    asked = [(message.metadata.group_id, kind_of(message)) for message in grid.asked]
    assert not {("1", "unmask"), ("3", "unmask")} & set(asked)
    assert ("2", "unmask") in asked
    assert run.rounds[0]["accuracy"] == pytest.approx(run_start_accuracy(tmp_path), abs=1e-12)  # not applied
    assert paid_rounds(tmp_path / "run") == [1, 2, 3]  # accounted conservatively: as if released
    assert run.summary["privacy"]["releases"] == 3


def run_start_accuracy(tmp_path: Path) -> float:
    """Of the untrained model."""
    from fedblur.training.checkpoint import load_newest

    assert load_newest(tmp_path / "run/checkpoints")[0].round == 3
    folder = tmp_path / "idle"
    folder.mkdir()
    lost = Losing(keys1=(100, 101, 102, 103))
    return run_with(folder, lost, rounds=1)[0].rounds[0]["accuracy"]


@pytest.mark.parametrize(("lost", "survivors"), [((), 4), ((103,), 3)])
def test_dropout__no_noise_shortfall(tmp_path: Path, lost: tuple[int, ...], survivors: int) -> None:
    """Shares are sized for 3 nodes: three survivors carry the planned noise exactly, four carry more."""
    idle = {"steps": 1, "batch_size": 60, "learning_rate": 1e-12}
    run, _ = run_with(
        tmp_path, Losing(masked1=lost), rounds=1, local=idle, model={"name": "mlp"}, seed=8, noise_multiplier=1.0
    )
    start = run_with_nothing(tmp_path, idle)
    sums = 4 * (weights(run) - start).double()  # the server divides by pN = 4
    assert float(sums.std()) == pytest.approx(1.0 * 0.5 * math.sqrt(survivors / 3), rel=0.05)


def run_with_nothing(tmp_path: Path, idle: dict[str, float]) -> torch.Tensor:
    folder = tmp_path / "nothing"
    folder.mkdir()
    lost = Losing(keys1=(100, 101, 102, 103))
    changes = {"rounds": 1, "local": idle, "model": {"name": "mlp"}, "seed": 8, "noise_multiplier": 1.0}
    return weights(run_with(folder, lost, **changes)[0])


def test_poisson__a_small_cohort_aborts_without_asking_anyone(tmp_path: Path) -> None:
    run, grid = run_with(tmp_path, sample_rate=0.5, rounds=8, seed=2)
    plain = simulated(deployment(tmp_path, 4, mechanism=SECURE, sample_rate=0.5, rounds=8, seed=2), tmp_path / "plain")
    aborted = [row["round"] for row in run.rounds if "aborted" in row["local_only"]]
    assert 0 < len(aborted) < 8
    assert aborted == [row["round"] for row in plain.rounds if "aborted" in row["local_only"]]
    assert not {str(t) for t in aborted} & {message.metadata.group_id for message in grid.asked}
    assert torch.equal(weights(run), weights(plain))
    assert run.summary["privacy"]["releases"] == plain.summary["privacy"]["releases"] == 8


# --- hostile members ---


def test_hostile__a_bad_share_spoils_nothing_for_the_others(tmp_path: Path) -> None:
    def lie(question: Message, reply: Message) -> Message:
        if kind_of(question) == "unmask" and question.metadata.dst_node_id == 101:
            head = reply.content.config_records[wire.HEAD]
            head["seeds"] = [share[:-1] + bytes([share[-1] ^ 1]) for share in head["seeds"]]
        return reply

    run, _ = run_with(tmp_path, lie)
    assert torch.equal(weights(run), weights(simulated(deployment(tmp_path, 4, mechanism=SECURE), tmp_path / "p")))


def test_hostile__a_key_that_cannot_be_read_aborts_the_round_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 101 deals shares of a key on a curve that nobody knows, and is gone when its key is needed."""
    der = bytes.fromhex("3041020100301306072a8648ce3d020106082a8648ce3d03017f042730250201010420" + "11" * 32)
    strange = b"-----BEGIN PRIVATE KEY-----\n" + base64.encodebytes(der) + b"-----END PRIVATE KEY-----\n"
    create, deal = secure_sum_client.create_shares, secure_sum_client.Member.deal

    def hostile_deal(this, number, *told):
        hostile = number == 1
        monkeypatch.setattr(
            secure_sum_client,
            "create_shares",
            lambda secret, *rest: create(strange if hostile and b"PRIVATE" in secret else secret, *rest),
        )
        return deal(this, number, *told)

    monkeypatch.setattr(secure_sum_client.Member, "deal", hostile_deal)
    run, _ = run_with(tmp_path, Losing(masked1=(101,)), clients=5, rounds=2)
    assert ["aborted" in row["local_only"] for row in run.rounds] == [True, False]
    assert paid_rounds(tmp_path / "run") == [1, 2]


@pytest.mark.parametrize("bad", [0, 14])
def test_hostile__a_bad_share_is_left_out_wherever_it_stands(bad: int) -> None:
    """With 13 nodes or more, the first 200 groups in order all hold the first share."""
    seed = bytes(range(32))
    shares = create_shares(seed, masking.threshold(15), 15)
    shares[bad] = shares[bad][:-1] + bytes([shares[bad][-1] ^ 1])
    round_ = SecureRound(1, 1, 16, 8, 3, lambda kind, told: {}, lambda: None, members=list(range(15)))
    assert round_._secret(shares, lambda secret: secret == seed) == seed


def test_hostile__a_key_that_is_none_is_left_out(tmp_path: Path) -> None:
    def lie(question: Message, reply: Message) -> Message:
        if kind_of(question) == "keys" and question.metadata.dst_node_id == 101:
            reply.content.config_records[wire.HEAD]["mask"] = b"-----BEGIN PUBLIC KEY-----\nnonsense"
        return reply

    run, grid = run_with(tmp_path, lie)
    assert all("aborted" not in row["local_only"] for row in run.rounds)
    assert 101 not in {m.metadata.dst_node_id for m in grid.asked if kind_of(m) == "shares"}


# --- what is refused at the start ---


def test_trust__secure_sum_needs_shares_sized_for_a_smallest_cohort(tmp_path: Path) -> None:
    task = deployment(tmp_path, 4)
    with pytest.raises(ConfigError, match="min_cohort"):
        federated(task, LoopGrid(task, 4, "secure-sum"), tmp_path / "run", "secure-sum")
    assert not (tmp_path / "run").exists()


def test_trust__the_statement_says_on_whom_the_noise_depends(tmp_path: Path) -> None:
    """A node that adds no noise is not noticed, so whoever reads epsilon must know that it counts on m that do."""
    words = run_with(tmp_path, rounds=1)[0].summary["privacy"]["trust_model"]
    assert "at least 3 survivors of each round really add theirs" in words
    assert "(survivors - 1)/3 of the variance" in words


@pytest.mark.parametrize(("least", "silent", "real"), [(3, 1, "10.4"), (3, 2, "16.6"), (10, 1, "8.6")])
def test_trust__figures_of_the_guide_on_nodes_that_add_no_noise(least: int, silent: int, real: str) -> None:
    noise = calibrate(Gaussian, 3, 8.0, 1e-3, "rdp")
    left = Gaussian(noise * math.sqrt((least - silent) / least))
    assert f"{epsilon(left, 3, 1e-3, 'rdp'):.1f}" == real
    assert real in (Path(__file__).parents[2] / "docs/deploy.md").read_text()


def test_trust__central_refuses_shares_of_clients(tmp_path: Path) -> None:
    task = deployment(tmp_path, 4, mechanism=SECURE)
    with pytest.raises(ConfigError, match="central"):
        federated(task, LoopGrid(task, 4, "central"), tmp_path / "run", "central")


def test_trust__a_private_run_shuffles_numbers_so_that_nodes_cannot_follow_each_other(tmp_path: Path) -> None:
    run, grid = run_with(tmp_path, seed=None, clients=8, rounds=6)
    numbers = [
        m.content.config_records[wire.HEAD]["number"]
        for m in grid.asked
        if m.metadata.dst_node_id == 100 and kind_of(m) == "shares"
    ]
    assert len(numbers) == 6
    assert len(set(numbers)) > 1
    assert run.summary["privacy"]["warning"] is None
    assert run.summary["privacy"]["epsilon_against_server"] >= run.summary["privacy"]["epsilon"]


def test_ledger__is_written_before_the_sum_is_unmasked(tmp_path: Path) -> None:
    """A curious server sees the sum from `unmask` on: a crash in between must have counted it."""

    class Crash(BaseException):
        pass

    def crash(question: Message, reply: Message) -> Message:
        if kind_of(question) == "unmask":
            raise Crash
        return reply

    with pytest.raises(Crash):
        run_with(tmp_path, crash)
    assert paid_rounds(tmp_path / "run") == [1]
