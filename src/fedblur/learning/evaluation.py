"""Metrics and loss of a model, and whom it serves.

On data that no client trained on, they are post-processing, free of privacy cost. `fairness` also looks at training
clients, at their own data: what it finds is `local_only`, as no noise hides any of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedblur.data.population import Federation, Population, Samples, Shard, as_input, each_input
from fedblur.learning.methods import Method
from fedblur.learning.metrics import Accuracy, Metric
from fedblur.learning.module_function import Forward, Params, evaluating
from fedblur.learning.randomness import SeededRandomness
from fedblur.learning.tasks import Classification, Task

MOST_CLIENTS, MOST_SAMPLES = 200, 50  # looked at for fairness: about as many samples as a test set has
_CHUNK = 1024
_ALONE = 64  # samples in a batch where a client must not share one with others


class Measured(NamedTuple):
    """The figures of a model on held-out data."""

    figures: dict[str, float]  # by metric; the headline first
    loss: float  # the mean over samples


@torch.no_grad()
def measure(
    forward: Forward, theta: Params, samples: Samples, task: Task, metrics: Sequence[Metric],
    methods: tuple[Method, ...] = (), views: int = 1,
) -> Measured:  # fmt: skip
    """Return the metrics and the mean loss over all samples, of the model in evaluation mode.

    With several views a prediction is the mean of the probabilities for the sample itself and for views - 1 of it as
    the methods disturb it in training; they follow from the sample's place and are the same in every evaluation.
    """
    return added_up(_predictions(forward, theta, samples, task, methods, views, _CHUNK), task, metrics)


def added_up(predictions: Iterable[tuple[Tensor, Tensor]], task: Task, metrics: Sequence[Metric]) -> Measured:
    """Return the metrics and the mean loss of predictions (outputs, targets) that come in chunks."""
    loss, samples = torch.zeros((), dtype=torch.float64), 0
    counted: list[list[Tensor]] = [[] for _ in metrics]
    for outputs, y in predictions:
        loss, samples = loss.to(y.device) + task.total_loss(outputs, y), samples + len(y)
        for metric, parts in zip(metrics, counted, strict=True):
            part = metric.count(outputs, y)
            if metric.keeps_rows or not parts:
                parts.append(part)
            else:
                parts[0] = parts[0] + part
    figures = {metric.key: metric.value(torch.cat(parts)) for metric, parts in zip(metrics, counted, strict=True)}
    return Measured(figures, float(loss) / samples)


def evaluate(
    forward: Forward, theta: Params, samples: Samples, methods: tuple[Method, ...] = (), views: int = 1
) -> tuple[float, float]:
    """Return (accuracy, mean cross-entropy) of a classifier over all samples, dropout off."""
    figures, loss = measure(forward, theta, samples, Classification(), (Accuracy(),), methods, views)
    return figures["accuracy"], loss


@torch.no_grad()
def figure_by_client(
    forward: Forward, theta: Params, samples: Samples, sizes: Tensor, task: Task, metric: Metric,
    methods: tuple[Method, ...] = (), views: int = 1,
) -> Tensor:  # fmt: skip
    """Return each client's own figure, [clients] float64 on the CPU; `sizes` says whose samples follow whose.

    Formal guarantee: a client's figure is a function of its own samples. It has batches to itself, all of one size,
    so no other client can change the rounding of its predictions or how a view disturbs them. NaN without samples.
    """
    found, first = [], 0
    for size in sizes.tolist():
        own = slice(first, first + size)
        first += size
        if not size:
            found.append(math.nan)
            continue
        filled = -(-size // _ALONE) * _ALONE - size

        def alone(x: Tensor, own: slice = own, filled: int = filled) -> Tensor:
            return torch.cat([x[own], x.new_zeros(filled, *x.shape[1:])])

        padded = Samples(each_input(samples.x, alone), alone(samples.y))
        chunks = list(_predictions(forward, theta, padded, task, methods, views, _ALONE))
        outputs, y = (torch.cat(parts)[:size] for parts in zip(*chunks, strict=True))
        found.append(metric.value(metric.count(outputs, y)))
    return torch.tensor(found, dtype=torch.float64)


@torch.no_grad()
def accuracy_by_group(
    forward: Forward, theta: Params, samples: Samples, groups: Tensor, count: int,
    methods: tuple[Method, ...] = (), views: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (accuracy [count] float64, samples [count] int64) of each group, on the CPU; NaN where it has no samples.

    Groups share batches: for what nobody's privacy rests on. `groups`: [samples], the number of each sample's.
    """
    predictions = _predictions(forward, theta, samples, Classification(), methods, views, _CHUNK)
    hits = torch.cat([_hits(outputs, y) for outputs, y in predictions]).double().cpu()
    groups = groups.cpu()
    counts = torch.bincount(groups, minlength=count)
    return torch.zeros(count, dtype=torch.float64).index_add_(0, groups, hits) / counts, counts


def fairness(
    forward: Forward, theta: Params, federation: Federation, held_out: Samples,
    methods: tuple[Method, ...] = (), views: int = 1, task: Task | None = None, metric: Metric | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure accuracy by class on held-out data, and of training clients on their own: simulation only.

    Of another task than classification: the metric of training clients on their own data.
    """
    task, metric = task or Classification(), metric or Accuracy()
    samples, sizes = own_samples(federation.train)
    if not task.classes:
        each = figure_by_client(forward, theta, samples, sizes, task, metric, methods, views)
        figures = [round(value, 4) if math.isfinite(value) else None for value in each.tolist()]
        return {"client_figures": figures, "client_metric": metric.key, "client_samples": sizes.tolist()}
    shares, counts = accuracy_by_group(forward, theta, held_out, held_out.y, federation.train.classes, methods, views)
    owners = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    each, _ = accuracy_by_group(forward, theta, samples, owners, len(sizes), methods, views)
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
    index = torch.repeat_interleave(shard.starts.cpu(), sizes) + within
    return Samples(each_input(shard.x, lambda x: x[index.to(x.device)]), shard.y[index.to(shard.y.device)]), sizes


def _hits(outputs: Tensor, y: Tensor) -> Tensor:
    """Return which predictions are right. NaN is wrong: argmax would take it for the first class."""
    return (outputs.argmax(1) == y) & ~outputs.isnan().any(1)


def _predictions(
    forward: Forward, theta: Params, samples: Samples, task: Task, methods: tuple[Method, ...], views: int, width: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (outputs [chunk, ...], targets [chunk, ...]) on the weights' device."""
    device, forward = next(iter(theta.values())).device, evaluating(forward)
    for chunk, first in enumerate(range(0, len(samples), width)):
        part = slice(first, first + width)

        def read(x: Tensor, part: slice = part) -> Tensor:
            return x[part].to(device)

        seen = [as_input(each_input(samples.x, read))]
        for view in range(1, views):
            inputs = seen[0]
            for method in methods:
                inputs = method.view(inputs, torch.tensor(chunk, device=device), view)
            seen.append(inputs)
        with SeededRandomness(None):
            outputs = task.merge(torch.stack([forward(theta, each) for each in seen]))
        yield outputs, samples.y[part].to(device)
