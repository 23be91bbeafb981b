"""Index plans: every sample once an epoch, reshuffled, the same wherever a client runs."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedblur.core.rng import Seeded
from fedblur.data.population import Shard
from fedblur.learning import batches
from fedblur.learning.batches import plan_work


def work(sizes: list[int], steps: int, batch: int, ids: list[int] | None = None):
    counts = torch.tensor(sizes)
    shard = Shard(torch.empty(0), torch.empty(0), torch.cumsum(counts, 0) - counts, counts)
    return shard, plan_work(shard, torch.tensor(ids or range(len(sizes))), steps, batch, Seeded.root(0))


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6), steps=st.integers(1, 25), batch=st.integers(1, 16))
@settings(max_examples=100, deadline=None)
def test_plan__epochs_cover_every_sample_once(sizes: list[int], steps: int, batch: int) -> None:
    shard, planned = work(sizes, steps, batch)
    width = planned.plan.shape[-1]
    for i, size in enumerate(sizes):
        start, per_epoch = int(shard.starts[i]), -(-size // width)
        mine = range(start, start + size)
        for first in range(0, steps, per_epoch):
            seen = [v for v in planned.plan[i, first : first + per_epoch].flatten().tolist() if v >= 0]
            assert len(seen) == len(set(seen))
            assert set(seen) <= set(mine)
            if first + per_epoch <= steps:
                assert sorted(seen) == [*mine]
        assert sorted(v for v in planned.samples[i].flatten().tolist() if v >= 0) == [*mine]


def test_plan__is_reshuffled_each_epoch_and_differs_between_clients() -> None:
    _, planned = work([32, 32], 6, 32)
    epochs = {tuple(row.tolist()) for row in planned.plan[0]}
    assert len(epochs) == 6
    assert not torch.equal(planned.plan[0, 0], planned.plan[1, 0] - 32)


def test_plan__does_not_depend_on_the_block() -> None:
    _, together = work([5, 9, 20], 7, 4, ids=[3, 8, 11])
    _, alone = work([9], 7, 4, ids=[8])
    width = alone.plan.shape[-1]
    assert torch.equal(together.plan[1, :, :width] - torch.where(together.plan[1, :, :width] >= 0, 5, 0), alone.plan[0])
    assert together.seeds[1] == alone.seeds[0]


def test_plan__small_clients_use_all_their_samples_in_every_step() -> None:
    _, planned = work([3, 10], 5, 10)
    assert [sorted(v for v in row.tolist() if v >= 0) for row in planned.plan[0]] == [[0, 1, 2]] * 5


def test_plan__a_client_without_samples_is_all_padding() -> None:
    _, planned = work([0, 4], 3, 2)
    assert bool((planned.plan[0] == -1).all())


def test_plan__positions_are_uniform() -> None:
    """Over many clients each sample comes first about equally often."""
    _, planned = work([8] * 4000, 1, 8)
    first = planned.plan[:, 0, 0] - torch.arange(4000) * 8
    counts = torch.bincount(first, minlength=8).double()
    assert float(((counts - 500) ** 2 / 500).sum()) < 24.3  # chi-square, 7 degrees of freedom, p = 0.001


def test_plan__a_huge_client_does_not_make_its_neighbours_plans_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shuffles are of clients of like size: memory follows from all samples, not from clients × the largest × steps."""
    made: list[int] = []
    shuffles = batches._shuffles

    def counted(*given: Any) -> torch.Tensor:
        made.append(shuffles(*given).numel())
        return shuffles(*given)

    monkeypatch.setattr(batches, "_shuffles", counted)
    _, planned = work([1] * 63 + [20_000], 30, 32)
    assert sum(made) <= 2 * (63 * 30 + 20_000)
    alone = work([20_000], 30, 32, ids=[63])[1]
    assert torch.equal(planned.plan[63] - 63, alone.plan[0])
