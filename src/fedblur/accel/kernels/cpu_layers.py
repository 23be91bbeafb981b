"""Layers for one client on one core of a CPU: torch's kernels with less time lost around them, and a pool of our own.

- A sum of its own computes the gradient of a convolution's bias: oneDNN's weight kernel takes several times as long.
- Large dense layers go to oneDNN, which is 15 to 30 % faster than MKL on an AMD CPU.
- The gradient of flattened features goes back channels_last. A ReLU or a pool whose values are laid out differently
  takes several times as long.
- The gradients of a convolution and the 2x2 max-pool that follows it come from the winners alone. Three of four
  outputs lose their window and have no gradient, but oneDNN's kernels multiply their zeros all the same. `pooled.c`
  visits the winners only: both gradients take a third of the time (docs/decisions/0031). A convolution notes on its
  output how it was made. A pool that finds the note takes the gradients over, and the convolution's own never run.

Values agree with those of torch's layers to float tolerance. Torch's own layers are used where these do not cover a
layer, and where the kernel of the pool cannot be compiled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from fedblur.accel.kernels.convolution import (
    CONVOLUTIONS,
    POOLS,
    RELUS,
    Conv2d,
    Pair,
    is_2x2_pool,
    note,
    origin_of,
    pair,
)
from fedblur.accel.kernels.native import library, wanted

_FLATTENINGS = {torch.flatten, Tensor.flatten}
_LARGE = 2**16  # weights of a dense layer; a smaller one takes no time that could be saved
_LAST = torch.channels_last
_LANES = 16  # values of the widest vector: rows of a patch are whole vectors
_WINDOWS = 24  # as in pooled.c
_CLOSE = 1e-4  # relative difference between the kernel and torch up to which the kernel is trusted


class SingleClientLayers(TorchFunctionMode):
    """A context in which a model on a CPU uses the layers of this file."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in CONVOLUTIONS:
            return _convolution(Conv2d(*args, **kwargs))
        if func is F.linear:
            return _dense(*args, **kwargs)
        if func in _FLATTENINGS:
            return _flat(func, *args, **kwargs)
        if func in RELUS:
            return _note_relu(args[0] if args else kwargs["input"], func(*args, **kwargs))
        pooled = _max_pool(*args, **kwargs) if func in POOLS else None
        return func(*args, **kwargs) if pooled is None else pooled


@dataclass(frozen=True)
class _Origin:
    """The convolution that made a tensor, perhaps followed by a ReLU."""

    call: Conv2d
    output: Tensor  # before the ReLU
    relu: bool


def _convolution(call: Conv2d) -> Tensor:
    if call.input.dim() != 4 or isinstance(call.padding, str) or not _is_float_on_cpu(call.input, call.weight):
        return call.by_torch()
    if call.bias is None:
        return _note_convolution(call, call.by_torch())
    spec = map(pair, (call.stride, call.padding, call.dilation))
    return _note_convolution(call, _Convolution.apply(*call[:3], *spec, call.groups))


def _dense(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.dim() != 2 or weight.numel() < _LARGE or not _is_float_on_cpu(input, weight) or not _has_onednn():
        return F.linear(input, weight, bias)
    return _Dense.apply(input, weight, bias)


def _flat(func: Callable[..., Tensor], input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    if (input.dim(), start_dim, end_dim) != (4, 1, -1) or not input.is_contiguous(memory_format=_LAST):
        return func(input, start_dim, end_dim)
    return _Flat.apply(input)


def _is_float_on_cpu(*tensors: Tensor) -> bool:
    return all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _note_convolution(call: Conv2d, output: Tensor) -> Tensor:
    """Return the output, with a note of how it was made if a pool could make use of it."""
    if torch.is_grad_enabled() and wanted() and _covers(call, output):
        return note(output, _Origin(call, output.detach(), relu=False))
    return output


def _covers(call: Conv2d, output: Tensor) -> bool:
    """Return whether `pooled.c` can compute the gradients of this convolution."""
    plain = (pair(call.stride), pair(call.dilation), call.groups) == ((1, 1), (1, 1), 1)
    channels, width = call.weight.shape[1], call.weight.shape[3]
    image = call.input.shape[-2] * call.input.shape[-1] * channels  # indices into it are 32-bit numbers
    return (
        plain
        and width * channels % _LANES == 0
        and min(output.shape) > 0
        and min(output.shape[-2:]) > 1
        and image < 2**30
        and call.weight.shape[0] < 2**16
        and all(tensor.is_contiguous(memory_format=_LAST) for tensor in (call.input, call.weight, output))
    )


def _note_relu(before: Tensor, after: Tensor) -> Tensor:
    """Return a ReLU's output, with the note of its input: the pool may follow the ReLU as well."""
    origin = origin_of(before, _Origin)
    if origin is not None and after is not before:
        return note(after, replace(origin, relu=True))
    return after


def _max_pool(input: Tensor, *window: Any, **options: Any) -> Tensor | None:
    """Return the pooled convolution, or None where this pool or its input is of another kind."""
    origin = origin_of(input, _Origin)
    if origin is None or not is_2x2_pool(*window, **options):
        return None
    kernels = _kernels(*origin.call.weight.shape[1:])
    if kernels is None:
        return None
    pooled = _Pooled.apply(*origin.call[:3], origin.output, pair(origin.call.padding), kernels)
    return torch.relu(pooled) if origin.relu else pooled


class _Convolution(torch.autograd.Function):
    """A convolution whose bias gets its gradient from a sum of its own."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, stride: Pair, padding: Pair, dilation: Pair,
        groups: int,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(input, weight)
        ctx.spec = stride, padding, dilation, groups
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.spec
        to_bias = slope.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None  # first, while it is in the cache
        mask = [*ctx.needs_input_grad[:2], False]
        to_input, to_weight, _ = torch.ops.aten.convolution_backward(
            slope, input, weight, None, stride, padding, dilation, False, [0, 0], groups, mask
        )
        return to_input, to_weight, to_bias, None, None, None, None


class _Flat(torch.autograd.Function):
    """Flattened features whose gradient goes back channels_last."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.shape = input.shape
        return input.flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope.reshape(ctx.shape).contiguous(memory_format=_LAST)


class _Dense(torch.autograd.Function):
    """A dense layer computed by oneDNN."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        to_input = _product(slope, weight.t()) if ctx.needs_input_grad[0] else None
        to_weight = _product(slope.t(), input.t()) if ctx.needs_input_grad[1] else None
        return to_input, to_weight, slope.sum(0) if ctx.needs_input_grad[2] else None


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a·bᵀ + bias, computed by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


class Kernels:
    """The functions of pooled.c, on tensors that are channels last."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled

    def pool(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest value of each window, and which of the four it was."""
        images, channels, height, width = y.shape
        values = torch.empty(images, channels, height // 2, width // 2, memory_format=_LAST)
        where = torch.empty_like(values, dtype=torch.uint8)
        _call(self.compiled.pool, y, values, where, images, height, width, channels)
        return values, where

    def weight_grad(self, x: Tensor, gy: Tensor, where: Tensor, weight: Tensor) -> Tensor:
        channels, windows = gy.shape[1], gy.shape[-1] + _WINDOWS
        gw = torch.zeros_like(weight)
        scratch, counts = gy.new_empty(2 * channels * windows), gy.new_empty(channels)
        _call(self.compiled.weight_grad, x, gy, where, gw, x.shape[0], *x.shape[-2:], channels, scratch, counts)
        return gw

    def input_grad(self, x: Tensor, gy: Tensor, where: Tensor, weight: Tensor) -> Tensor:
        channels, windows = gy.shape[1], gy.shape[-2] * gy.shape[-1]
        gx, rows = torch.zeros_like(x), weight.permute(2, 0, 3, 1).contiguous()
        scratch, counts = gy.new_empty(2 * channels * windows), gy.new_empty(4 * windows)
        _call(self.compiled.input_grad, rows, gy, where, gx, x.shape[0], *x.shape[-2:], channels, scratch, counts)
        return gx


def _call(function: Any, *arguments: Tensor | int) -> None:
    """Call a C function. ctypes releases the interpreter's lock, so other workers go on meanwhile."""
    function(*(ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_long(a) for a in arguments))


@cache
def _kernels(channels: int, height: int, width: int) -> Kernels | None:
    """Return the kernels for filters of this shape, or None where they cannot be compiled or disagree with torch."""
    compiled = library("pooled", KH=height, KW=width, CIN=channels)
    if compiled is None:
        return None
    kernels = Kernels(compiled)
    return kernels if _agree(kernels, channels, height, width) else None


def _agree(kernels: Kernels, channels: int, height: int, width: int) -> bool:
    """Return whether the values and gradients of random tensors are close to torch's."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, channels, height + 4, width + 5), (3, channels, height, width))
    x, weight = (torch.randn(shape, generator=generator).contiguous(memory_format=_LAST) for shape in shapes)
    leaves = x.requires_grad_(), weight.requires_grad_()
    with torch.enable_grad():
        output = F.conv2d(*leaves)
        results = F.max_pool2d(output, 2), _Pooled.apply(*leaves, None, output.detach(), (0, 0), kernels)
    slope = torch.randn(results[0].shape, generator=generator)
    expected, found = ([result, *torch.autograd.grad(result, leaves, slope)] for result in results)
    return all(bool((a - b).norm() <= _CLOSE * a.norm()) for a, b in zip(expected, found, strict=True))


class _Pooled(torch.autograd.Function):
    """The pool of a convolution's output, with the gradients of both."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, padding: Pair, kernels: Kernels
    ) -> Tensor:
        values, where = kernels.pool(output)
        ctx.save_for_backward(x, weight, where)
        ctx.padding, ctx.kernels = padding, kernels
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, where = ctx.saved_tensors
        kernels, (rows, columns) = ctx.kernels, ctx.padding
        gy, padded = gy.contiguous(memory_format=_LAST), rows or columns
        if padded:
            x = F.pad(x, (columns, columns, rows, rows)).contiguous(memory_format=_LAST)
        gw = kernels.weight_grad(x, gy, where, weight) if ctx.needs_input_grad[1] else None
        gb = gy.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        gx = kernels.input_grad(x, gy, where, weight) if ctx.needs_input_grad[0] else None
        if gx is not None and padded:
            gx = gx[..., rows : gx.shape[-2] - rows, columns : gx.shape[-1] - columns].contiguous(memory_format=_LAST)
        return gx, gw, gb, None, None, None
