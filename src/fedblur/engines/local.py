"""One device: a block of clients at once under `vmap`, or one client after another.

Which is faster depends on the model: dense models gain 20-fold from `vmap` on a CPU, convolutions lose
(PERFORMANCE.md of the project's notes: 0.06 against 1.5 times the plain loop), so convolutions on a CPU run in a loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedblur.batches import plan_work
from fedblur.client import Block, ClientJob, train_block
from fedblur.data.population import Population, Shard
from fedblur.rng import Rng

EngineName = Literal["auto", "vectorised", "sequential"]
_SMALL = 50_000  # parameters
_BLOCK_BYTES = 512 * 2**20  # weights, gradients and temporaries of a block


@dataclass(frozen=True)
class LocalEngine:
    """Clients simulated on one device."""

    population: Population
    device: torch.device
    vectorise: bool
    block_size: int

    def map_clients(self, job: ClientJob, ids: Tensor, rng: Rng) -> Iterator[Block]:
        if not len(ids):
            return
        shard = self.population.fetch(ids)
        order = torch.argsort(shard.sizes, stable=True)  # clients of like size share a block: less padding
        for chosen in torch.split(order, self.block_size):
            part = Shard(shard.x, shard.y, shard.starts[chosen], shard.sizes[chosen])
            work = plan_work(part, ids[chosen], job.local.steps, job.local.batch_size, rng)
            yield train_block(job, part, work.to(self.device), self.vectorise)


def choose_engine(
    population: Population, model: nn.Module, dimension: int, device: torch.device, name: EngineName = "auto"
) -> LocalEngine:
    """The engine that suits the model and the device, or the one that was asked for."""
    convolutional = any(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in model.modules())
    vectorise = name == "vectorised" or (name == "auto" and (device.type != "cpu" or not convolutional))
    block = max(1, min(1024, _BLOCK_BYTES // (dimension * 4 * 8)))  # 8 copies: Δ, θ, gradients, scores, masks
    return LocalEngine(population.to(device), device, vectorise, block if vectorise else min(block, 16))


@contextmanager
def suitable_threads(device: torch.device, dimension: int) -> Iterator[None]:
    """One intra-op thread for small models on a CPU.

    Threads that wait for each other on tiny tensors collapse as soon as another process is busy: 10 times slower.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if device.type == "cpu" and dimension < _SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
