"""Local losses that know their own label mix (logit adjustment; "balanced softmax", Ren et al. 2020; FedLC).

A client with few classes learns above all that its classes are common: its update raises their logits and lowers all
others, which says nothing about the task, disagrees between clients, and fills the clip norm. Here the loss reads
z + τ·log(n + a), with n the counts of the labels in the batch, so that the mix is explained and need not be learned.

With τ = 1 the model learns as if all classes were equally common. Where they are not, what is missing at the end is
the logarithm of the population's mix; τ below 1 leaves that share of it in the model. The clip comes later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.methods.base import Method


@register("method", "balance")
@dataclass(frozen=True)
class Balance(Method):
    """Take the batch's own label mix out of what a step learns."""

    strength: float = 1.0  # τ: how much of the label mix is taken out; 0: nothing
    smoothing: float = 0.1  # a, the count of a class that is not there: its logit is not quite ignored

    def __post_init__(self) -> None:
        if not 0 <= self.strength < math.inf:
            raise ConfigError(f"method.balance.strength={self.strength} must be 0 or more and finite")
        if not 0 < self.smoothing < math.inf:
            raise ConfigError(f"method.balance.smoothing={self.smoothing} must be above 0 and finite")

    def adjust(self, logits: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
        classes = torch.arange(logits.shape[-1], device=labels.device)
        counts = ((labels[:, None] == classes) & valid[:, None]).sum(0)  # [classes]
        return logits + self.strength * (counts + self.smoothing).log()
