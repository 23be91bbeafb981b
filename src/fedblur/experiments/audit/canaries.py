"""Canary clients (Andrew et al. 2023): each sends, whenever it is sampled, an update in a direction of its own.

In: a run's engine. Out: an engine that maps canaries as well. A canary is a client like any other, except for its data:
it is sampled with the population, counts in N, its update goes through the same bounding as everyone's (`clip_block`)
and then into the same sum. It replaces what training and the methods' shaping would have given: no method can be
relied on by the guarantee, so the canary sends what the worst client would, a vector far outside the clipping ball. The
clip brings it to S·u; with a public mask, to S times the part of u on the support.

Directions are uniform on the sphere. Each is made from its own seed, so m·d numbers need not be kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedblur.core.rng import Rng, Seeded
from fedblur.engines import Engine
from fedblur.learning.client import Block, ClientJob, Trained, clip_block

LOUDNESS = 10.0  # norm of a canary's update in units of S: a clip that lets anything through is seen
_KEPT = 2**28  # directions of up to so many numbers are kept (1 GiB; on a GPU a quarter of what is free)
_AT_ONCE = 2**25  # numbers in flight


@dataclass(frozen=True)
class Directions:
    """Unit vectors, known to the auditor only."""

    seed: int
    count: int
    dimension: int  # d
    device: torch.device

    def rows(self, ids: list[int]) -> Tensor:
        """Return the canaries' rows: [ids, d]."""
        if self._kept is None:
            return self._made(ids)
        return self._kept[torch.tensor(ids, dtype=torch.int64, device=self.device)]

    def cosines(self, vector: Tensor) -> Tensor:
        """Return the vector's cosine to each direction, [count] float64; 0 for a vector of zeros."""
        vector = vector.to(self.device, torch.float32)
        block = max(1, _AT_ONCE // self.dimension)
        parts = [
            self.rows(list(range(first, min(first + block, self.count)))) @ vector
            for first in range(0, self.count, block)
        ]
        cosines: Tensor = torch.cat(parts).double() / vector.double().norm().clamp(min=1e-300)
        return cosines

    @cached_property
    def _kept(self) -> Tensor | None:
        """All rows, if there is room for them."""
        room = torch.cuda.mem_get_info(self.device)[0] // 16 if self.device.type == "cuda" else _KEPT
        return self._made(list(range(self.count))) if self.count * self.dimension <= room else None

    def _made(self, ids: list[int]) -> Tensor:
        rows = torch.empty(len(ids), self.dimension, device=self.device)
        root = Seeded.root(self.seed).child("canary")
        generator = torch.Generator(self.device)
        for row, number in zip(rows, ids, strict=True):
            torch.randn(self.dimension, generator=generator.manual_seed(root.child(number).seed()), out=row)
        return torch.nn.functional.normalize(rows)


class CanaryEngine:
    """An engine whose last ids are canaries: 0..N−1 are the real clients, N..N+m−1 the canaries."""

    def __init__(self, inner: Engine, clients: int, canaries: Directions) -> None:
        self.inner, self.clients, self.canaries = inner, clients, canaries

    def __repr__(self) -> str:
        return f"{self.inner}, and {self.canaries.count} canaries"

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def map_clients(self, job: ClientJob, ids: Tensor, rng: Rng) -> Iterator[Block]:
        yield from self.inner.map_clients(job, ids[ids < self.clients], rng)
        numbers = (ids[ids >= self.clients] - self.clients).tolist()
        block = max(1, _AT_ONCE // self.canaries.dimension)
        for first in range(0, len(numbers), block):
            update = LOUDNESS * job.clip_norm * self.canaries.rows(numbers[first : first + block])
            yield clip_block(Trained(update, torch.linalg.vector_norm(update, dim=1)), job)
