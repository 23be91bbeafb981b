"""DP-FedSAM (Shi et al. 2023): local steps with the gradient at the worst point nearby (SAM, Foret et al. 2021).

The gradient g at w is replaced by the one at w + ρ·g/‖g‖, with one norm over all tensors. ASAM (Kwon et al. 2021)
measures distance relative to the weights: w + ρ·T²g/‖Tg‖ with T = |w| + 0.01. The update is clipped as any other, by
one global norm; the authors' code clips each tensor to S on its own, which needs √(number of tensors) the noise.
A step costs two gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.methods.base import Gradient, Method, global_norm
from fedblur.learning.module_function import Params

_STABILISER = 0.01  # η of ASAM: weights at zero can move too
_SMALLEST = 1e-12  # a gradient of zero (a padded batch) stays where it is


@register("method", "sam")
@dataclass(frozen=True)
class Sam(Method):
    """Seek flat minima: step with the gradient at the worst point within a radius."""

    radius: float = 0.5  # ρ: how far each step looks for a worse loss
    adaptive: bool = False  # ASAM: the radius grows with each weight

    def __post_init__(self) -> None:
        if not 0 <= self.radius < math.inf:
            raise ConfigError(f"method.sam.radius={self.radius} must be 0 or more and finite")

    @property
    def bends_gradient(self) -> bool:
        return self.radius > 0

    def wrap_gradient(self, gradient: Gradient) -> Gradient:
        if not self.radius:
            return gradient

        def at_worst_nearby(theta: Params) -> Params:
            """Return the gradient at w + ρ·T²g/‖Tg‖; T = 1 for SAM."""
            scale = {name: tensor.abs() + _STABILISER if self.adaptive else 1.0 for name, tensor in theta.items()}
            scaled = {name: scale[name] * tensor for name, tensor in gradient(theta).items()}
            factor = self.radius / global_norm(scaled).clamp(min=_SMALLEST)
            return gradient({name: theta[name] + factor * scale[name] * scaled[name] for name in theta})

        return at_worst_nearby
