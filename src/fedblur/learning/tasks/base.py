"""The contract of a task: what outputs and targets are, and each sample's loss. Pure, safe under `vmap`.

@register("task", "quartic")
@dataclass(frozen=True)
class Quartic(Task):
    metrics: ClassVar = ("rmse",)

    def loss(self, outputs, targets):
        return (outputs.reshape(targets.shape) - targets) ** 4
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from fedblur.core.errors import DataError
from fedblur.core.registry import declare_base

Shape = tuple[int, ...]


class Task:
    """A kind of learning, of which `loss` is all that it must have. Row i of outputs and targets is sample i."""

    part_name: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]] = ()
    """The metrics that a run reports unless its configuration names others; the first one is the headline."""
    classes: ClassVar[bool] = False
    """Whether a sample has one class and outputs are one logit per class. Methods that read logits need that."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's loss, [samples]. Sample i's depends on row i of both and on nothing else."""
        raise NotImplementedError

    def shapes(self, targets: Shape, classes: int) -> tuple[Shape, ...]:
        """Return the shapes that one sample's output may have; none: any, as far as `loss` takes them.

        `targets`: the shape of one sample's target. `classes`: how many the data have, 0 where they have none. The
        last dimension of the first shape is the width of built-in models.
        """
        return ()

    def check_targets(self, name: str, targets: Tensor, classes: int) -> None:
        """Refuse targets of another type, shape or range than the task's with a DataError, by `name`."""
        if targets.is_floating_point() and not bool(torch.isfinite(targets).all()):
            raise DataError(f"{name} has NaN or infinite values; drop these samples, or replace them first")

    def slope(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return ∂(Σ weight·loss)/∂outputs, exactly 0 in rows of weight 0: those are padding, whatever their loss is.

        A task may override it where a formula is faster.
        """

        def total(outputs: Tensor) -> Tensor:
            return self.loss(outputs, targets).sum()

        slopes = torch.func.grad(total)(outputs)
        weights = weights.reshape(-1, *[1] * (outputs.dim() - 1))
        return torch.where(weights != 0, weights * slopes, 0)

    def total_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of all samples' losses in float64, for evaluation."""
        return self.loss(outputs, targets).double().sum()

    def merge(self, views: Tensor) -> Tensor:
        """Return one output of several views of the same samples, [views, samples, ...] to [samples, ...]."""
        return views[0]

    def width(self, targets: Shape, classes: int) -> int:
        """Return the number of outputs of a built-in model."""
        shapes = self.shapes(targets, classes)
        if shapes:
            return shapes[0][-1] if shapes[0] else 1
        return classes or max(1, math.prod(targets))


declare_base("task", Task)


def like_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs in the shape of targets: models may say [samples, 1] for one number each."""
    return outputs.reshape(targets.shape)


def over_samples(each: Tensor) -> Tensor:
    """Return the mean over all numbers of a sample, [samples]."""
    return each.flatten(1).mean(1) if each.dim() > 1 else each
