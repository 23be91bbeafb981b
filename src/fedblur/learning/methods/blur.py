"""BLUR, bounded local update regularisation (Cheng et al. 2022, Eq. 6): pull the update back once it leaves the ball.

The penalty (λ/2)·max(0, ‖Δ‖² − S²) has the gradient λΔ outside the ball and 0 inside (0 is also our choice on the
sphere, where it is not smooth). With λ = inf the update is projected onto the ball after each step, which is what
the constrained problem asks for; at the paper's λ ≤ 0.8 the penalty shrinks an update by 16 % or so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.methods.base import ClipNorm, Method, global_norm
from fedblur.learning.module_function import Params

if TYPE_CHECKING:
    from fedblur.core.config import LocalTraining


@register("method", "blur")
@dataclass(frozen=True)
class Blur(Method):
    """Pull each local update towards the clipping ball; with strength = inf, hold it inside."""

    strength: float = 0.4  # how hard updates outside the ball are pulled back: λ; inf: projection

    def __post_init__(self) -> None:
        if not self.strength >= 0:
            raise ConfigError(f"method.blur.strength={self.strength} must be 0 or more (inf: projection)")

    def check(self, local: LocalTraining) -> None:
        reach = self.strength * local.learning_rate
        if math.isfinite(self.strength) and reach >= 1:
            raise ConfigError(
                f"method.blur.strength={self.strength} times local.learning_rate={local.learning_rate} is {reach:g}, "
                "must be below 1 or the update overshoots; use a smaller strength, or inf for projection"
            )

    def gradient_term(self, delta: Params, clip_norm: ClipNorm) -> Params | None:
        if math.isinf(self.strength):
            return None
        norm = global_norm(delta)
        outside = (norm > clip_norm).to(norm.dtype)  # 1[‖Δ‖ > S]
        return {name: self.strength * outside * tensor for name, tensor in delta.items()}  # λ·1[..]·Δ, no factor 2

    def after_step(self, delta: Params, clip_norm: ClipNorm) -> Params:
        if math.isfinite(self.strength):
            return delta
        factor = torch.clamp(clip_norm / global_norm(delta), max=1.0)  # norm 0 gives inf, clamped to 1
        return {name: factor * tensor for name, tensor in delta.items()}
