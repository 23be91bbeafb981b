"""Accuracy and loss of a model, and whom it serves.

On data that no client trained on, they are post-processing, free of privacy cost. `fairness` also looks at training
clients, at their own data: what it finds is `local_only`, as no noise hides any of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.data.population import Federation, Population, Samples, Shard, as_input
from fedblur.learning.dropout import SeededDropout
from fedblur.learning.methods import Method
from fedblur.learning.module_function import Forward, Params, evaluating

MOST_CLIENTS, MOST_SAMPLES = 200, 50  # looked at for fairness: about as many samples as a test set has
_CHUNK = 1024
_ALONE = 64  # samples in a batch where a client must not share one with others


@torch.no_grad()
def evaluate(
    forward: Forward, theta: Params, samples: Samples, methods: tuple[Method, ...] = (), views: int = 1
) -> tuple[float, float]:
    """Return (accuracy, mean cross-entropy) over all samples, of the model in evaluation mode.

    With several views a prediction is the mean of the probabilities for the sample itself and for views - 1 of it as
    the methods disturb it in training; they follow from the sample's place and are the same in every evaluation.
    """
    device = next(iter(theta.values())).device
    correct = torch.zeros((), dtype=torch.int64, device=device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for logits, y in _predictions(forward, theta, samples, methods, views, _CHUNK):
        correct += _hits(logits, y).sum()
        loss += F.cross_entropy(logits, y, reduction="sum").double()
    return int(correct) / len(samples), float(loss) / len(samples)


@torch.no_grad()
def accuracy_by_client(
    forward: Forward, theta: Params, samples: Samples, sizes: Tensor, methods: tuple[Method, ...] = (), views: int = 1
) -> Tensor:
    """Return each client's own accuracy, [clients] float64 on the CPU; `sizes` says whose samples follow whose.

    Formal guarantee: a client's accuracy is a function of its own samples. It has batches to itself, all of one size,
    so no other client can change the rounding of its predictions or how a view disturbs them. NaN without samples.
    """
    hits = []
    for x, y in zip(torch.split(samples.x, sizes.tolist()), torch.split(samples.y, sizes.tolist()), strict=True):
        filled = -(-max(len(y), 1) // _ALONE) * _ALONE - len(y)
        alone = Samples(torch.cat([x, x.new_zeros(filled, *x.shape[1:])]), torch.cat([y, y.new_full((filled,), -1)]))
        predictions = _predictions(forward, theta, alone, methods, views, _ALONE)
        hits.append(sum(int(_hits(logits, label).sum()) for logits, label in predictions))
    return torch.tensor(hits, dtype=torch.float64) / sizes


@torch.no_grad()
def accuracy_by_class(
    forward: Forward, theta: Params, samples: Samples, classes: int, methods: tuple[Method, ...] = (), views: int = 1
) -> tuple[Tensor, Tensor]:
    """Return (accuracy [classes] float64, samples [classes] int64) on the CPU; NaN where a class has no samples."""
    predictions = _predictions(forward, theta, samples, methods, views, _CHUNK)
    hits = torch.cat([_hits(logits, y) for logits, y in predictions]).double().cpu()
    labels = samples.y.cpu()
    counts = torch.bincount(labels, minlength=classes)
    return torch.zeros(classes, dtype=torch.float64).index_add_(0, labels, hits) / counts, counts


def fairness(
    forward: Forward, theta: Params, federation: Federation, held_out: Samples,
    methods: tuple[Method, ...] = (), views: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Measure accuracy by class on held-out data, and of training clients on their own: simulation only."""
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
    """Return evenly spaced clients' first samples, one client after the other, and how many each has: [clients]."""
    ids = torch.linspace(0, population.clients - 1, min(MOST_CLIENTS, population.clients)).long()
    shard: Shard = population.fetch(ids)
    sizes = shard.sizes.cpu().clamp(max=MOST_SAMPLES)
    within = torch.arange(int(sizes.sum())) - torch.repeat_interleave(torch.cumsum(sizes, 0) - sizes, sizes)
    index = (torch.repeat_interleave(shard.starts.cpu(), sizes) + within).to(shard.x.device)
    return Samples(shard.x[index], shard.y[index.to(shard.y.device)]), sizes


def _hits(logits: Tensor, y: Tensor) -> Tensor:
    """Return which predictions are right. NaN is wrong: argmax would take it for the first class."""
    return (logits.argmax(1) == y) & ~logits.isnan().any(1)


def _predictions(
    forward: Forward, theta: Params, samples: Samples, methods: tuple[Method, ...], views: int, width: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (log-probabilities up to a constant [chunk, classes], labels [chunk]) on the weights' device."""
    device, forward = next(iter(theta.values())).device, evaluating(forward)
    chunks = zip(torch.split(samples.x, width), torch.split(samples.y, width), strict=True)
    for chunk, (x, y) in enumerate(chunks):
        seen = [as_input(x.to(device))]
        for view in range(1, views):
            inputs = seen[0]
            for method in methods:
                inputs = method.view(inputs, torch.tensor(chunk, device=device), view)
            seen.append(inputs)
        with SeededDropout(None):
            chances = torch.stack([F.log_softmax(forward(theta, each), 1) for each in seen])  # [views, chunk, classes]
        yield torch.logsumexp(chances, 0), y.to(device)
