"""All of a client's randomness in local training, as an index plan [steps, batch]: -1 is padding.

Each local epoch is reshuffled, and epochs follow each other until there are Q steps; the last batch of an epoch may
be smaller; a client with fewer samples than the batch size uses all of them in every step. A client's plan follows
from its own seed by integer hashing, for all clients at once and on any device: it is the same in whatever block,
process or machine the client runs.

A batch is as wide as the configuration says, never as wide as a block's largest client: floating point rounds
differently for other widths, so one client would change the last bits of all others (docs/isolation.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedblur.data.population import Shard
from fedblur.rng import Rng

_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Work:
    """What a block of clients trains on: indices into a shard's samples, and a seed for dropout."""

    plan: Tensor  # [clients, steps, batch], -1 = padding
    samples: Tensor  # [clients, chunks, batch], every sample once, -1 = padding: for the full local gradient
    seeds: Tensor  # [clients], int64

    def __len__(self) -> int:
        return len(self.seeds)

    def alone(self, client: int, size: int) -> Work:
        """Return one client's work without padding, for an engine that trains clients one by one.

        All shapes follow from the client's own number of samples.
        """
        batch = self.plan.shape[-1]
        width = max(1, min(batch, size))
        chunks = max(1, -(-size // batch))
        return Work(self.plan[client, :, :width], self.samples[client, :chunks, :width], self.seeds[client])


def plan_work(
    shard: Shard, ids: Tensor, steps: int, batch_size: int, rng: Rng, device: torch.device | None = None
) -> Work:
    """Return the work of these clients; `ids` name their random streams."""
    largest, width = int(shard.sizes.max()), batch_size
    smallest = int(torch.where(shard.sizes > 0, shard.sizes, largest).min())  # clients that only fill a block need none
    epochs = -(-steps // max(1, -(-smallest // width)))  # of the client that has the fewest batches in one
    seeds = torch.tensor(rng.seeds("client", ids.tolist()), dtype=torch.int64).to(device)
    sizes, starts = shard.sizes.to(device)[:, None, None], shard.starts.to(device)[:, None, None]
    shuffled = _shuffles(seeds, sizes, epochs, max(1, largest))
    plan = _in_batches(shuffled, sizes, steps, width)
    samples = _every_sample(sizes, max(1, -(-largest // width)), width)
    return Work(torch.where(plan >= 0, plan + starts, -1), torch.where(samples >= 0, samples + starts, -1), seeds)


def _shuffles(seeds: Tensor, sizes: Tensor, epochs: int, largest: int) -> Tensor:
    """[clients, epochs, largest] permutations of each client's positions 0..n-1, then whatever is beyond n."""
    epoch = torch.arange(epochs, device=seeds.device)[None, :, None]
    position = torch.arange(largest, device=seeds.device)[None, None, :]
    keys = _hash(_hash(seeds[:, None, None] + epoch) + position)
    return torch.sort(torch.where(position < sizes, keys, _LARGEST), dim=-1, stable=True).indices


def _in_batches(shuffled: Tensor, sizes: Tensor, steps: int, width: int) -> Tensor:
    """[clients, steps, width]: batch q of a client lies in epoch q // (batches in an epoch)."""
    step = torch.arange(steps, device=shuffled.device)[None, :, None]
    lane = torch.arange(width, device=shuffled.device)[None, None, :]
    per_epoch = ((sizes + width - 1) // width).clamp(min=1)
    slot = (step % per_epoch) * width + lane
    clients, epochs, largest = shuffled.shape
    place = (step // per_epoch).clamp(max=epochs - 1) * largest + slot.clamp(max=largest - 1)
    chosen = shuffled.view(clients, -1).gather(1, place.view(clients, -1)).view(clients, steps, width)
    return torch.where(slot < sizes, chosen, -1)


def _every_sample(sizes: Tensor, chunks: int, width: int) -> Tensor:
    """[clients, chunks, width] positions 0..n-1, then -1."""
    position = torch.arange(chunks * width, device=sizes.device).view(1, chunks, width)
    return torch.where(position < sizes, position, -1)


def _hash(value: Tensor) -> Tensor:
    """A 64-bit integer mixer (constants of splitmix64) that gives 63 bits; int64 products wrap on every device."""
    value = value + 0x1E3779B97F4A7C15
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return (value ^ ((value >> 31) & 0x1FFFFFFFF)) & _LARGEST
