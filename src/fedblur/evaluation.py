"""How good a released model is, on data that no client trained on: post-processing, free of privacy cost."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.data.population import Samples, as_input
from fedblur.dropout import SeededDropout
from fedblur.functional import Forward, Params
from fedblur.methods import Method

_CHUNK = 1024
_ALONE = 64  # samples in a batch where a client must not share one with others


@torch.no_grad()
def evaluate(
    forward: Forward, theta: Params, samples: Samples, methods: tuple[Method, ...] = (), views: int = 1
) -> tuple[float, float]:
    """(accuracy, mean cross-entropy) over all samples, dropout off.

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
    """Each client's own accuracy, [clients] float64 on the CPU; `sizes` says whose samples follow whose.

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
    """(accuracy [classes] float64, samples [classes] int64) on the CPU; NaN where a class has no samples."""
    predictions = _predictions(forward, theta, samples, methods, views, _CHUNK)
    hits = torch.cat([_hits(logits, y) for logits, y in predictions]).double().cpu()
    labels = samples.y.cpu()
    counts = torch.bincount(labels, minlength=classes)
    return torch.zeros(classes, dtype=torch.float64).index_add_(0, labels, hits) / counts, counts


def _hits(logits: Tensor, y: Tensor) -> Tensor:
    """Which predictions are right. NaN is none: argmax would take it for the first class."""
    return (logits.argmax(1) == y) & ~logits.isnan().any(1)


def _predictions(
    forward: Forward, theta: Params, samples: Samples, methods: tuple[Method, ...], views: int, width: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """(log-probabilities up to a constant [chunk, classes], labels [chunk]) on the device of the weights."""
    device = next(iter(theta.values())).device
    for chunk, (x, y) in enumerate(_chunks(samples, width)):
        inputs = as_input(x.to(device))
        seen = [inputs, *(_disturbed(inputs, methods, chunk, view) for view in range(1, views))]
        with SeededDropout(None):
            chances = torch.stack([F.log_softmax(forward(theta, each), 1) for each in seen])  # [views, chunk, classes]
        yield torch.logsumexp(chances, 0), y.to(device)


def _chunks(samples: Samples, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(samples.x, width), torch.split(samples.y, width), strict=True)


def _disturbed(inputs: Tensor, methods: tuple[Method, ...], chunk: int, view: int) -> Tensor:
    for method in methods:
        inputs = method.view(inputs, torch.tensor(chunk, device=inputs.device), view)
    return inputs
