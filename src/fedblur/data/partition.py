"""Stage 0, partition: who owns which sample. In: labels, a number of clients. Out: an owner each, or -1.

No sample is given twice, and every client gets at least one. `natural` keeps the people who wrote the
samples; the others make clients up, and a table must say so. The Dirichlet partitions are in `dirichlet.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedblur.errors import ConfigError, DataError
from fedblur.registry import register


class Partition(ABC):
    """Divides training samples among clients."""

    @abstractmethod
    def owners(self, labels: Tensor, clients: int, rng: np.random.Generator, natural: Tensor | None) -> Tensor:
        """[samples], int64: client 0..clients-1 of each sample, or -1 for a sample that nobody gets."""


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
    """Samples dealt at random; clients' sizes differ by one at most."""

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

    shards_per_client: int = 2

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
