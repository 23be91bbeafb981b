"""Figures about a federation: sizes and label skew of its clients, for whoever chooses settings.

These figures are computed from the clients' data themselves, so they are `local_only`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedblur.core.rng import Seeded
from fedblur.data.population import Federation, Packed, Population, sample_index

_MOST_GENERATED = 200  # clients that are looked at when each has to be computed first


@dataclass(frozen=True)
class Summary:
    """A federation in figures."""

    name: str
    note: str
    train_clients: int
    validation_clients: int
    validation_samples: int
    test_samples: int
    classes: int
    shape: tuple[int, ...]
    clients_seen: int  # the figures below are of these training clients
    samples_min: int
    samples_median: float
    samples_mean: float
    samples_max: int
    classes_per_client: float  # mean number of classes that a client has at all
    label_distance: float  # mean total-variation distance of a client's label mix from the population's, 0..1


def clients_to_see(population: Population) -> Tensor:
    """Return all clients in memory; of generated ones a few, by a fixed random choice."""
    if isinstance(population, Packed) or population.clients <= _MOST_GENERATED:
        return torch.arange(population.clients)
    lot = Seeded.root(0).child("summary").numpy()
    drawn = lot.choice(population.clients, _MOST_GENERATED, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(drawn))


def label_counts(population: Population, ids: Tensor) -> NDArray[np.int64]:
    """Count each class's samples at each of these clients: [clients, classes]."""
    shard = population.fetch(ids)
    sizes = shard.sizes.cpu()
    labels = shard.y.cpu()[sample_index(shard.starts.cpu(), sizes)]
    rows = torch.repeat_interleave(torch.arange(len(ids)), sizes)
    cells = torch.bincount(rows * population.classes + labels, minlength=len(ids) * population.classes)
    return cells.reshape(len(ids), population.classes).numpy()


def summarise(federation: Federation, counts: NDArray[np.int64]) -> Summary:
    """Return the figures, from the label counts of the clients that were looked at."""
    sizes = counts.sum(axis=1)
    mixes = counts / sizes[:, None]
    overall = counts.sum(axis=0) / sizes.sum()
    return Summary(
        name=federation.name,
        note=federation.note,
        train_clients=federation.train.clients,
        validation_clients=federation.validation_clients,
        validation_samples=0 if federation.validation is None else len(federation.validation),
        test_samples=len(federation.test),
        classes=federation.train.classes,
        shape=tuple(federation.train.shape),
        clients_seen=len(counts),
        samples_min=int(sizes.min()),
        samples_median=float(np.median(sizes)),
        samples_mean=float(sizes.mean()),
        samples_max=int(sizes.max()),
        classes_per_client=float((counts > 0).sum(axis=1).mean()),
        label_distance=float(0.5 * np.abs(mixes - overall).sum(axis=1).mean()),
    )
