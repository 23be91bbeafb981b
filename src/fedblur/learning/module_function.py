"""A module as a function of one flat vector: `functional_call(module, layout.unflatten(vector), (x,))`.

In: any nn.Module. Out: a Layout, which says where each trainable tensor lies in the vector [d]. This vector
is all that is shared, clipped and noised. Frozen parameters and buffers are not in it: they are constants, which all
clients of a block share. `model_checks` refuses a model that changes them in training.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedblur.core.errors import ModelError, nearest
from fedblur.core.switches import accelerated
from fedblur.data.population import Inputs, each_input

Params = dict[str, Tensor]
Forward = Callable[[Params, Inputs], Tensor]  # parameters, inputs -> outputs


@dataclass(frozen=True)
class Layout:
    """The place of each trainable tensor in the flat vector: in registration order, tied tensors once."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    total: int  # d

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        tensors = trainable_tensors(module)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
        ends = [0]
        for shape in shapes:
            ends.append(ends[-1] + math.prod(shape))
        return cls(tuple(tensors), shapes, tuple(ends[:-1]), ends[-1])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of values of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    def flatten(self, params: Mapping[str, Tensor]) -> Tensor:
        """Flatten [*lead, *shape] for each name to [*lead, d], a copy. Leading dimensions must agree."""
        flat = []
        for name, shape, size in zip(self.names, self.shapes, self.sizes, strict=True):
            tensor = params[name]
            lead = tensor.shape[: tensor.ndim - len(shape)]
            flat.append(tensor.reshape((*lead, size)))
        return torch.cat(flat, dim=-1)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Return [*lead, d] as views [*lead, *shape] for each name."""
        # split, not slices: its gradient is one concatenation instead of one vector of d zeros per tensor.
        pieces = torch.split_with_sizes(vector, self.sizes, dim=-1)
        lead = vector.shape[:-1]
        return {
            name: piece.view((*lead, *shape))
            for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)
        }

    def modules(self) -> dict[str, tuple[str, ...]]:
        """Return tensor names by the module that owns them: {"conv1": ("conv1.weight", "conv1.bias"), ...}."""
        groups: dict[str, tuple[str, ...]] = {}
        for name in self.names:
            owner = name.rpartition(".")[0]
            groups[owner] = (*groups.get(owner, ()), name)
        return groups


class ModuleFunction:
    """A module as a function of its trainable tensors, in the mode (training or evaluation) that the module is in."""

    def __init__(self, module: nn.Module, half: bool = False) -> None:
        self.module = module
        self.half = half

    def __call__(self, theta: Params, x: Inputs) -> Tensor:
        if not self.half:
            return self._call(theta, x)
        layers: AbstractContextManager[object] = nullcontext()
        if accelerated():  # the model's convolutions are our kernels
            from fedblur.accel.kernels.fused_layers import PerClientLayers

            layers = PerClientLayers()
        with layers:
            halved = {name: tensor.bfloat16() for name, tensor in theta.items()}
            return self._call(halved, each_input(x, lambda x: x.bfloat16() if x.is_floating_point() else x)).float()

    def _call(self, theta: Params, x: Inputs) -> Tensor:
        # several inputs go by the names of the module's arguments
        given: tuple[tuple[Tensor, ...], dict[str, Tensor]] = ((), x) if isinstance(x, dict) else ((x,), {})
        outputs: Tensor = functional_call(self.module, theta, *given)
        logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)  # of transformers' models
        return logits if isinstance(logits, Tensor) else outputs

    def replica(self) -> ModuleFunction:
        """Return the same function for another thread: a call puts its tensors into the module for a moment."""
        return ModuleFunction(copied(self.module, share=True), self.half)

    @cached_property
    def evaluating(self) -> ModuleFunction:
        """The same function in evaluation mode; it has a module of its own, since modes are flags of layers."""
        return ModuleFunction(copied(self.module, share=True).eval(), self.half)


def evaluating(forward: Forward) -> Forward:
    """Return a forward function in evaluation mode; one that is no module has no modes."""
    found: Forward = getattr(forward, "evaluating", forward)
    return found


def copied(module: nn.Module, share: bool = False) -> nn.Module:
    """Copy a module. `share`: the copy has layers of its own, and the same parameters and buffers."""
    _refresh_recurrent(module)
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())} if share else {}
    try:
        return copy.deepcopy(module, shared)
    except Exception as error:  # whatever a foreign layer raises, the user needs the same one line
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"the model cannot be copied: {reason}; copy.deepcopy(module) must work") from error


def _refresh_recurrent(module: nn.Module) -> None:
    """Let nn.LSTM and its kin forget the tensors of their last call, which they keep in a list of their own."""
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase):
            layer.to(next(layer.parameters()).device)  # which makes that list again


def as_function(module: nn.Module, half: bool = False) -> ModuleFunction:
    """Wrap the module as a function. `half`: compute in bfloat16 (weights and sums stay float32), with our kernels."""
    return ModuleFunction(module, half)


def initial_vector(module: nn.Module, layout: Layout | None = None) -> Tensor:
    """Return the module's trainable tensors, or those of a layout, as one float32 vector [d]; a copy."""
    tensors = {name: tensor.detach() for name, tensor in trainable_tensors(module).items()}
    return (layout or Layout.of(module)).flatten(tensors).float()


def load_vector(module: nn.Module, vector: Tensor, layout: Layout | None = None) -> None:
    """Write a flat vector back into a module, for those who want the trained nn.Module itself."""
    layout = layout or Layout.of(module)
    if tuple(vector.shape) != (layout.total,):
        raise ModelError(
            f"a vector of shape {tuple(vector.shape)} does not fit a model with {layout.total} trainable "
            "parameters; pass the vector that was trained with this model"
        )
    with torch.no_grad():
        tensors = trainable_tensors(module)
        for name, value in layout.unflatten(vector).items():
            tensors[name].copy_(value)
    _refresh_recurrent(module)


def choose_trainable(module: nn.Module, patterns: Sequence[str]) -> None:
    """Train the parameters whose names match one of these patterns (`*.lora_*`), and freeze all others."""
    named = dict(module.named_parameters(remove_duplicate=False))  # tied ones by all their names
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ModelError(
                f"trainable={pattern!r} matches no parameter of the model: {nearest(pattern, tuple(named))}"
            )
    chosen = {id(named[name]) for name in named if any(fnmatchcase(name, pattern) for pattern in patterns)}
    for tensor in named.values():
        tensor.requires_grad_(id(tensor) in chosen)


def trainable_tensors(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name; tied ones once."""
    return {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}


def add(a: Params, b: Params, scale: float = 1.0) -> Params:
    """Return a + scale·b."""
    return {name: torch.add(a[name], b[name], alpha=scale) for name in a}


def join(a: Params, b: Params) -> Params:
    """Return a + b; where only one of them has a tensor, that one's."""
    both = {name: torch.add(tensor, b[name]) for name, tensor in a.items() if name in b}
    return a | b | both


def add_where(chosen: Tensor, a: Params, b: Params) -> Params:
    """Return a + b for the clients that are chosen, a for the others."""
    added = add(a, b)
    lead, ones = chosen.shape, chosen.dim()
    return {
        name: torch.where(chosen.view(*lead, *[1] * (tensor.dim() - ones)), added[name], tensor)
        for name, tensor in a.items()
    }


def add_to(a: Params, b: Params) -> Params:
    """Add into the memory of `a`, which its owner does not read again."""
    return {name: tensor.add_(b[name]) for name, tensor in a.items()}


def zeros_for(tensor: Tensor, lead: torch.Size) -> Tensor:
    """Return zeros for each client; for one client in the tensor's own memory format."""
    return tensor.new_zeros(*lead, *tensor.shape) if lead else torch.zeros_like(tensor)
