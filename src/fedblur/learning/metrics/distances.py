"""Distances between numbers and their predictions: root mean squared and mean absolute error. NaN is infinitely far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.metrics.base import Metric


@dataclass(frozen=True)
class Distance(Metric):
    """A mean over all numbers of all samples."""

    larger_is_better: ClassVar[bool] = False
    best: ClassVar[float] = 0.0
    worst: ClassVar[float] = math.inf

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if math.prod(outputs.shape[1:]) != math.prod(targets.shape[1:]):
            raise ConfigError(
                f"metric {self.part_name!r} compares numbers, but a target has shape {[*targets.shape[1:]]} and an "
                f"output {[*outputs.shape[1:]]}"
            )

    def each(self, errors: Tensor) -> Tensor:
        """Return what an error counts."""
        raise NotImplementedError

    def count(self, outputs: Tensor, targets: Tensor) -> Tensor:
        errors = outputs.reshape(targets.shape).double() - targets.double()
        each = self.each(errors).nan_to_num(nan=math.inf, posinf=math.inf)
        return torch.stack([each.sum(), each.new_tensor(each.numel())])


@register("metric", "rmse")
@dataclass(frozen=True)
class Rmse(Distance):
    """The root of the mean squared error."""

    def each(self, errors: Tensor) -> Tensor:
        return errors.square()

    def value(self, counted: Tensor) -> float:
        return math.sqrt(super().value(counted))


@register("metric", "mae")
@dataclass(frozen=True)
class Mae(Distance):
    """The mean absolute error."""

    def each(self, errors: Tensor) -> Tensor:
        return errors.abs()
