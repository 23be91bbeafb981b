"""Checks of a model before anything is spent: what cannot be trained privately, or does not fit, is refused by name.

A model is rehearsed on made-up samples: two samples in evaluation mode, then the same training step twice. So what
would be silently wrong shows before the first round: buffers that change in training, draws from a global generator,
states that a layer keeps.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy

from fedblur.core.errors import ModelError
from fedblur.data.population import Inputs, each_input
from fedblur.learning.module_function import ModuleFunction, trainable_tensors
from fedblur.learning.randomness import SeededRandomness

_CLOSE = 1e-3  # of the largest value: what two rehearsals may differ by; a draw changes far more
_CHECKPOINTING = "activation checkpointing would draw other masks when it computes again; switch it off"


def check_model(
    module: nn.Module,
    shape: tuple[int, ...],
    classes: int,
    zeros: Inputs | None = None,
    outputs: Sequence[tuple[int, ...]] | None = None,
) -> Tensor:
    """Refuse what cannot be trained privately, or does not fit the data, before anything is spent.

    Guarantees for a model that passes: at least one trainable parameter, all of them float32 and finite; buffers and
    frozen parameters stay as they are in training; no statistics of batches; all randomness follows from a seed; logits
    [batch, classes] for samples of this shape. The module and all global generators are left as they were. Return the
    outputs of two samples of zeros.

    `zeros`: these two samples, where they are not floats of this shape. `outputs`: the shapes that one sample's output
    may have, where that is not [classes]; none: any.
    """
    _check_layers(module)
    _check_parameters(module)
    device = next(module.parameters()).device
    zeros = each_input(torch.zeros(2, *shape) if zeros is None else zeros, lambda x: x.to(device))
    cannot_read, advice = f"the model cannot read samples of shape {tuple(shape)}", "make its first layer fit"
    if isinstance(zeros, dict):
        cannot_read, advice = f"the model cannot read the inputs {', '.join(zeros)}", "name them as its arguments are"
    with _explained(cannot_read, advice):
        output = _outputs_for(module, zeros)
    _check_output(output, classes, outputs)
    with _left_as_it_was(module):
        _rehearse(for_training(module), zeros)
    return cast(Tensor, output)


def _outputs_for(module: nn.Module, inputs: Inputs) -> Any:
    with _left_as_it_was(module), torch.no_grad(), SeededRandomness(None):
        return ModuleFunction(module.eval())({}, inputs)


def runs(module: nn.Module, inputs: Inputs) -> bool:
    """Return whether a model reads these samples in evaluation mode without an error; it is left as it was."""
    device = next(module.parameters()).device
    try:
        _outputs_for(module, each_input(inputs, lambda x: x.to(device)))
    except Exception:  # whatever a foreign forward raises
        return False
    return True


def for_training(module: nn.Module) -> nn.Module:
    """Put a model into training mode, except for what is in evaluation mode on purpose.

    That is a norm with running statistics, which are constants then; and in a model that is in training mode as a
    whole, every layer that is not.
    """
    on_purpose = module.training
    for layer in module.modules():
        layer.training = layer.training or not (on_purpose or _has_statistics(layer))
    return module


def constants(module: nn.Module) -> dict[str, Tensor]:
    """Return what is not trained: frozen parameters and buffers, also those that a state_dict leaves out."""
    frozen = {name: tensor.detach() for name, tensor in module.named_parameters() if not tensor.requires_grad}
    return frozen | dict(module.named_buffers())


def constants_digest(module: nn.Module) -> str:
    """Hash what is not trained; "" where all is. All who train a model together need the same constants."""
    digest, found = hashlib.sha256(), constants(module)
    for name in sorted(found):
        tensor = found[name].cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest() if found else ""


def _has_statistics(layer: nn.Module) -> bool:
    return isinstance(layer, _NormBase) and next(layer.buffers(recurse=False), None) is not None


def _label(name: str, layer: nn.Module) -> str:
    return f"{name or 'the model'} ({type(layer).__name__})"


def _check_layers(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        label = _label(name, layer)
        if _has_statistics(layer) and layer.training:
            raise ModelError(f"replace {label} by nn.GroupNorm: running statistics are client data outside the clip")
        if isinstance(layer, _BatchNorm) and not _has_statistics(layer):
            raise ModelError(f"replace {label} by nn.GroupNorm: batch statistics would mix samples and padding")


def _check_parameters(module: nn.Module) -> None:
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        lazy = next((name for name, tensor in tensors if is_lazy(tensor)), None)
        if lazy is not None:
            raise ModelError(f"{kind} {lazy} has no shape yet (lazy module): run one batch through the model first")
    trainable = trainable_tensors(module)
    if not trainable:
        raise ModelError("the model has no trainable parameters: set requires_grad=True on what should be trained")
    for name, tensor in trainable.items():
        if tensor.dtype != torch.float32:
            raise ModelError(f"parameter {name} is {tensor.dtype}, but sums and noise need float32: call model.float()")
    for name, parameter in module.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ModelError(f"parameter {name} has NaN or infinite values: initialise it again")


def _check_output(output: object, classes: int, outputs: Sequence[tuple[int, ...]] | None) -> None:
    if not isinstance(output, Tensor):
        raise ModelError(
            f"the model returns a {type(output).__name__}: it must return one tensor of logits, or an object that has "
            "one as .logits"
        )
    allowed = [(2, *form) for form in ([(classes,)] if outputs is None else outputs)]
    if allowed and tuple(output.shape) not in allowed:
        why = f"classes={classes}: it must be" if (2, classes) in allowed else "the task's targets need"
        forms = " or ".join(map(str, allowed))
        raise ModelError(f"the model's output for 2 samples has shape {tuple(output.shape)}, but {why} {forms}")


# --- the rehearsal of a training step ---


def _rehearse(module: nn.Module, zeros: Inputs) -> None:
    """Take the same training step twice, and refuse a model that leaves a trace or gives two results."""
    generator = torch.Generator().manual_seed(0)

    def made_up(x: Tensor) -> Tensor:  # tokens stay 0: which others there are is not known here
        return torch.rand(x.shape, generator=generator).to(x.device, x.dtype) if x.is_floating_point() else x

    inputs = each_input(zeros, made_up)

    def step() -> list[Tensor]:
        leaves = {name: t.detach().requires_grad_() for name, t in trainable_tensors(module).items()}
        # as `LocalProgram` does for one client; there, checkpointing would go unnoticed
        with torch.enable_grad(), torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINTING):
            with SeededRandomness(torch.tensor(1, device=next(iter(leaves.values())).device)):
                output = ModuleFunction(module)(leaves, inputs)
            if not output.requires_grad:
                return [output]
            slope = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape).to(output.dtype)
            return [
                output,
                *torch.autograd.grad(output, [*leaves.values()], slope, allow_unused=True, materialize_grads=True),
            ]

    device = next(module.parameters()).device
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    versions = {name: tensor._version for name, tensor in module.named_parameters()}
    generators = _generators(device)
    with _explained("a training step of the model fails", "it must train on two samples"):
        first, second = step(), step()
    for name, buffer in module.named_buffers():
        if not torch.equal(torch.nan_to_num(buffer), torch.nan_to_num(buffers[name])):
            owner, _, own = name.rpartition(".")
            raise ModelError(
                f"{_label(owner, module.get_submodule(owner))} changes its buffer {own!r} in training, which would be "
                "client data outside the clip: make it a constant or a parameter"
            )
    for name, tensor in module.named_parameters():
        if tensor._version != versions[name]:
            raise ModelError(f"parameter {name} is changed by the model itself in training: keep it constant")
    drawn = [which for which, state in _generators(device).items() if state != generators[which]]
    if drawn:
        where = _first_to_change(module, step, lambda: _generators(device)[drawn[0]])
        raise ModelError(
            f"{where} draws from {drawn[0]}, which cannot be seeded by client: use nn.Dropout or one of the draws that "
            "docs/guides/own-model.md lists"
        )
    if not all(_close(*pair) for pair in zip(first, second, strict=True)):
        raise ModelError(
            f"{_first_to_differ(module, step)} gives two outputs for the same input, weights and seed: it keeps a "
            "state, or draws from a generator of its own"
        )


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    one, other = (torch.nan_to_num(x.detach().double()) for x in (one, other))
    most = float(torch.maximum(one.abs(), other.abs()).max()) if one.numel() else 0.0
    return bool(((one - other).abs() <= _CLOSE * most).all())


def _first_to_change(module: nn.Module, step: Callable[[], object], look: Callable[[], object]) -> str:
    """Return the innermost layer within whose forward pass something changes."""
    stack: list[object] = []
    found: list[str] = []

    def enter(name: str, layer: nn.Module) -> None:
        stack.append(look())

    def leave(name: str, layer: nn.Module, output: object) -> None:
        if stack.pop() != look():
            found.append(_label(name, layer))

    with _watched(module, enter, leave):
        step()
    return found[0] if found else "the model's backward pass"


def _first_to_differ(module: nn.Module, step: Callable[[], object]) -> str:
    """Return the first layer whose output is another one the second time."""
    seen: list[tuple[str, Tensor]] = []

    def leave(name: str, layer: nn.Module, output: object) -> None:
        if isinstance(output, Tensor):
            seen.append((_label(name, layer), output.detach().clone()))

    with _watched(module, lambda name, layer: None, leave):
        step()
        count = len(seen)
        step()
    pairs = zip(seen[:count], seen[count:])
    return next((name for (name, one), (_, other) in pairs if not _close(one, other)), "the model")


@contextmanager
def _watched(
    module: nn.Module, enter: Callable[[str, nn.Module], None], leave: Callable[[str, nn.Module, object], None]
) -> Iterator[None]:
    """Call `enter` before the forward pass of each layer and `leave` after it."""
    hooks = []
    for name, layer in module.named_modules():
        hooks.append(layer.register_forward_pre_hook(lambda layer, given, name=name: enter(name, layer)))
        hooks.append(layer.register_forward_hook(lambda layer, given, output, name=name: leave(name, layer, output)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _generators(device: torch.device) -> dict[str, Any]:
    """Return the states of all global generators, by what people call them."""
    algorithm, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    states = {
        "torch's global generator": torch.get_rng_state().numpy().tobytes(),
        "Python's random": random.getstate(),
        "NumPy's global generator": (algorithm, keys.tobytes(), *rest),
    }
    if device.type == "cuda":
        states["the GPU's global generator"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return states


def _restore(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(states["torch's global generator"]), dtype=torch.uint8))
    random.setstate(states["Python's random"])
    algorithm, keys, *rest = states["NumPy's global generator"]
    np.random.set_state((algorithm, np.frombuffer(keys, dtype=np.uint32), *rest))
    if device.type == "cuda":
        kept = torch.frombuffer(bytearray(states["the GPU's global generator"]), dtype=torch.uint8)
        torch.cuda.set_rng_state(kept, device)


@contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Put back layers' modes, buffers and all global generators."""
    device = next(module.parameters()).device
    modes, generators = [(layer, layer.training) for layer in module.modules()], _generators(device)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        _restore(generators, device)
        for layer, mode in modes:
            layer.training = mode
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if not torch.equal(buffer, buffers[name]):
                    buffer.copy_(buffers[name])


@contextmanager
def _explained(what: str, advice: str) -> Iterator[None]:
    """Turn whatever a foreign model raises into the same one line."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{what}: {reason}; {advice}") from error
