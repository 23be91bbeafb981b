"""Ranking: which of all items comes next. One score per item; what is learned is that the item's own is the highest.

softmax     cross-entropy over all items
pairwise    the mean over all other items of log(1 + exp(their score − the item's)), as in BPR without sampling
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from fedblur.core.errors import DataError
from fedblur.core.registry import register
from fedblur.learning.tasks.base import Shape, Task
from fedblur.learning.tasks.classification import softmax_slope


@register("task", "ranking")
@dataclass(frozen=True)
class Ranking(Task):
    """Learn to rank each sample's item above all others."""

    kind: Literal["softmax", "pairwise"] = "softmax"  # the loss

    metrics: ClassVar[tuple[str, ...]] = ("ndcg", "hit_rate")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.kind == "softmax":
            return F.cross_entropy(outputs, targets, reduction="none")
        own = outputs.gather(-1, targets[:, None])
        others = F.softplus(outputs - own).sum(-1) - F.softplus(own - own)[:, 0]  # without the item itself
        return others / max(1, outputs.shape[-1] - 1)

    def shapes(self, targets: Shape, classes: int) -> tuple[Shape, ...]:
        return ((classes,),)

    def check_targets(self, name: str, targets: Tensor, classes: int) -> None:
        if targets.dim() != 1 or targets.is_floating_point():
            raise DataError(
                f"{name} has shape {[*targets.shape]} and type {targets.dtype}, but task 'ranking' needs the number of "
                "one item per sample"
            )
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < classes:
            raise DataError(
                f"{name} runs from {int(targets.min())} to {int(targets.max())}, but items are 0..{classes - 1}"
            )

    def slope(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        if self.kind == "softmax":
            return softmax_slope(outputs, targets, weights)
        return super().slope(outputs, targets, weights)
