"""Whom a model serves: accuracy by class, and by client on its own data. `local_only`: no noise hides any of it.

In: a trained model and a simulation's data. Out: figures for the last round's `local_only`. Training clients are
looked at evenly spaced, and no more samples of each than a test set would have, so that it costs one evaluation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedblur.data.population import Federation, Population, Samples, Shard
from fedblur.evaluation import accuracy_by_class, accuracy_by_client
from fedblur.functional import Forward, Params
from fedblur.methods import Method

MOST_CLIENTS, MOST_SAMPLES = 200, 50  # clients looked at, and samples of each


def fairness(
    forward: Forward,
    theta: Params,
    federation: Federation,
    held_out: Samples,
    methods: tuple[Method, ...] = (),
    views: int = 1,
) -> dict[str, Any]:
    """Accuracy by class on held-out data, and of training clients on their own: simulation only."""
    shares, counts = accuracy_by_class(forward, theta, held_out, federation.train.classes, methods, views)
    samples, sizes = own_samples(federation.train)
    each = accuracy_by_client(forward, theta, samples, sizes, methods, views)
    return {
        "class_accuracy": [
            round(share, 4) if count else None for share, count in zip(shares.tolist(), counts.tolist())
        ],
        "class_samples": counts.tolist(),
        "client_accuracy": [round(share, 4) for share in each.tolist()],
        "client_samples": sizes.tolist(),
    }


def own_samples(population: Population) -> tuple[Samples, Tensor]:
    """Some clients' first samples, one client after the other, and how many each has: [clients] int64."""
    ids = torch.linspace(0, population.clients - 1, min(MOST_CLIENTS, population.clients)).long()
    shard: Shard = population.fetch(ids)
    sizes = shard.sizes.cpu().clamp(max=MOST_SAMPLES)
    within = torch.arange(int(sizes.sum())) - torch.repeat_interleave(torch.cumsum(sizes, 0) - sizes, sizes)
    index = (torch.repeat_interleave(shard.starts.cpu(), sizes) + within).to(shard.x.device)
    return Samples(shard.x[index], shard.y[index.to(shard.y.device)]), sizes
