"""Multinomial logistic regression: one dense layer on the flattened sample."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from fedblur.core.registry import register
from fedblur.learning.models.base import flat_size


@register("model", "logistic")
@dataclass(frozen=True)
class Logistic:
    """Fits any shape. The fewest parameters, so the least noise."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        head = nn.Linear(flat_size(shape), classes)
        # The loss is convex: zero is a good start and needs no luck.
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return nn.Sequential(OrderedDict(flatten=nn.Flatten(), head=head))
