"""A convolution and the 2x2 max-pool behind it, for one client on one core of a CPU: gradients from the winners alone.

Three of four outputs lose their window and have no gradient, but oneDNN's kernels multiply their zeros all the same.
Ours (`pooled.c`) visit the winners: both gradients take a third of the time (docs/decisions/0031). A convolution leaves
a note on its output; a pool that finds one takes the gradients over, and the convolution's own are never asked for.
Where the kernel does not cover a layer, or cannot be had on this machine, all of this is torch's.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedblur.kernels.convolution import Conv2d, Pair, pair
from fedblur.kernels.native import library, wanted
from fedblur.kernels.notes import note, origin_of

_LAST = torch.channels_last
_LANES = 16  # values of the widest vector: rows of a patch are whole vectors
_WINDOWS = 24  # as in pooled.c
_CLOSE = 1e-4  # relative; how far the kernel may be from torch before it is trusted


@dataclass(frozen=True)
class _Origin:
    """The convolution that made a tensor, perhaps with a ReLU behind it."""

    call: Conv2d
    output: Tensor  # before the ReLU
    relu: bool


def note_convolution(call: Conv2d, output: Tensor) -> Tensor:
    """The output, with a note of how it came about if a pool could make use of it."""
    if torch.is_grad_enabled() and wanted() and _covers(call, output):
        return note(output, _Origin(call, output.detach(), relu=False))
    return output


def note_relu(before: Tensor, after: Tensor) -> Tensor:
    """What a ReLU made of a noted output carries the note on: a pool may come before the ReLU as well."""
    origin = origin_of(before, _Origin)
    if origin is not None and after is not before:
        return note(after, _Origin(origin.call, origin.output, relu=True))
    return after


def max_pool(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """The pooled convolution, or None where this pool or what it pools is of another kind."""
    origin = origin_of(input, _Origin)
    if origin is None or ceil_mode or return_indices:
        return None
    if (pair(kernel_size), pair(stride or 2), pair(padding), pair(dilation)) != ((2, 2), (2, 2), (0, 0), (1, 1)):
        return None
    kernels = _kernels(*origin.call.weight.shape[1:])
    if kernels is None:
        return None
    pooled: Tensor = _Pooled.apply(*origin.call[:3], origin.output, pair(origin.call.padding), kernels)
    return torch.relu(pooled) if origin.relu else pooled


def _covers(call: Conv2d, output: Tensor) -> bool:
    plain = (pair(call.stride), pair(call.dilation), call.groups) == ((1, 1), (1, 1), 1)
    channels, width = call.weight.shape[1], call.weight.shape[3]
    image = call.input.shape[-2] * call.input.shape[-1] * channels  # places in it are 32-bit numbers
    return (
        plain
        and width * channels % _LANES == 0
        and min(output.shape) > 0
        and min(output.shape[-2:]) > 1
        and image < 2**30
        and call.weight.shape[0] < 2**16
        and all(tensor.is_contiguous(memory_format=_LAST) for tensor in (call.input, call.weight, output))
    )


class Kernels:
    """The functions of pooled.c, on tensors that are channels last."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled

    def pool(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The values and which of four won."""
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
    """Without the interpreter's lock, as ctypes calls all of C: other workers go on."""
    function(*(ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_long(a) for a in arguments))


@cache
def _kernels(channels: int, height: int, width: int) -> Kernels | None:
    """For filters of this shape, once they were seen to agree with torch."""
    compiled = library("pooled", KH=height, KW=width, CIN=channels)
    if compiled is None:
        return None
    kernels = Kernels(compiled)
    return kernels if _agree(kernels, channels, height, width) else None


def _agree(kernels: Kernels, channels: int, height: int, width: int) -> bool:
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
        gy, x = gy.contiguous(memory_format=_LAST), _padded(x, rows, columns)
        gw = kernels.weight_grad(x, gy, where, weight) if ctx.needs_input_grad[1] else None
        gb = gy.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        gx = kernels.input_grad(x, gy, where, weight) if ctx.needs_input_grad[0] else None
        if gx is not None and (rows or columns):
            gx = gx[..., rows : gx.shape[-2] - rows, columns : gx.shape[-1] - columns].contiguous(memory_format=_LAST)
        return gx, gw, gb, None, None, None


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    if not rows and not columns:
        return x
    return F.pad(x, (columns, columns, rows, rows)).contiguous(memory_format=_LAST)
