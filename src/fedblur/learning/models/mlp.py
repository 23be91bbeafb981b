"""A multilayer perceptron on the flattened sample."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.models.base import flat_size, glorot_


@register("model", "mlp")
@dataclass(frozen=True)
class Mlp:
    """Fits any shape. Dense layers with ReLU between them."""

    hidden: tuple[int, ...] = (32,)  # widths of the hidden layers

    def __post_init__(self) -> None:
        if not self.hidden or min(self.hidden) < 1:
            raise ConfigError(
                f"model.mlp.hidden={list(self.hidden)} must be widths of 1 or more, like [32]; "
                'a model without hidden layers is "logistic"'
            )

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        for index, (inputs, outputs) in enumerate(pairwise((flat_size(shape), *self.hidden)), start=1):
            layers[f"dense{index}"] = nn.Linear(inputs, outputs)
            layers[f"relu{index}"] = nn.ReLU()
        layers["head"] = nn.Linear(self.hidden[-1], classes)
        module = nn.Sequential(layers)
        glorot_(module)
        return module
