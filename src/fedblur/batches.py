"""All of a client's randomness in local training, as an index plan [steps, batch]: -1 is padding.

Each local epoch is reshuffled, and epochs follow each other until there are Q steps; the last batch of an epoch may
be smaller; a client with fewer samples than the batch size uses all of them in every step. A client's plan depends on
its own stream alone, so it is the same in whatever block or process the client runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedblur.data.population import Shard
from fedblur.rng import Rng


@dataclass(frozen=True)
class Work:
    """What a block of clients trains on: indices into a shard's samples, and a seed for dropout."""

    plan: Tensor  # [clients, steps, batch], -1 = padding
    samples: Tensor  # [clients, chunks, batch], every sample once, -1 = padding: for the full local gradient
    seeds: Tensor  # [clients], int64

    def __len__(self) -> int:
        return len(self.seeds)

    def to(self, device: torch.device) -> Work:
        return Work(self.plan.to(device), self.samples.to(device), self.seeds.to(device))


def plan_work(shard: Shard, ids: Tensor, steps: int, batch_size: int, rng: Rng) -> Work:
    """The work of these clients; `ids` name their random streams."""
    sizes = shard.sizes.tolist()
    width = max(1, min(batch_size, max(sizes, default=1)))
    chunks = max(1, -(-max(sizes, default=1) // width))
    streams = [rng.child("client", int(i)) for i in ids.tolist()]
    plans = [_plan(n, steps, width, stream.numpy()) for n, stream in zip(sizes, streams, strict=True)]
    plan = torch.from_numpy(np.stack(plans))
    samples = _every_sample(shard.sizes, chunks, width)
    starts = shard.starts[:, None, None]
    seeds = torch.tensor([stream.child("dropout").seed() & 0xFFFFFFFF for stream in streams], dtype=torch.int64)
    return Work(torch.where(plan >= 0, plan + starts, -1), torch.where(samples >= 0, samples + starts, -1), seeds)


def _plan(size: int, steps: int, width: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """[steps, width] positions within one client's samples."""
    plan = np.full((steps, width), -1, dtype=np.int64)
    per_epoch = -(-size // width)
    for first in range(0, steps if size else 0, max(per_epoch, 1)):
        epoch = np.full(per_epoch * width, -1, dtype=np.int64)
        epoch[:size] = rng.permutation(size)
        count = min(per_epoch, steps - first)
        plan[first : first + count] = epoch.reshape(per_epoch, width)[:count]
    return plan


def _every_sample(sizes: Tensor, chunks: int, width: int) -> Tensor:
    """[clients, chunks, width] positions 0..n-1, then -1."""
    position = torch.arange(chunks * width).view(1, chunks, width)
    return torch.where(position < sizes[:, None, None], position, -1)
