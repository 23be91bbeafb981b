"""Stage 2, kNN-DPFL: no training. A client votes with the labels of its own samples that are nearest to the query.

Distances are between public features: a random convolution from a fixed seed (samples that are not images are taken
as they are), scaled to length 1. The vote is the average of the k labels, a point of the simplex.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.core.registry import register
from fedblur.core.rng import Rng
from fedblur.data.population import Population, as_input, one_input
from fedblur.voting.base import Booth, Electorate, Voting

_KERNEL, _CELLS = 5, 6  # the filters' side, and the side of the grid that their responses are averaged over
_CHUNK = 1024


@register("voting", "knn-dpfl")
@dataclass(frozen=True)
class KnnDpfl(Voting):
    """Nearest neighbours vote their labels."""

    neighbours: int = 1  # k; a client with fewer samples uses all of them. Small clients have few of a class
    filters: int = 32  # of the public random convolution; 0: compare the samples themselves

    title: ClassVar[str] = "kNN-DPFL"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._demand(self.neighbours >= 1, "neighbours", "must be at least 1")
        self._demand(self.filters >= 0, "filters", "must be 0 or more")

    def electorate(self, booth: Booth) -> Electorate:
        filters = public_filters(booth.population.shape, self.filters).to(booth.device)
        return Neighbours(booth.population.to(booth.device), filters, self.neighbours)


@dataclass(frozen=True)
class Neighbours:
    """Clients that compare public samples with their own."""

    population: Population
    filters: Tensor  # [filters, channels, side, side]; none: compare the samples themselves
    neighbours: int  # k
    at_once: int = 64

    def votes(self, ids: Tensor, x: Tensor, rng: Rng) -> Tensor:
        shard = self.population.fetch(ids)
        asked, stored = features(x, self.filters), one_input(shard.x, "knn-dpfl")
        each = []
        for start, size in zip(shard.starts.tolist(), shard.sizes.tolist(), strict=True):
            own = slice(start, start + size)
            # both have length 1: the largest product is the smallest distance
            likeness = asked @ features(stored[own], self.filters).T  # [samples, own samples]
            nearest = likeness.topk(min(self.neighbours, size), dim=1).indices
            each.append(F.one_hot(shard.y[own][nearest], self.population.classes).double().mean(1))
        return torch.stack(each)


def public_filters(shape: tuple[int, ...], count: int) -> Tensor:
    """Draw random filters without a mean, the same for everyone: they depend on no data."""
    if len(shape) != 3 or count == 0:
        return torch.empty(0)
    weights = torch.randn(count, shape[0], _KERNEL, _KERNEL, generator=torch.Generator().manual_seed(0))
    return weights - weights.mean((1, 2, 3), keepdim=True)


@torch.no_grad()
def features(x: Tensor, filters: Tensor) -> Tensor:
    """Return φ: [samples, features], each of length 1."""
    parts = []
    for chunk in torch.split(x, _CHUNK):
        inputs = as_input(chunk)
        if filters.numel():
            response = F.relu(F.conv2d(inputs, filters, padding=_KERNEL // 2))
            cells = (min(_CELLS, response.shape[2]), min(_CELLS, response.shape[3]))
            inputs = F.adaptive_avg_pool2d(response, cells)
        parts.append(F.normalize(inputs.flatten(1), dim=1))
    return torch.cat(parts)
