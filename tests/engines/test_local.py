"""Blocks that are filled up for compiled code: the same updates, and few sizes."""

import torch

from fedblur.config import LocalTraining
from fedblur.engines import LocalEngine
from fedblur.engines.choice import block_sizes
from fedblur.rng import Seeded
from tests.worlds import SmallCnn, job_for, packed


def test_blocks__filling_up_changes_no_update() -> None:
    job, population = job_for(SmallCnn(), local=LocalTraining(steps=2, batch_size=4)), packed([3, 5, 8])
    ids, rng = torch.arange(3), Seeded.root(0)
    plain, filled = (
        list(LocalEngine(population, torch.device("cpu"), True, 16, False, sizes).map_clients(job, ids, rng))
        for sizes in ((), (2, 8))
    )
    assert [len(block.bounded.value) for block in filled] == [3]
    torch.testing.assert_close(filled[0].bounded.value, plain[0].bounded.value)


def test_block_sizes__cover_nearly_all_poisson_cohorts_with_two() -> None:
    small, large = block_sizes(2048, 136.0)
    assert (small, large) == (152, 184)
    assert block_sizes(100, 136.0) == (100,)  # memory allows no more: all blocks but the last are full
