"""FedRep's alternation (Collins et al. 2021): first the personal part with the shared one fixed, then the reverse.

A personal head is fitted to the representation that was received before the representation moves: what a client sends
is then less about its head having been behind. Without this method both move in all steps (FedPer, Arivazhagan et al.
2019). It is for `personal` parameters only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.methods.base import Method

if TYPE_CHECKING:
    from fedblur.core.config import LocalTraining


@register("method", "fedrep")
@dataclass(frozen=True)
class FedRep(Method):
    """Train the personal part first, then the shared part alone."""

    steps: int = 5  # of all local steps, those that train the personal part

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"method.fedrep.steps={self.steps} must be at least 1")

    @property
    def needs_personal(self) -> bool:
        return True

    def check(self, local: LocalTraining) -> None:
        if self.steps >= local.steps:
            raise ConfigError(
                f"method.fedrep.steps={self.steps} leaves none of local.steps={local.steps} for the shared part; "
                "raise local.steps"
            )

        if local.optimizer != "sgd":
            raise ConfigError(
                f'method "fedrep" does not go with local.optimizer={local.optimizer!r}, whose means count steps '
                'that move nothing; use "sgd"'
            )

    def moves(self, step: Tensor | int) -> tuple[Tensor | bool, Tensor | bool]:
        return step >= self.steps, step < self.steps
