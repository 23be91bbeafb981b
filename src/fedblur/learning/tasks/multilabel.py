"""Multi-label: several yes or no per sample, one logit each, the mean of their binary cross-entropies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from fedblur.core.errors import DataError
from fedblur.core.registry import register
from fedblur.learning.tasks.base import Shape, Task, over_samples
from fedblur.learning.tasks.binary import demand_yes_or_no


@register("task", "multilabel")
@dataclass(frozen=True)
class MultiLabel(Task):
    """Learn which labels each sample has, [samples, labels] of 0 and 1."""

    metrics: ClassVar[tuple[str, ...]] = ("f1", "auroc")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return over_samples(binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none"))

    def shapes(self, targets: Shape, classes: int) -> tuple[Shape, ...]:
        return (targets,)

    def check_targets(self, name: str, targets: Tensor, classes: int) -> None:
        if targets.dim() != 2:
            raise DataError(
                f"{name} has shape {[*targets.shape]}, but task 'multilabel' needs [samples, labels] of 0 and 1"
            )
        demand_yes_or_no(name, targets, "multilabel")
