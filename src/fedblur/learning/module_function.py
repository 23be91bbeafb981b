"""A module as a function of one flat vector: `functional_call(module, layout.unflatten(vector), (x,))`.

In: any nn.Module. Out: a Layout, which says where each trainable tensor lies in the vector [d]. This vector
is all that is shared, clipped and noised. Frozen parameters are not in it and are constants; buffers, which
training could change behind its back, are refused by `check_model`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy

from fedblur.core.accel_switch import accelerated
from fedblur.core.errors import ModelError
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
        tensors = _trainable(module)
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
        return outputs

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
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())} if share else {}
    try:
        return copy.deepcopy(module, shared)
    except Exception as error:  # whatever a foreign layer raises, the user needs the same one line
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"the model cannot be copied: {reason}; copy.deepcopy(module) must work") from error


def as_function(module: nn.Module, half: bool = False) -> ModuleFunction:
    """Wrap the module as a function. `half`: compute in bfloat16 (weights and sums stay float32), with our kernels."""
    return ModuleFunction(module, half)


def initial_vector(module: nn.Module) -> Tensor:
    """Return the module's trainable tensors as one float32 vector [d]; a copy."""
    tensors = {name: tensor.detach() for name, tensor in _trainable(module).items()}
    return Layout.of(module).flatten(tensors).float()


def load_vector(module: nn.Module, vector: Tensor) -> None:
    """Write a flat vector back into a module, for those who want the trained nn.Module itself."""
    layout = Layout.of(module)
    if tuple(vector.shape) != (layout.total,):
        raise ModelError(
            f"a vector of shape {tuple(vector.shape)} does not fit a model with {layout.total} trainable "
            "parameters; pass the vector that was trained with this model"
        )
    with torch.no_grad():
        for tensor, value in zip(_trainable(module).values(), layout.unflatten(vector).values(), strict=True):
            tensor.copy_(value)


def check_model(
    module: nn.Module,
    shape: tuple[int, ...],
    classes: int,
    zeros: Inputs | None = None,
    outputs: Sequence[tuple[int, ...]] | None = None,
) -> Tensor:
    """Refuse what cannot be trained privately, or does not fit the data, before anything is spent.

    Guarantees for a model that passes: no buffers, no BatchNorm; at least one trainable parameter, all of
    them float32 and finite; logits [batch, classes] for samples of this shape. The module is left as it
    was. Return the outputs of two samples of zeros.

    `zeros`: these two samples, where they are not floats of this shape. `outputs`: the shapes that one sample's output
    may have, where that is not [classes]; none: any.
    """
    for name, layer in module.named_modules():
        label = f"{name or 'the model'} ({type(layer).__name__})"
        buffer = next((key for key, _ in layer.named_buffers(recurse=False)), None)
        if isinstance(layer, _NormBase) and buffer is not None:
            raise ModelError(f"replace {label} by nn.GroupNorm: running statistics are client data outside the clip")
        if isinstance(layer, _BatchNorm):
            raise ModelError(f"replace {label} by nn.GroupNorm: batch statistics would mix samples and padding")
        if buffer is not None:
            raise ModelError(
                f"{label} has a buffer {buffer!r}, which would be outside the clip: make it a constant or a parameter"
            )
    lazy = next((name for name, tensor in module.named_parameters() if is_lazy(tensor)), None)
    if lazy is not None:
        raise ModelError(f"parameter {lazy} has no shape yet (lazy module): run one batch through the model first")
    trainable = _trainable(module)
    if not trainable:
        raise ModelError("the model has no trainable parameters: set requires_grad=True on what should be trained")
    for name, tensor in trainable.items():
        if tensor.dtype != torch.float32:
            raise ModelError(f"parameter {name} is {tensor.dtype}, but sums and noise need float32: call model.float()")
    for name, tensor in module.named_parameters():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"parameter {name} has NaN or infinite values: initialise it again")
    modes = [(layer, layer.training) for layer in module.modules()]  # some may be in eval() on purpose
    device = next(module.parameters()).device
    zeros = torch.zeros(2, *shape) if zeros is None else zeros
    try:
        with torch.no_grad():
            module.eval()
            output = ModuleFunction(module)({}, each_input(zeros, lambda x: x.to(device)))
    except Exception as error:  # whatever a foreign forward raises, the user needs the same one line
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"the model cannot read samples of shape {tuple(shape)}: {reason}; make its first layer fit"
        ) from error
    finally:
        for layer, mode in modes:
            layer.training = mode
    if not isinstance(output, Tensor):
        raise ModelError(f"the model returns a {type(output).__name__}: it must return one tensor of logits")
    allowed = [(2, *form) for form in ([(classes,)] if outputs is None else outputs)]
    if allowed and tuple(output.shape) not in allowed:
        why = f"classes={classes}: it must be" if (2, classes) in allowed else "the task's targets need"
        forms = " or ".join(map(str, allowed))
        raise ModelError(f"the model's output for 2 samples has shape {tuple(output.shape)}, but {why} {forms}")
    return output


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}


def add(a: Params, b: Params, scale: float = 1.0) -> Params:
    """Return a + scale·b."""
    return {name: torch.add(a[name], b[name], alpha=scale) for name in a}


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
