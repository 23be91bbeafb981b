"""Stage 0, partition: who owns which sample. In: labels, a number of clients. Out: an owner each, or -1.

No sample is given twice, and every client gets at least one. `natural` keeps the people who wrote the samples. The
others make clients up, and a table must say so.

The Dirichlet partitions give clients unequal label mixes, drawn from Dir(α). Small α: few classes a client. Both fill a
table of counts [clients, classes] first and then deal shuffled samples by it. So neither can give a sample twice, retry
forever, or leave a client empty.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedblur.core.errors import ConfigError, DataError
from fedblur.core.registry import register

_LEAST_WEIGHT = 1e-6  # of a class without samples: Dir needs something, and its pool is empty
_NO_MASS = 1e-200  # below this a Dirichlet mix has underflowed and says nothing about the remaining classes


class Partition(ABC):
    """A rule that divides training samples among clients."""

    @abstractmethod
    def owners(self, labels: Tensor, clients: int, rng: np.random.Generator, natural: Tensor | None) -> Tensor:
        """Return each sample's client 0..clients-1, or -1 if nobody gets it: [samples], int64."""


def check_fit(samples: int, clients: int, each: int) -> None:
    """Refuse to cut more than there is."""
    if clients < 1:
        raise ConfigError(f"clients={clients} must be at least 1")
    if clients * each > samples:
        raise ConfigError(
            f"{clients} clients (validation included) of {each} or more samples need {clients * each}, "
            f"but there are {samples}; lower clients or the samples of each"
        )


def check_samples_per_client(partition: str, value: int | None) -> None:
    """Refuse a number of samples below 1."""
    if value is not None and value < 1:
        raise ConfigError(f"partition.{partition}.samples_per_client={value} must be at least 1")


@register("partition", "natural")
@dataclass(frozen=True)
class Natural(Partition):
    """The people who wrote the samples; with fewer clients than people, some of them at random."""

    def owners(self, labels: Tensor, clients: int, rng: np.random.Generator, natural: Tensor | None) -> Tensor:
        if natural is None:
            raise DataError("partition='natural' needs samples with known writers; use 'dirichlet' or 'iid' here")
        people, codes = torch.unique(natural, return_inverse=True)
        if not 1 <= clients <= len(people):
            raise ConfigError(f"clients={clients} must be from 1 to {len(people)}, the number of natural clients")
        chosen = torch.from_numpy(np.sort(rng.permutation(len(people))[:clients]))
        client_of = torch.full((len(people),), -1, dtype=torch.int64)
        client_of[chosen] = torch.arange(clients)
        return client_of[codes]


@register("partition", "iid")
@dataclass(frozen=True)
class Iid(Partition):
    """Samples dealt at random; clients' sizes differ by at most one."""

    samples_per_client: int | None = None  # None: all samples are dealt

    def __post_init__(self) -> None:
        check_samples_per_client("iid", self.samples_per_client)

    def owners(self, labels: Tensor, clients: int, rng: np.random.Generator, natural: Tensor | None) -> Tensor:
        check_fit(len(labels), clients, self.samples_per_client or 1)
        dealt = len(labels) if self.samples_per_client is None else clients * self.samples_per_client
        owners = np.full(len(labels), -1, dtype=np.int64)
        owners[rng.permutation(len(labels))[:dealt]] = np.arange(dealt) % clients
        return torch.from_numpy(owners)


@register("partition", "shards")
@dataclass(frozen=True)
class Shards(Partition):
    """Samples sorted by label and cut into equal shards, a few for each client (McMahan et al. 2017)."""

    shards_per_client: int = 2  # fewer: fewer classes on each client

    def __post_init__(self) -> None:
        if self.shards_per_client < 1:
            raise ConfigError(f"partition.shards.shards_per_client={self.shards_per_client} must be at least 1")

    def owners(self, labels: Tensor, clients: int, rng: np.random.Generator, natural: Tensor | None) -> Tensor:
        check_fit(len(labels), clients, self.shards_per_client)
        shards = clients * self.shards_per_client
        size = len(labels) // shards
        shuffled = rng.permutation(len(labels))
        by_label = shuffled[np.argsort(labels.numpy()[shuffled], kind="stable")]
        client_of = rng.permutation(shards) % clients  # [shards]
        owners = np.full(len(labels), -1, dtype=np.int64)
        owners[by_label[: shards * size]] = np.repeat(client_of, size)
        return torch.from_numpy(owners)


def _check_alpha(partition: str, alpha: float) -> None:
    if not 0 < alpha < math.inf:
        raise ConfigError(f"partition.{partition}.alpha={alpha} must be above 0 and finite")


@register("partition", "dirichlet")
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Equal clients, each with its own class mix ~ Dir(α), drawn without replacement (Hsu et al. 2019)."""

    alpha: float = 1.0  # α: near 0 clients have one class, large values mix all classes
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
    """Draw `size` samples by class. If a pool runs dry, the mix is renormalised over the others.

    What a pool cannot give is drawn again. Each turn is the last or empties a pool, so the loop ends.
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

    alpha: float = 1.0  # α: near 0 clients have one class, large values mix all classes
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
    """Cut a pool into whole pieces by shares; nothing is lost to rounding."""
    if not shares.sum() > 0.5:  # overflow at a huge α: shares that are all alike
        shares = np.full(len(shares), 1 / len(shares))
    edges = np.rint(np.minimum(np.cumsum(shares), 1.0) * pool).astype(np.int64)
    edges[-1] = pool
    pieces: NDArray[np.int64] = np.diff(edges, prepend=0)
    return pieces


def _raise_to(counts: NDArray[np.int64], least: int) -> None:
    """Move samples from the largest client, from its most common class, to clients that have too few."""
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
    """Deal shuffled samples of each class by a table of counts [clients, classes]."""
    owners = np.full(len(labels), -1, dtype=np.int64)
    for label, column in enumerate(counts.T):
        pool = rng.permutation(np.nonzero(labels.numpy() == label)[0])
        owners[pool[: column.sum()]] = np.repeat(np.arange(len(counts)), column)
    return torch.from_numpy(owners)
