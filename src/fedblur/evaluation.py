"""How good a released model is, on data that no client trained on: post-processing, free of privacy cost."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fedblur.data.population import Samples, as_input
from fedblur.dropout import SeededDropout
from fedblur.functional import Forward, Params

_CHUNK = 1024


@torch.no_grad()
def evaluate(forward: Forward, theta: Params, samples: Samples) -> tuple[float, float]:
    """(accuracy, mean cross-entropy) over all samples, dropout off."""
    device = next(iter(theta.values())).device
    correct = torch.zeros((), dtype=torch.int64, device=device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for x, y in zip(torch.split(samples.x, _CHUNK), torch.split(samples.y, _CHUNK), strict=True):
        y = y.to(device)
        with SeededDropout(None):
            logits = forward(theta, as_input(x.to(device)))
        correct += (logits.argmax(1) == y).sum()
        loss += F.cross_entropy(logits, y, reduction="sum").double()
    return int(correct) / len(samples), float(loss) / len(samples)
