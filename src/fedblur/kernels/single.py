"""Layers for one client on one core of a CPU: torch's own kernels, put together so that less time is lost around them.

A convolution's bias gets its gradient from a sum of its own (inside oneDNN's kernel for the weights it takes several
times as long). Large dense layers go to oneDNN (on an AMD CPU 15 to 30 % faster than MKL). The gradient of flattened
features goes back channels_last: a ReLU or a pool whose values lie otherwise takes several times as long. A pool behind
a convolution has gradients of its own (`pooled`). Values agree with those of torch's layers to float tolerance; what is
not covered is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from fedblur.kernels.convolution import Conv2d, Pair, pair
from fedblur.kernels.pooled import max_pool, note_convolution, note_relu

_aten = torch.ops.aten
_CONVOLUTIONS = {F.conv2d, torch.conv2d}
_RELUS = {F.relu, torch.relu, Tensor.relu}
_POOLS = {F.max_pool2d, torch.max_pool2d}
_FLATTENINGS = {torch.flatten, torch.Tensor.flatten}
_LARGE = 2**16  # weights of a dense layer; smaller ones take no time that could be saved


class SingleClientLayers(TorchFunctionMode):
    """Within this context the layers of a model on a CPU are the ones of this file."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            return _convolution(Conv2d(*args, **kwargs))
        if func is F.linear:
            return _dense(*args, **kwargs)
        if func in _FLATTENINGS:
            return _flat(func, *args, **kwargs)
        if func in _RELUS:
            return note_relu(args[0] if args else kwargs["input"], func(*args, **kwargs))
        pooled = max_pool(*args, **kwargs) if func in _POOLS else None
        return func(*args, **kwargs) if pooled is None else pooled


def _convolution(call: Conv2d) -> Tensor:
    if call.input.dim() != 4 or isinstance(call.padding, str) or not _plain(call.input, call.weight):
        return call.plainly()
    if call.bias is None:
        return note_convolution(call, call.plainly())
    spec = map(pair, (call.stride, call.padding, call.dilation))
    output: Tensor = _Convolution.apply(*call[:3], *spec, call.groups)
    return note_convolution(call, output)


def _dense(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.dim() != 2 or weight.numel() < _LARGE or not _plain(input, weight) or not _has_onednn():
        return F.linear(input, weight, bias)
    output: Tensor = _Dense.apply(input, weight, bias)
    return output


def _flat(func: Callable[..., Tensor], input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    if (input.dim(), start_dim, end_dim) != (4, 1, -1) or not input.is_contiguous(memory_format=torch.channels_last):
        return func(input, start_dim, end_dim)
    output: Tensor = _Flat.apply(input)
    return output


def _plain(*tensors: Tensor) -> bool:
    return all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, stride: Pair, padding: Pair, dilation: Pair,
        groups: int,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(input, weight)
        ctx.how = stride, padding, dilation, groups
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.how
        to_bias = slope.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None  # first, while it is in the cache
        wanted = [*ctx.needs_input_grad[:2], False]
        to_input, to_weight, _ = _aten.convolution_backward(
            slope, input, weight, None, stride, padding, dilation, False, [0, 0], groups, wanted
        )
        return to_input, to_weight, to_bias, None, None, None, None


class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.shape = input.shape
        return input.flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope.reshape(ctx.shape).contiguous(memory_format=torch.channels_last)


class _Dense(torch.autograd.Function):
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
    """a·bᵀ + bias by oneDNN."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return result
