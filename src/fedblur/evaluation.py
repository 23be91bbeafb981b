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
    for chunk, (x, y) in enumerate(_chunks(samples)):
        y, inputs = y.to(device), as_input(x.to(device))
        seen = [inputs, *(_disturbed(inputs, methods, chunk, view) for view in range(1, views))]
        with SeededDropout(None):
            chances = torch.stack([F.log_softmax(forward(theta, each), 1) for each in seen])  # [views, chunk, classes]
        logits = torch.logsumexp(chances, 0)
        correct += (logits.argmax(1) == y).sum()
        loss += F.cross_entropy(logits, y, reduction="sum").double()
    return int(correct) / len(samples), float(loss) / len(samples)


def _chunks(samples: Samples) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(samples.x, _CHUNK), torch.split(samples.y, _CHUNK), strict=True)


def _disturbed(inputs: Tensor, methods: tuple[Method, ...], chunk: int, view: int) -> Tensor:
    for method in methods:
        inputs = method.view(inputs, torch.tensor(chunk, device=inputs.device), view)
    return inputs
