"""Next token: a target for each position, logits [samples, positions, tokens], cross-entropy.

A negative target is padding: it has no loss and no slope. A sample's loss is the mean over its real positions, so that
a long text counts as much as a short one; without any it is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedblur.core.errors import DataError
from fedblur.core.registry import register
from fedblur.learning.tasks.base import Shape, Task
from fedblur.learning.tasks.classification import softmax_slope


@register("task", "next-token")
@dataclass(frozen=True)
class NextToken(Task):
    """Learn the token at each position; below 0 (-100, say) is padding."""

    metrics: ClassVar[tuple[str, ...]] = ("perplexity", "accuracy")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        real = targets >= 0
        likelihood = torch.log_softmax(outputs, -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return -torch.where(real, likelihood, 0).sum(-1) / real.sum(-1).clamp(min=1)

    def shapes(self, targets: Shape, classes: int) -> tuple[Shape, ...]:
        return ((*targets, classes),)

    def check_targets(self, name: str, targets: Tensor, classes: int) -> None:
        if targets.dim() != 2 or targets.is_floating_point():
            raise DataError(
                f"{name} has shape {[*targets.shape]} and type {targets.dtype}, but task 'next-token' needs whole "
                "numbers [samples, positions], below 0 at padding; one token per sample is task 'classification'"
            )
        if targets.numel() and int(targets.max()) >= classes:
            raise DataError(
                f"{name} holds token {int(targets.max())}, but classes={classes}: tokens are 0..{classes - 1}"
            )

    def slope(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        real = targets >= 0
        each = torch.where(real, (weights / real.sum(-1).clamp(min=1))[:, None], 0)
        flat = softmax_slope(outputs.flatten(0, 1), targets.clamp(min=0).flatten(), each.flatten())
        return torch.where((each != 0)[..., None], flat.view(outputs.shape), 0)
