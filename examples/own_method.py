"""A new method in one file: step back onto the clip ball after every local step.

    fedblur run --plugin examples/own_method.py --method project --epsilon 2
    fedblur run examples/own_method.toml                                       # the same, from a file

The contract (fedblur.Method): pure functions on one client's tensors, no branch on data, so that a whole block of
clients runs at once. Whatever a method does, the clip comes after it: it cannot weaken the privacy guarantee.
"""

from dataclasses import dataclass

import torch

from fedblur import register
from fedblur.core.errors import ConfigError
from fedblur.learning.methods import Method, global_norm


@register("method", "project")
@dataclass(frozen=True)
class Project(Method):
    """Projected local SGD: the difference never leaves a ball of `radius` clip norms."""

    radius: float = 0.99  # --set method.project.radius=2

    def __post_init__(self):
        if not self.radius > 0:
            raise ConfigError(f"method.project.radius={self.radius} must be above 0")

    def after_step(self, delta, clip_norm):
        scale = torch.clamp(self.radius * clip_norm / (global_norm(delta) + 1e-12), max=1.0)  # [] of one client
        return {name: scale * tensor for name, tensor in delta.items()}
