"""Batches: a client's randomness as an index plan [steps, batch], and the samples that each step reads by it.

In a plan -1 is padding. A step reads 0 there, so no other client's sample is seen.

Each local epoch is reshuffled, and epochs follow each other until there are Q steps; the last batch of an epoch may
be smaller; a client with fewer samples than the batch size uses all of them in every step. A client's plan follows
from its own seed by integer hashing, for all clients at once and on any device: it is the same in whatever block,
process or machine the client runs.

A batch is as wide as the configuration says, never as wide as a block's largest client: floating point rounds
differently for other widths, so one client would change the last bits of all others (docs/isolation.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedblur.core.rng import Rng
from fedblur.data.population import Inputs, Shard, tensors_of

_LARGEST = 2**63 - 1
_CACHED = 2**19  # bytes of samples that are read for several steps at once; more would leave a core's cache


@dataclass(frozen=True)
class Work:
    """The samples that a block of clients trains on: indices into a shard's samples, and a seed for dropout."""

    plan: Tensor  # [clients, steps, batch], -1 = padding
    samples: Tensor  # [clients, chunks, batch], every sample once, -1 = padding: for the full local gradient
    seeds: Tensor  # [clients], int64
    personal: Tensor | None = None  # [clients, k], what stays on each client (`personal.py`); None: nothing does

    def __len__(self) -> int:
        return len(self.seeds)

    def alone(self, client: int, size: int) -> Work:
        """Return one client's work without padding, for an engine that trains clients one by one.

        All shapes follow from the client's own number of samples.
        """
        batch = self.plan.shape[-1]
        width = max(1, min(batch, size))
        chunks = max(1, -(-size // batch))
        own = None if self.personal is None else self.personal[client]
        return Work(self.plan[client, :, :width], self.samples[client, :chunks, :width], self.seeds[client], own)


def plan_work(
    shard: Shard, ids: Tensor, steps: int, batch_size: int, rng: Rng, device: torch.device | None = None
) -> Work:
    """Return the work of these clients; `ids` name their random streams."""
    known, width = shard.sizes, batch_size
    smallest, largest = _smallest_and_largest(known)
    seeds = torch.tensor(rng.seeds("client", ids.tolist()), dtype=torch.int64).to(device)
    sizes, starts = known.to(device)[:, None, None], shard.starts.to(device)[:, None, None]
    # Groups of clients whose sizes differ at most twofold: a huge one must not widen the others' shuffles. Clients that
    # only fill a block need no shuffle: they join the smallest ones, or a group of their own would double the work.
    if math.frexp(smallest)[1] == math.frexp(largest)[1]:
        plan = _plan_alike(seeds, sizes, steps, width, smallest, largest)
    else:
        scale = torch.frexp(torch.where(known > 0, known, smallest).double()).exponent.cpu()
        plan = torch.empty(len(seeds), steps, width, dtype=torch.int64, device=seeds.device)
        for each in torch.unique(scale):
            members = torch.nonzero(scale == each).flatten()
            here, bounds = members.to(seeds.device), _smallest_and_largest(known[members.to(known.device)])
            plan[here] = _plan_alike(seeds[here], sizes[here], steps, width, *bounds)
    chunks = max(1, -(-largest // width))
    position = torch.arange(chunks * width, device=sizes.device).view(1, chunks, width)
    samples = torch.where(position < sizes, position, -1)
    return Work(torch.where(plan >= 0, plan + starts, -1), torch.where(samples >= 0, samples + starts, -1), seeds)


def _smallest_and_largest(sizes: Tensor) -> tuple[int, int]:
    """Return the sizes of the smallest client that has samples and of the largest one; 1 where none has any."""
    largest = int(sizes.max())
    return max(1, int(torch.where(sizes > 0, sizes, largest).min())), max(1, largest)


def _plan_alike(seeds: Tensor, sizes: Tensor, steps: int, width: int, smallest: int, largest: int) -> Tensor:
    """Return the plans [clients, steps, width] of clients of like size."""
    epochs = -(-steps // -(-smallest // width))  # of the client that has the fewest batches in one
    shuffled = _shuffles(seeds, sizes, epochs, largest)
    # Batch q of a client lies in epoch q // (batches in an epoch).
    step = torch.arange(steps, device=shuffled.device)[None, :, None]
    lane = torch.arange(width, device=shuffled.device)[None, None, :]
    per_epoch = ((sizes + width - 1) // width).clamp(min=1)
    slot = (step % per_epoch) * width + lane
    clients, epochs, largest = shuffled.shape
    place = (step // per_epoch).clamp(max=epochs - 1) * largest + slot.clamp(max=largest - 1)
    chosen = shuffled.view(clients, -1).gather(1, place.view(clients, -1)).view(clients, steps, width)
    return torch.where(slot < sizes, chosen, -1)


def _shuffles(seeds: Tensor, sizes: Tensor, epochs: int, largest: int) -> Tensor:
    """Draw [clients, epochs, largest]: permutations of each client's positions 0..n-1, then whatever is beyond n."""
    epoch = torch.arange(epochs, device=seeds.device)[None, :, None]
    position = torch.arange(largest, device=seeds.device)[None, None, :]
    keys = _hash(_hash(seeds[:, None, None] + epoch) + position)
    return torch.sort(torch.where(position < sizes, keys, _LARGEST), dim=-1, stable=True).indices


def _hash(value: Tensor) -> Tensor:
    """Mix 64-bit integers (constants of splitmix64) to 63 bits; int64 products wrap on every device."""
    value = value + 0x1E3779B97F4A7C15
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return (value ^ ((value >> 31) & 0x1FFFFFFFF)) & _LARGEST


class Batch(NamedTuple):
    """The input of a step: of one client, or with a leading dimension of clients."""

    inputs: Inputs  # [batch, *shape] as they are stored, 0 at padding: no other client's sample is read
    labels: Tensor  # [batch, *target], 0 at padding
    weights: Tensor  # [batch] of each sample's loss, 0 at padding
    rate: Tensor  # [] η, or 0 where all is padding
    descent: Tensor  # [batch] −η·weight


def read_batches(x: Inputs, y: Tensor, plan: Tensor, rate: float | None = None) -> Iterator[Batch]:
    """Yield the batches of a plan [..., steps, batch]. With a rate losses are averaged, else summed."""
    plan = plan.movedim(-2, 0).contiguous()  # steps first: what one step reads lies together
    valid, safe = plan >= 0, plan.clamp(min=0)
    labels = y.index_select(0, safe.flatten()).view(*safe.shape, *y.shape[1:])
    padded = plan.device.type != "cpu" or not bool(valid.all())  # asking a GPU would stop it
    if padded:
        labels = torch.where(valid.view(*valid.shape, *[1] * (y.dim() - 1)), labels, 0)
    weights = valid.float() if rate is None else valid / valid.sum(-1, keepdim=True).clamp(min=1)
    rates = (rate or 0.0) * valid.any(-1).float()
    descents = -(rate or 0.0) * weights
    at_once = 1
    if plan.device.type == "cpu":
        width = sum(x[0].numel() * x.element_size() for x in tensors_of(x))
        at_once = max(1, _CACHED // (plan[0].numel() * width))
    for first in range(0, len(plan), at_once):
        index, there = safe[first : first + at_once], valid[first : first + at_once] if padded else None
        if isinstance(x, Tensor):
            inputs = _read(x, index, there)
            for q in range(first, first + len(index)):
                yield Batch(inputs[q - first], labels[q], weights[q], rates[q], descents[q])
            continue
        several = {name: _read(tensor, index, there) for name, tensor in x.items()}
        for q in range(first, first + len(index)):
            at = {name: tensor[q - first] for name, tensor in several.items()}
            yield Batch(at, labels[q], weights[q], rates[q], descents[q])


def _read(x: Tensor, index: Tensor, there: Tensor | None) -> Tensor:
    """Read samples [*index, *shape], zeros where none is there; None: all are."""
    inputs = x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])
    if there is None:
        return inputs
    there = there.view(-1, 1)
    rows = inputs.view(len(there), -1)
    if rows.shape[1] * rows.element_size() % 8 == 0:  # eight bytes at a time, as a GPU is slow on single ones
        return (rows.view(torch.int64) * there).view(inputs.dtype).view(inputs.shape)
    return torch.where(there, rows, 0).view(inputs.shape)
