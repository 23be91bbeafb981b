"""Blocks: filled up for compiled code, which changes no update; halved where memory runs out, which loses no client."""

from typing import Any

import pytest
import torch

from fedblur.core.config import LocalTraining
from fedblur.core.errors import ModelError
from fedblur.core.rng import Seeded
from fedblur.engines import LocalEngine, local
from fedblur.engines.choice import even_blocks
from fedblur.engines.isolation_check import clients_interfere
from tests.worlds import SmallCnn, job_for, packed


def test_blocks__are_always_full_of_one_shape_and_empty_clients_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    job, population = job_for(SmallCnn(), local=LocalTraining(steps=2, batch_size=4)), packed([3, 5, 8])
    ids, rng, shapes = torch.arange(3), Seeded.root(0), []
    train = local.train_block

    def seen(job: Any, shard: Any, work: Any, *how: Any) -> Any:
        shapes.append(work.plan.shape)
        return train(job, shard, work, *how)

    monkeypatch.setattr(local, "train_block", seen)
    rows = []
    for size in (2, 3, 16):
        blocks = LocalEngine(population, torch.device("cpu"), True, size).map_clients(job, ids, rng)
        rows.append(torch.cat([block.bounded.value for block in blocks]))
    assert shapes == [(2, 2, 4), (2, 2, 4), (3, 2, 4), (16, 2, 4)]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


@pytest.mark.parametrize(
    ("largest", "cohort", "spread", "grain", "block"),
    [
        (182, 300.0, 16.0, 8, 168),
        (182, 136.0, 11.4, 8, 160),
        (256, 100.0, 0.0, 32, 128),
        (256, 4.0, 0.0, 32, 32),
        (256, 300.0, 0.0, 32, 160),
        (7, 0.2, 0.0, 8, 1),
        (7, 12.0, 0.0, 8, 6),
        (3, 100.0, 9.0, 32, 3),
    ],
)
def test_even_blocks__share_a_cohort_out_within_memory(largest, cohort, spread, grain, block) -> None:
    assert even_blocks(largest, cohort, spread, grain) == block


def short_of_memory(monkeypatch: pytest.MonkeyPatch, room: int, recorded: bool) -> list[int]:
    """A device that holds so few clients at once; `recorded`: every attempt leaves recordings that can be let go."""
    tried: list[int] = []
    train = local.train_block

    def cramped(job: Any, shard: Any, work: Any, *how: Any) -> Any:
        tried.append(len(work.seeds))
        if len(tried) > 50:
            raise AssertionError("it would go on for ever")
        if len(work.seeds) > room:
            raise torch.OutOfMemoryError
        return train(job, shard, work, *how)

    monkeypatch.setattr(local, "train_block", cramped)
    monkeypatch.setattr(local, "forget_recordings", lambda: recorded)
    return tried


@pytest.mark.parametrize("recorded", [False, True])
def test_blocks__are_halved_where_memory_runs_out_and_every_client_counts_once(
    monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    job, population = job_for(SmallCnn(), local=LocalTraining(steps=2, batch_size=4)), packed([4] * 11)
    ids, rng = torch.arange(11), Seeded.root(0)
    (plain,) = LocalEngine(population, torch.device("cpu"), True, 16).map_clients(job, ids, rng)
    tried = short_of_memory(monkeypatch, 3, recorded)
    engine = LocalEngine(population, torch.device("cpu"), True, 16)
    blocks = list(engine.map_clients(job, ids, rng))
    torch.testing.assert_close(torch.cat([block.bounded.value for block in blocks]), plain.bounded.value)
    assert [len(block.bounded.value) for block in blocks] == [2, 2, 2, 2, 2, 1]
    # recordings are let go once, then the block is halved; it is full of empty clients to begin with, and at the end
    assert tried == ([16] if recorded else []) + [16, 8, 4, 2, 2, 2, 2, 2, 2]
    assert engine.block_size == 2


def test_blocks__a_device_without_room_for_one_client_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(SmallCnn(), local=LocalTraining(steps=1, batch_size=4))
    short_of_memory(monkeypatch, 0, recorded=True)
    engine = LocalEngine(packed([4] * 3), torch.device("cpu"), True, 16)
    with pytest.raises(ModelError, match="does not fit into the memory of cpu: use a smaller local.batch_size"):
        list(engine.map_clients(job, torch.arange(3), Seeded.root(0)))


def test_blocks__a_private_run_does_not_change_their_size_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    job, population = job_for(SmallCnn(), local=LocalTraining(steps=1, batch_size=4)), packed([4] * 3)
    short_of_memory(monkeypatch, 3, recorded=False)
    engine = LocalEngine(population, torch.device("cpu"), True, 16)
    engine.fixed = True
    with pytest.raises(ModelError, match="ran out in a round; a private run keeps the size of its blocks"):
        list(engine.map_clients(job, torch.arange(3), Seeded.root(0)))
    assert engine.block_size == 16


def test_blocks__the_check_before_a_private_run_finds_a_size_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    job, population = job_for(SmallCnn(), local=LocalTraining(steps=1, batch_size=4)), packed([4] * 3)
    tried = short_of_memory(monkeypatch, 7, recorded=False)
    engine = LocalEngine(population, torch.device("cpu"), True, 16)
    clients_interfere(engine, job, packed([1]).samples(), 10)
    assert engine.block_size == 4
    assert tried[:3] == [16, 8, 4]
