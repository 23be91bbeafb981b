"""Shares of samples that are right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedblur.core.registry import register
from fedblur.learning.metrics.base import Mean


@register("metric", "accuracy")
@dataclass(frozen=True)
class Accuracy(Mean):
    """The share of samples whose most likely class is theirs."""

    percent: ClassVar[bool] = True

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.argmax(-1) == targets
