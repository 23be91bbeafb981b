"""Generalised cross-entropy (Zhang and Sabuncu 2018): samples that the model gets wrong count less.

The loss of a sample is (1 − p^q)/q with p the probability of its label: cross-entropy as q → 0, the mean absolute error
at q = 1. Its gradient is p^q times that of cross-entropy. The idea: under cross-entropy a few samples of a client
that look like another class can fill most of its clip norm, in directions that no other client shares. The clip comes
later.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.methods.base import Method


@register("method", "gce")
@dataclass(frozen=True)
class GeneralisedCrossEntropy(Method):
    """Let samples count less that the model gets wrong."""

    power: float = 0.2  # q: 0 is cross-entropy, 1 the mean absolute error

    def __post_init__(self) -> None:
        if not 0 <= self.power <= 1:
            raise ConfigError(f"method.gce.power={self.power} must be in [0, 1]")

    def weigh(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        likelihood = torch.log_softmax(logits.float(), -1).gather(-1, labels[:, None])[:, 0]
        return weights * (self.power * likelihood).exp()
