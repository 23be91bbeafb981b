"""Regression: one number per sample, or several. The loss is squared, absolute or Huber's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.tasks.base import Shape, Task, like_targets, over_samples


@register("task", "regression")
@dataclass(frozen=True)
class Regression(Task):
    """Learn numbers."""

    kind: Literal["squared", "absolute", "huber"] = "squared"  # the loss; of several numbers their mean
    threshold: float = 1.0  # of Huber's loss: an error up to it counts squared, beyond it linearly

    metrics: ClassVar[tuple[str, ...]] = ("rmse", "mae")

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ConfigError(f"task.regression.threshold={self.threshold} must be above 0")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs, targets = like_targets(outputs, targets), targets.to(outputs.dtype)
        if self.kind == "squared":
            each = (outputs - targets).square()
        elif self.kind == "absolute":
            each = (outputs - targets).abs()
        else:
            each = F.huber_loss(outputs, targets, reduction="none", delta=self.threshold)
        return over_samples(each)

    def shapes(self, targets: Shape, classes: int) -> tuple[Shape, ...]:
        return (targets,) if targets else ((1,), ())
