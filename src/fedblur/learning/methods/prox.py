"""FedProx's proximal term (Li et al. 2020): (μ/2)‖Δ‖² on the local loss, inside the ball and outside."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.methods.base import ClipNorm, Method
from fedblur.learning.module_function import Params

if TYPE_CHECKING:
    from fedblur.core.config import LocalTraining


@register("method", "prox")
@dataclass(frozen=True)
class Prox(Method):
    """Keep local models near the one that was received."""

    strength: float = 0.1  # μ: weight of the term that pulls a client towards its start

    def __post_init__(self) -> None:
        if not 0 <= self.strength < math.inf:
            raise ConfigError(f"method.prox.strength={self.strength} must be 0 or more and finite")

    def check(self, local: LocalTraining) -> None:
        if self.strength * local.learning_rate >= 1:
            raise ConfigError(
                f"method.prox.strength={self.strength} times local.learning_rate={local.learning_rate} must be below 1"
            )

    def gradient_term(self, delta: Params, clip_norm: ClipNorm) -> Params:
        return {name: self.strength * tensor for name, tensor in delta.items()}
