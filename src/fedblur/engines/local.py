"""One device: a block of clients at once under `vmap`, or one client after another in the calling thread.

Blocks are as large as memory allows: when it runs out, the block is halved and the work goes on. Where code is
compiled or traced, a block is filled up with empty clients, so that the code meets few different sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedblur.batches import plan_work
from fedblur.capturing import forget_recordings
from fedblur.client import Block, ClientJob, How, train_block
from fedblur.clipping import Bounded
from fedblur.data.population import Population, Shard
from fedblur.errors import ModelError
from fedblur.rng import Rng

EngineName = Literal["auto", "vectorised", "sequential"]
_SMALL = 50_000  # parameters


class LocalEngine:
    """Clients simulated on one device."""

    def __init__(
        self,
        population: Population,
        device: torch.device,
        vectorise: bool,
        block_size: int,
        how: How = "plain",
        sizes: tuple[int, ...] = (),
    ) -> None:
        self.population = population
        self.device = device
        self.vectorise = vectorise
        self.block_size = block_size
        self.how = how
        self.sizes = sizes

    def __repr__(self) -> str:
        kind = "vectorised" if self.vectorise else "sequential"
        made = "" if self.how == "plain" else f", {self.how}"
        return f"{kind}{made}, blocks of up to {self.block_size} clients on {self.device}"

    def map_clients(self, job: ClientJob, ids: Tensor, rng: Rng) -> Iterator[Block]:
        if not len(ids):
            return
        shard = self.population.fetch(ids)
        waiting = torch.argsort(shard.sizes, stable=True)  # clients of like size share a block: less padding
        cramped = False
        while len(waiting):
            chosen = waiting[: self.block_size]
            try:
                block = self._train(job, shard, ids, chosen, rng)
            except torch.OutOfMemoryError as error:
                if not self._made_room(len(chosen), cramped):
                    raise ModelError(
                        f"one client's local training does not fit into the memory of {self.device}: "
                        "use a smaller local.batch_size, a smaller model, or --device cpu"
                    ) from error
                cramped = True
                continue
            yield block
            cramped = False
            waiting = waiting[len(chosen) :]

    def _made_room(self, clients: int, cramped: bool) -> bool:
        """Recorded steps are let go first; where that did not help or there are none, the block is halved, down to one
        client. The same block records its steps again: to let those go again and again would never end."""
        if not forget_recordings() or cramped:
            if clients == 1:
                return False
            self.block_size = clients // 2
        torch.cuda.empty_cache()
        return True

    def _train(self, job: ClientJob, shard: Shard, ids: Tensor, chosen: Tensor, rng: Rng) -> Block:
        fill = self._filled(len(chosen)) - len(chosen)
        part = Shard(shard.x, shard.y, pad(shard.starts[chosen], (0, fill)), pad(shard.sizes[chosen], (0, fill)))
        names = pad(ids[chosen], (0, fill), value=-1)
        work = plan_work(part, names, job.local.steps, job.local.batch_size, rng, self.device)
        block = train_block(job, part, work, self.vectorise, self.how)
        return _first(block, len(chosen)) if fill else block

    def _filled(self, clients: int) -> int:
        if self.how == "traced":
            return clients + -clients % _grain(clients)
        return next((size for size in self.sizes if size >= clients), clients)


def _grain(clients: int) -> int:
    """Traced code is made for each size of a block: sizes are rounded up by 6 % at most, so that they come again."""
    return 1 << max(0, clients.bit_length() - 5)


def _first(block: Block, count: int) -> Block:
    """Without the empty clients that filled the block up."""
    bounded = Bounded(block.bounded.value[:count], block.bounded.l2_bound)
    return replace(block, bounded=bounded, trained_norms=block.trained_norms[:count], norms=block.norms[:count])


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
