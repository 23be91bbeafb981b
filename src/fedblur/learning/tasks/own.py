"""A loss of one's own: any function (outputs, targets) -> [samples], given to `fedblur.train(config, loss=f)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.tasks.base import Task

Loss = Callable[[Tensor, Tensor], Tensor]


@register("task", "own")
@dataclass(frozen=True)
class Own(Task):
    """Learn by a function that is given in Python: `fedblur.train(config, loss=f)`."""

    function: str = ""  # its module and name, for the record; `train` writes it

    metrics: ClassVar[tuple[str, ...]] = ("loss",)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        raise ConfigError(
            "task 'own' needs its loss, which a file cannot hold: fedblur.train(config, loss=f), or fedblur.resume"
        )


class OwnLoss(Own):
    """The task with its function, which is in no file. Two are equal if their functions are."""

    given: Loss

    def __init__(self, given: Loss) -> None:
        name = getattr(given, "__qualname__", type(given).__qualname__)
        super().__init__(f"{getattr(given, '__module__', type(given).__module__)}:{name}")
        object.__setattr__(self, "given", given)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnLoss) and self.given == other.given

    def __hash__(self) -> int:
        return hash(self.given)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses: Any = self.given(outputs, targets)
        if not isinstance(losses, Tensor) or losses.shape != outputs.shape[:1] or not losses.is_floating_point():
            found = f"shape {[*losses.shape]}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            raise ConfigError(
                f"loss {self.function} returns {found} for {len(outputs)} samples; it must return one number per "
                'sample, [samples] (torch\'s losses: reduction="none", then the mean over all but the first dimension)'
            )
        return losses
