"""Classification: one class per sample, one logit per class, cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.core.errors import DataError
from fedblur.core.registry import register
from fedblur.learning.tasks.base import Shape, Task


@register("task", "classification")
@dataclass(frozen=True)
class Classification(Task):
    """Learn one class per sample."""

    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    classes: ClassVar[bool] = True

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    def shapes(self, targets: Shape, classes: int) -> tuple[Shape, ...]:
        return ((classes,),)

    def check_targets(self, name: str, targets: Tensor, classes: int) -> None:
        if targets.dim() != 1 or targets.is_floating_point():
            raise DataError(
                f"{name} has shape {[*targets.shape]} and type {targets.dtype}, but classification needs one whole "
                'number per sample; set task to what they are, for instance "regression"'
            )
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < classes:
            raise DataError(
                f"{name} runs from {int(targets.min())} to {int(targets.max())}, must be in 0..{classes - 1}"
            )

    def slope(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return softmax_slope(outputs, targets, weights)

    def total_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum").double()

    def merge(self, views: Tensor) -> Tensor:
        """Return log-probabilities up to a constant: a prediction is the mean of the views' probabilities."""
        return torch.logsumexp(F.log_softmax(views, -1), 0)


def softmax_slope(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return weight·(softmax − one-hot), [rows, classes]: the slope of cross-entropy; 0 at padding."""
    powers = (outputs - outputs.amax(-1, keepdim=True)).exp()  # torch's softmax takes twice as long on short rows
    weights = weights[:, None]
    shares = powers * (weights / powers.sum(-1, keepdim=True))
    return shares.scatter_add(-1, targets[:, None], -weights)
