"""Shares of samples that are right: accuracy, top-k, F1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.metrics.base import Metric, has_classes, says_yes_or_no, unreadable

_LAST = 2**62  # a rank beyond any k


def demand_classes_or_labels(metric: Metric, outputs: Tensor, targets: Tensor) -> None:
    """Refuse targets that are neither classes nor yes or no."""
    fits = has_classes(outputs, targets) or (
        math.prod(outputs.shape[1:]) == math.prod(targets.shape[1:]) and says_yes_or_no(targets)
    )
    if not fits:
        raise ConfigError(f"metric {metric.part_name!r} is about classes, or targets 0 and 1, which these are not")


@register("metric", "accuracy")
@dataclass(frozen=True)
class Accuracy(Metric):
    """The share of samples, tokens or labels that are predicted right."""

    percent: ClassVar[bool] = True

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        demand_classes_or_labels(self, outputs, targets)

    def count(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if has_classes(outputs, targets):
            right, real = outputs.argmax(-1) == targets, targets >= 0
        else:
            right, real = (
                (outputs.reshape(targets.shape) > 0) == (targets > 0),
                torch.ones_like(targets, dtype=torch.bool),
            )
        broken = unreadable(outputs).view(-1, *[1] * (targets.dim() - 1))
        return torch.stack([(right & real & ~broken).sum(), real.sum()]).double()


@register("metric", "top_k")
@dataclass(frozen=True)
class TopK(Metric):
    """The share of samples or tokens whose class is among the k most likely ones."""

    k: int = 5  # how many of the most likely classes count as right

    percent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"metric.top_k.k={self.k} must be at least 1")

    @property
    def key(self) -> str:
        return f"top_{self.k}"

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        demand_ranks(self, outputs, targets)

    def count(self, outputs: Tensor, targets: Tensor) -> Tensor:
        ranks = ranks_of(outputs, targets)
        return torch.stack([(ranks <= self.k).sum(), ranks.new_tensor(len(ranks))]).double()


@register("metric", "f1")
@dataclass(frozen=True)
class F1(Metric):
    """The harmonic mean of precision and recall."""

    average: Literal["macro", "micro"] = "macro"  # the mean over classes or labels that occur, or of all decisions

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        demand_classes_or_labels(self, outputs, targets)

    def count(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return true positives, false positives and false negatives of each class or label, [3 · classes]."""
        from torchmetrics.functional import classification  # slow to import

        broken = unreadable(outputs)
        if has_classes(outputs, targets):
            classes = outputs.shape[-1]
            guesses = outputs.argmax(-1)
            wrong = torch.where(targets == 0, 1, 0)  # any class but the right one
            guesses = torch.where(broken.view(-1, *[1] * (targets.dim() - 1)), wrong, guesses)
            real = targets >= 0
            found = classification.multiclass_stat_scores(
                guesses[real], targets[real], num_classes=classes, average=None, validate_args=False
            )
        else:
            truth = (targets > 0).flatten(1).long() if targets.dim() > 1 else (targets > 0).long()[:, None]
            guesses = torch.where(broken[:, None], 1 - truth, (outputs.reshape(truth.shape) > 0).long())
            found = classification.multilabel_stat_scores(
                guesses, truth, num_labels=truth.shape[1], average=None, validate_args=False
            )
        found = found.view(-1, 5)  # true positives, false positives, true negatives, false negatives, support
        return found[:, [0, 1, 3]].T.flatten().double()

    def value(self, counted: Tensor) -> float:
        hits, false, missed = counted.view(3, -1)
        if self.average == "micro":
            hits, false, missed = hits.sum(0, keepdim=True), false.sum(0, keepdim=True), missed.sum(0, keepdim=True)
        whole = 2 * hits + false + missed
        return float((2 * hits / whole)[whole > 0].mean()) if bool((whole > 0).any()) else math.nan


def demand_ranks(metric: Metric, outputs: Tensor, targets: Tensor) -> None:
    """Refuse targets that are not one of several classes, tokens or items."""
    if not has_classes(outputs, targets):
        raise ConfigError(f"metric {metric.part_name!r} is about one class, token or item of several")


def ranks_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the rank of each real target among all classes or items, 1 is the first; ties count against it.

    NaN has the last rank of all, beyond any k.
    """
    scores, own = outputs.flatten(0, -2), targets.flatten()
    broken = scores.isnan().any(-1)
    scores = scores.nan_to_num(nan=0.0)
    mine = scores.gather(-1, own.clamp(min=0)[:, None])
    ranks = torch.where(broken, _LAST, (scores >= mine).sum(-1))
    return ranks[own >= 0]
