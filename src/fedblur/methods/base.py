"""The contract of a method: pure functions on one client's tensors, safe under `vmap`, no branches on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fedblur.functional import Layout, Params

if TYPE_CHECKING:
    from fedblur.config import LocalTraining

Gradient = Callable[[Params], Params]
ClipNorm = Tensor | float  # a tensor in compiled code, which would otherwise be made anew for every value
Score = Literal["none", "full", "last"]


class Method:
    """Hooks of local training; each does nothing unless a part overrides it."""

    @property
    def score_batch(self) -> Score:
        """On which samples `shape_update` wants the gradient at the end point: none, all local ones, the last batch."""
        return "none"

    @property
    def views(self) -> int:
        """How many copies of each sample a step sees; `view` makes them differ."""
        return 1

    @property
    def steers_steps(self) -> bool:
        """Whether local steps differ with this method; if not, they are compiled without it and shared."""
        hooks = ("views", "view", "adjust", "weigh", "wrap_gradient", "gradient_term", "after_step")
        return any(getattr(type(self), hook) is not getattr(Method, hook) for hook in hooks)

    @property
    def bends_gradient(self) -> bool:
        """Whether `wrap_gradient` must see the gradient itself, and not −η times it."""
        return type(self).wrap_gradient is not Method.wrap_gradient

    def check(self, local: LocalTraining) -> None:
        """Refuse settings that do not fit the local training."""

    def view(self, inputs: Tensor, seed: Tensor, step: Tensor | int) -> Tensor:
        """A step's inputs [rows, *shape], perhaps disturbed: row i by what (seed, step, i) say and nothing else."""
        return inputs

    def adjust(self, logits: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
        """A step's logits [rows, classes] as the loss reads them; rows that are not valid are padding."""
        return logits

    def weigh(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """How much each row counts in the loss's gradient, given the logits as the loss reads them; 0 is padding."""
        return weights

    def wrap_gradient(self, gradient: Gradient) -> Gradient:
        """The loss's gradient as a function of the parameters, perhaps taken elsewhere (sharpness-aware steps)."""
        return gradient

    def gradient_term(self, delta: Params, clip_norm: ClipNorm) -> Params | None:
        """What is added to the loss's gradient at this step."""
        return None

    def after_step(self, delta: Params, clip_norm: ClipNorm) -> Params:
        """The difference after a step, perhaps moved."""
        return delta

    def shape_update(self, delta: Params, gradient: Params, layout: Layout) -> Params:
        """The update before it is clipped."""
        return delta


def global_norm(delta: Params) -> Tensor:
    """One l2 norm over all tensors, never one per layer. float32: it steers training, it does not bound privacy."""
    # Row by row: a compiler can then fuse the sums into the code that writes the tensors.
    squares = [tensor.square().sum(-1).sum() for tensor in delta.values()]
    return torch.stack(squares).sum().sqrt()
