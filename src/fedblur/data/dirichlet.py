"""Stage 0, partition: clients with unequal label mixes, drawn from Dir(α). Small α: few classes a client.

Both fill a table of counts [clients, classes] first and then deal shuffled samples by it, so neither can give
a sample twice, retry without end, or leave a client empty.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedblur.data.partition import Partition, check_fit, check_samples_per_client
from fedblur.errors import ConfigError
from fedblur.registry import register

_LEAST_WEIGHT = 1e-6  # of a class without samples: Dir needs something, and its pool is empty
_NO_MASS = 1e-200  # below this a Dirichlet mix has underflowed and says nothing about the classes that are left


def _check_alpha(partition: str, alpha: float) -> None:
    if not 0 < alpha < math.inf:
        raise ConfigError(f"partition.{partition}.alpha={alpha} must be above 0 and finite")


@register("partition", "dirichlet")
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Equal clients, each with its own class mix ~ Dir(α), drawn without replacement (Hsu et al. 2019)."""

    alpha: float = 1.0
    samples_per_client: int | None = None  # None: as many as all clients can have
    centre: Literal["uniform", "labels"] = "uniform"  # what mixes scatter around: all classes alike, or the data's own

    def __post_init__(self) -> None:
        _check_alpha("dirichlet", self.alpha)
        check_samples_per_client("dirichlet", self.samples_per_client)

    def owners(self, labels: Tensor, clients: int, rng: np.random.Generator, natural: Tensor | None) -> Tensor:
        check_fit(len(labels), clients, self.samples_per_client or 1)
        size = self.samples_per_client or len(labels) // clients
        left = np.bincount(labels.numpy())  # [classes]
        weights = np.ones(len(left)) if self.centre == "uniform" else len(left) * left / left.sum()
        mixes = rng.dirichlet(self.alpha * np.maximum(weights, _LEAST_WEIGHT), clients)  # [clients, classes]
        counts = np.empty((clients, len(left)), dtype=np.int64)
        for client in range(clients):
            counts[client] = _draw(mixes[client], size, left, rng)
            left -= counts[client]
        return _deal(counts, labels, rng)


def _draw(mix: NDArray[np.float64], size: int, left: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """`size` samples by class from pools that can run dry: then the mix is renormalised over the others.

    What a pool cannot give is drawn again: each turn is the last or empties a pool, so they end.
    """
    taken = np.zeros_like(left)
    while (missing := size - int(taken.sum())) > 0:
        weights = np.where(left > taken, mix, 0.0)
        if not weights.sum() > _NO_MASS:
            weights = (left - taken).astype(np.float64)
        taken = np.minimum(taken + rng.multinomial(missing, weights / weights.sum()), left)
    return taken


@register("partition", "dirichlet_classwise")
@dataclass(frozen=True)
class DirichletClasswise(Partition):
    """Each class divided over all clients by Dir(α); clients' sizes differ too (Yurochkin et al. 2019)."""

    alpha: float = 1.0
    min_samples: int = 1  # smaller clients get samples from the largest ones

    def __post_init__(self) -> None:
        _check_alpha("dirichlet_classwise", self.alpha)
        if self.min_samples < 1:
            raise ConfigError(f"partition.dirichlet_classwise.min_samples={self.min_samples} must be at least 1")

    def owners(self, labels: Tensor, clients: int, rng: np.random.Generator, natural: Tensor | None) -> Tensor:
        check_fit(len(labels), clients, self.min_samples)
        pools = np.bincount(labels.numpy())
        shares = rng.dirichlet(np.full(clients, self.alpha), len(pools))  # [classes, clients]
        counts = np.stack([_cut(share, pool) for share, pool in zip(shares, pools)], axis=1)
        _raise_to(counts, self.min_samples)
        return _deal(counts, labels, rng)


def _cut(shares: NDArray[np.float64], pool: int) -> NDArray[np.int64]:
    """A pool cut into whole pieces by shares; nothing is lost to rounding."""
    if not shares.sum() > 0.5:  # overflow at a huge α: shares that are all alike
        shares = np.full(len(shares), 1 / len(shares))
    edges = np.rint(np.minimum(np.cumsum(shares), 1.0) * pool).astype(np.int64)
    edges[-1] = pool
    pieces: NDArray[np.int64] = np.diff(edges, prepend=0)
    return pieces


def _raise_to(counts: NDArray[np.int64], least: int) -> None:
    """Move samples from the largest client, out of its commonest class, to those that have too few."""
    sizes = counts.sum(axis=1)
    largest = [(-int(size), client) for client, size in enumerate(sizes)]
    heapq.heapify(largest)
    for poor in np.nonzero(sizes < least)[0]:
        for _ in range(least - int(sizes[poor])):
            size, donor = heapq.heappop(largest)  # above `least`: the mean is at least that, and `poor` is below
            commonest = counts[donor].argmax()
            counts[donor, commonest] -= 1
            counts[poor, commonest] += 1
            heapq.heappush(largest, (size + 1, donor))


def _deal(counts: NDArray[np.int64], labels: Tensor, rng: np.random.Generator) -> Tensor:
    """Shuffled samples of each class, dealt by a table of counts [clients, classes]."""
    owners = np.full(len(labels), -1, dtype=np.int64)
    for label, column in enumerate(counts.T):
        pool = rng.permutation(np.nonzero(labels.numpy() == label)[0])
        owners[pool[: column.sum()]] = np.repeat(np.arange(len(counts)), column)
    return torch.from_numpy(owners)
