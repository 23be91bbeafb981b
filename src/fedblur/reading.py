"""What local steps read: a plan's samples, gathered step by step. Padding is 0, so no other client's sample is seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_CACHED = 2**19  # bytes of samples that are read for several steps at once; more would leave a core's cache


class Batch(NamedTuple):
    """What a step reads: of one client, or with a leading dimension of clients."""

    inputs: Tensor  # [batch, *shape] as they are stored, 0 at padding: no other client's sample is read
    labels: Tensor  # [batch], 0 at padding
    weights: Tensor  # [batch] of each sample's loss, 0 at padding
    rate: Tensor  # [] η, or 0 where all is padding
    descent: Tensor  # [batch] −η·weight


def read_batches(x: Tensor, y: Tensor, plan: Tensor, rate: float | None = None) -> Iterator[Batch]:
    """The batches of a plan [..., steps, batch] one after another. With a rate losses are averaged, else summed."""
    plan = plan.movedim(-2, 0).contiguous()  # steps first: what one step reads lies together
    valid, safe = plan >= 0, plan.clamp(min=0)
    labels = y.index_select(0, safe.flatten()).view(safe.shape)
    padded = plan.device.type != "cpu" or not bool(valid.all())  # asking a GPU would stop it
    if padded:
        labels = torch.where(valid, labels, 0)
    weights = valid.float() if rate is None else valid / valid.sum(-1, keepdim=True).clamp(min=1)
    rates = (rate or 0.0) * valid.any(-1).float()
    descents = -(rate or 0.0) * weights
    at_once = max(1, _CACHED // _bytes(x, plan[0].numel())) if plan.device.type == "cpu" else 1
    for first in range(0, len(plan), at_once):
        index = safe[first : first + at_once]
        inputs = x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])
        if padded:
            inputs = _blanked(inputs, valid[first : first + at_once])
        for q in range(first, first + len(index)):
            yield Batch(inputs[q - first], labels[q], weights[q], rates[q], descents[q])


def _blanked(inputs: Tensor, valid: Tensor) -> Tensor:
    """Zeros at padding; eight bytes at a time where they fit, as a GPU is slow on single ones."""
    rows = inputs.view(valid.numel(), -1)
    if rows.shape[1] * rows.element_size() % 8 == 0:
        return (rows.view(torch.int64) * valid.view(-1, 1)).view(inputs.dtype).view(inputs.shape)
    return torch.where(valid.view(-1, 1), rows, 0).view(inputs.shape)


def _bytes(x: Tensor, samples: int) -> int:
    return samples * x[0].numel() * x.element_size()
