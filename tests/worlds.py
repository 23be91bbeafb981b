"""Small worlds that tests share: packed clients, jobs, engines."""

from __future__ import annotations

import torch
from torch import nn

from fedblur.batches import Work, plan_work
from fedblur.client import ClientJob
from fedblur.config import LocalTraining
from fedblur.data.population import Packed, Shard
from fedblur.functional import Layout, as_function, initial_vector
from fedblur.methods import Method
from fedblur.rng import Seeded

CPU = torch.device("cpu")


def packed(sizes: list[int], shape: tuple[int, ...] = (1, 8, 8), classes: int = 10, seed: int = 0) -> Packed:
    """Random clients of these sizes; each has its own pattern per class, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    y = torch.randint(0, classes, (total,), generator=generator)
    patterns = torch.randn(classes, *shape, generator=generator)
    x = patterns[y] + 0.5 * torch.randn(total, *shape, generator=generator)
    counts = torch.tensor(sizes)
    return Packed(x, y, torch.cumsum(counts, 0) - counts, counts, classes)


def job_for(
    module: nn.Module,
    methods: tuple[Method, ...] = (),
    clip_norm: float = 0.5,
    local: LocalTraining | None = None,
) -> ClientJob:
    layout = Layout.of(module)
    local = local or LocalTraining(steps=6, batch_size=8, learning_rate=0.1)
    start = layout.unflatten(initial_vector(module))
    return ClientJob(as_function(module.train()), layout, start, local, methods, clip_norm)


def work_for(job: ClientJob, population: Packed, ids: list[int], seed: int = 0) -> tuple[Shard, Work]:
    chosen = torch.tensor(ids)
    shard = population.fetch(chosen)
    return shard, plan_work(shard, chosen, job.local.steps, job.local.batch_size, Seeded.root(seed))


class SmallCnn(nn.Module):
    """A convolution, GroupNorm and dropout: everything that could behave differently under vmap."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)  # a bias before a norm has scores of pure rounding
        self.norm = nn.GroupNorm(2, 4)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(4 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.max_pool2d(x, 2)
        return self.head(self.drop(x.flatten(1)))
