"""Likelihoods of targets under a model: perplexity, and the loss itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedblur.core.registry import register
from fedblur.learning.metrics.base import Mean, Metric
from fedblur.learning.metrics.shares import demand_ranks
from fedblur.learning.tasks.base import Task
from fedblur.learning.tasks.own import Own


@register("metric", "perplexity")
@dataclass(frozen=True)
class Perplexity(Metric):
    """The exponential of the mean cross-entropy over all real tokens: as uncertain as so many equally likely ones."""

    larger_is_better: ClassVar[bool] = False
    best: ClassVar[float] = 1.0
    worst: ClassVar[float] = math.inf

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        demand_ranks(self, outputs, targets)

    def count(self, outputs: Tensor, targets: Tensor) -> Tensor:
        real = targets >= 0
        likelihood = torch.log_softmax(outputs.double(), -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        surprise = (-likelihood[real]).nan_to_num(nan=math.inf, posinf=math.inf)
        return torch.stack([surprise.sum(), real.sum().double()])

    def value(self, counted: Tensor) -> float:
        mean = super().value(counted)
        return math.inf if mean >= 700 else math.exp(mean)


@register("metric", "loss")
@dataclass(frozen=True)
class MeanLoss(Mean):
    """The mean loss over samples: the headline of a loss of one's own."""

    larger_is_better: ClassVar[bool] = False
    best: ClassVar[float] = 0.0
    worst: ClassVar[float] = math.inf

    def of(self, task: Task) -> Metric:
        """Return the metric of this task."""
        return LossOf(task)

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return Own().loss(outputs, targets)  # an error that says how to give it


@dataclass(frozen=True)
class LossOf(MeanLoss):
    """The mean of a task's loss."""

    task: Task = field(default_factory=Own)

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.task.loss(outputs, targets)
