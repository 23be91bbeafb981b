"""The contract of a method: pure functions on one client's tensors, safe under `vmap`, no branches on data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.registry import declare_base
from fedblur.data.population import Inputs
from fedblur.learning.module_function import Layout, Params

if TYPE_CHECKING:
    from fedblur.core.config import LocalTraining
    from fedblur.learning.tasks import Task

Gradient = Callable[[Params], Params]
ClipNorm = Tensor | float  # a tensor in compiled code, which would otherwise be compiled again for every value
Score = Literal["none", "full", "last"]
# Every other hook changes local steps. A hook that is missing here costs a compilation, never its effect.
_OUTSIDE_STEPS = {
    "score_batch", "shape_update", "check", "check_task", "steers_steps", "bends_gradient", "needs_personal",
    "next_state",
}  # fmt: skip


class Method:
    """Hooks of local training; each does nothing unless a part overrides it.

    `delta` is the shared part alone: what stays on a client is none of a method's business, but for `moves`.
    """

    part_name: ClassVar[str]  # set by @register

    @property
    def score_batch(self) -> Score:
        """On which samples `shape_update` wants the gradient at the end point: none, all local ones, the last batch."""
        return "none"

    @property
    def views(self) -> int:
        """The number of copies of each sample in a step; `view` makes them differ."""
        return 1

    @property
    def steers_steps(self) -> bool:
        """Whether local steps differ with this method; if not, they are compiled without it and shared."""
        hooks = {name for name in vars(Method) if not name.startswith("_")} - _OUTSIDE_STEPS
        return any(getattr(type(self), hook) is not getattr(Method, hook) for hook in hooks)

    @property
    def bends_gradient(self) -> bool:
        """Whether `wrap_gradient` must see the gradient itself, and not −η times it."""
        return type(self).wrap_gradient is not Method.wrap_gradient

    @property
    def needs_personal(self) -> bool:
        """Whether the method makes no sense without personal parameters."""
        return False

    def check(self, local: LocalTraining) -> None:
        """Refuse settings that do not fit the local training."""

    def check_task(self, task: Task) -> None:
        """Refuse a task that the method is not about. One that reads logits needs classes."""
        reads_logits = type(self).adjust is not Method.adjust or type(self).weigh is not Method.weigh
        if reads_logits and not task.classes:
            raise ConfigError(
                f"method {self.part_name!r} reads the logits of classes, which task {task.part_name!r} does not have; "
                "drop one of them"
            )

    def view(self, inputs: Inputs, seed: Tensor, step: Tensor | int) -> Inputs:
        """Return a step's inputs [rows, *shape], perhaps disturbed: row i by (seed, step, i) and nothing else."""
        return inputs

    def adjust(self, logits: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
        """Return a step's logits [rows, classes] as the loss reads them; rows that are not valid are padding."""
        return logits

    def weigh(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Weigh each row in the loss's gradient, given the logits as the loss reads them; 0 is padding."""
        return weights

    def wrap_gradient(self, gradient: Gradient) -> Gradient:
        """Return the loss's gradient as a function of the parameters, perhaps taken elsewhere (sharpness-aware)."""
        return gradient

    def gradient_term(self, delta: Params, clip_norm: ClipNorm) -> Params | None:
        """Return what is added to the loss's gradient at this step."""
        return None

    def after_step(self, delta: Params, clip_norm: ClipNorm) -> Params:
        """Return the difference after a step, perhaps moved."""
        return delta

    def moves(self, step: Tensor | int) -> tuple[Tensor | bool, Tensor | bool]:
        """Return whether this step moves (the shared part, the client's personal part)."""
        return True, True

    def client_state(self, layout: Layout) -> Mapping[str, tuple[int, ...]]:
        """Declare what the method remembers on each client: shapes by name, zeros before its first round.

        It never leaves the client (docs/personal.md). `layout`: of the shared part.
        """
        return {}

    def state_term(self, state: Params, delta: Params, clip_norm: ClipNorm) -> Params | None:
        """Return what is added to the loss's gradient at this step, given what the client remembers."""
        return None

    def next_state(self, state: Params, delta: Params, clip_norm: ClipNorm) -> Params:
        """Return what the client remembers after its local steps; `delta` is not yet shaped or clipped."""
        return state

    def shape_update(self, delta: Params, gradient: Params, layout: Layout) -> Params:
        """Return the update before it is clipped."""
        return delta


declare_base("method", Method)


def global_norm(delta: Params) -> Tensor:
    """Return one l2 norm over all tensors, never one per layer. float32: it steers training, not privacy."""
    # Row by row: a compiler can then fuse the sums into the code that writes the tensors.
    squares = [tensor.square().sum(-1).sum() for tensor in delta.values()]
    return torch.stack(squares).sum().sqrt()
