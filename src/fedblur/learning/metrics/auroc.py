"""The area under the ROC curve: how often a sample of a class is scored above one that is not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedblur.core.registry import register
from fedblur.learning.metrics.base import Metric, has_classes
from fedblur.learning.metrics.shares import demand_classes_or_labels


@register("metric", "auroc")
@dataclass(frozen=True)
class Auroc(Metric):
    """The mean over classes or labels of the area under the ROC curve. A half is chance."""

    keeps_rows: ClassVar[bool] = True

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        demand_classes_or_labels(self, outputs, targets)

    def count(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return scores and truths side by side, [rows, 2 · labels]; NaN is scored as the worst."""
        if has_classes(outputs, targets):
            scores, classes = outputs.softmax(-1).flatten(0, -2), targets.flatten()
            scores, classes = scores[classes >= 0], classes[classes >= 0]
            truth = torch.nn.functional.one_hot(classes, outputs.shape[-1])
        else:
            scores, truth = outputs.reshape(len(targets), -1), (targets.reshape(len(targets), -1) > 0).long()
        worst = torch.where(truth > 0, -math.inf, math.inf)
        return torch.cat([torch.where(scores.isnan(), worst, scores.double()), truth.double()], 1)

    def value(self, counted: Tensor) -> float:
        from torchmetrics.functional.classification import binary_auroc  # slow to import

        scores, truth = counted.chunk(2, 1)
        areas = []
        for score, label in zip(scores.T, truth.T.long(), strict=True):
            if 0 < int(label.sum()) < len(label):  # without both there is no curve
                places = torch.unique(score, return_inverse=True)[
                    1
                ].double()  # scores that are no probabilities stay apart
                areas.append(float(binary_auroc(places / max(1, len(places)), label, validate_args=False)))
        return sum(areas) / len(areas) if areas else math.nan
