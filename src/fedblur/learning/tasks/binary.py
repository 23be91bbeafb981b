"""Binary: yes or no per sample, one logit, binary cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from fedblur.core.errors import DataError
from fedblur.core.registry import register
from fedblur.learning.tasks.base import Shape, Task, like_targets, over_samples


@register("task", "binary")
@dataclass(frozen=True)
class Binary(Task):
    """Learn yes (1) or no (0)."""

    metrics: ClassVar[tuple[str, ...]] = ("auroc", "accuracy")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs = like_targets(outputs, targets)
        return over_samples(binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none"))

    def shapes(self, targets: Shape, classes: int) -> tuple[Shape, ...]:
        return (targets,) if targets else ((1,), ())

    def check_targets(self, name: str, targets: Tensor, classes: int) -> None:
        if targets.dim() != 1:
            raise DataError(
                f"{name} has shape {[*targets.shape]}, but task 'binary' needs one 0 or 1 per sample; several are task "
                "'multilabel'"
            )
        demand_yes_or_no(name, targets, "binary")


def demand_yes_or_no(name: str, targets: Tensor, task: str) -> None:
    """Refuse targets other than 0 and 1."""
    wrong = targets[(targets != 0) & (targets != 1)]
    if len(wrong):
        raise DataError(f"{name} holds {wrong[0].item():g}, but targets of task {task!r} are 0 or 1")
