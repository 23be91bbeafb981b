"""Layers that follow a convolution, done by the convolution's own kernel: 2x2 max-pool, ReLU, ReLU + dropout.

While a function is traced for the compiler, every tensor that a convolution made carries a note of how. A layer that
finds such a note computes from the convolution's inputs instead, and the compiler drops the unfused call, which nobody
uses any more. Without tracing nothing is noted, as the unfused call would have been paid for already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedblur.kernels import conv_ops, fused_ops, notes
from fedblur.kernels.convolution import ClientConv, Gradient, InputGrad, Pair, Spec, WeightGrad, lead

_FUSING: ContextVar[bool] = ContextVar("fusing", default=False)


@dataclass(frozen=True)
class Origin:
    """How a tensor came about: a convolution, perhaps pooled, perhaps after a ReLU."""

    x: Tensor
    w: Tensor
    b: Tensor | None
    spec: Spec
    pooled: bool = False
    relu: bool = False
    before: Tensor | None = None  # the tensor that a ReLU got

    @property
    def poolable(self) -> bool:
        shape = (1, *self.x.shape[:1], *self.x.shape[2:], self.x.shape[1])
        weights = (1, self.w.shape[0], *self.w.shape[2:], self.w.shape[1])
        g = conv_ops.geometry(torch.Size(shape), torch.Size(weights), *map(list, self.spec))
        return not self.pooled and g.poolable


@contextmanager
def fusing() -> Iterator[None]:
    """Within this context layers are fused; for tracing, where calls that nobody uses cost nothing."""
    token = _FUSING.set(True)
    try:
        yield
    finally:
        _FUSING.reset(token)


def note(tensor: Tensor, origin: object) -> Tensor:
    return notes.note(tensor, origin) if _FUSING.get() else tensor


def origin_of(tensor: Tensor) -> Origin | None:
    return notes.origin_of(tensor, Origin)


def convolution(x: Tensor, w: Tensor, b: Tensor | None, spec: Spec) -> Tensor:
    y: Tensor = ClientConv.apply(x, w, b, *spec)
    return note(y, Origin(x, w, b, spec))


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
    origin = origin_of(input)
    window = (_all(kernel_size, 2), not stride or _all(stride, 2), _all(padding, 0), _all(dilation, 1))
    if origin is None or not all(window) or ceil_mode or return_indices or not origin.poolable:
        return None
    return _pooled(replace(origin, pooled=True, before=None))


def relu(input: Tensor, inplace: bool = False) -> Tensor | None:
    """The convolution's output after a ReLU, or None where there is nothing to fuse."""
    origin = origin_of(input)
    if origin is None or inplace or origin.relu:
        return None
    if origin.pooled:
        return _pooled(replace(origin, relu=True))
    return note(torch.relu(input), replace(origin, relu=True, before=input))


def before_relu(input: Tensor) -> Tensor | None:
    """What a ReLU got that made this tensor, if dropout may take it from there."""
    origin = origin_of(input)
    return origin.before if origin is not None else None


def relu_dropout(before: Tensor, key: Tensor, rate: float) -> Tensor:
    """ReLU and dropout of a convolution's output, which `before_relu` gave."""
    origin = origin_of(before)
    assert origin is not None
    dropped: Tensor = ConvReluDropout.apply(origin.x, origin.w, origin.b, key, *origin.spec, rate)
    return dropped


def _pooled(origin: Origin) -> Tensor:
    y, _ = ConvPool.apply(origin.x, origin.w, origin.b, origin.spec[1], origin.relu)
    return note(y, origin)


def _all(value: Any, wanted: int) -> bool:
    return set(value) == {wanted} if isinstance(value, (tuple, list)) else bool(value == wanted)


class ConvPool(torch.autograd.Function):
    """One client's convolution, 2x2 max-pool and perhaps ReLU; returns the values and the winners."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor | None, padding: Pair, relu: bool) -> tuple[Tensor, Tensor]:
        y = torch.conv2d(x, w, b, 1, padding)
        values, where = fused_ops.pool(y.movedim(1, -1), relu)
        return values.movedim(-1, 1), where.movedim(-1, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, w, b, ctx.padding, _ = inputs
        ctx.has_bias = b is not None
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, w, output[1])

    @staticmethod
    def backward(ctx: Any, gy: Tensor, _: Any) -> Any:  # type: ignore[override]
        x, w, where = ctx.saved_tensors
        gx = None
        if ctx.needs_input_grad[0]:
            gx = PoolInputGrad.apply(gy, where, w, x.shape[-2], x.shape[-1], ctx.padding)
        gw, gb = PoolWeightGrad.apply(gy, where, x, w.shape[-2], w.shape[-1], ctx.padding)
        return gx, gw, gb if ctx.has_bias else None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, w: Tensor, b: Tensor | None, padding: Pair, relu: bool
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        if b is not None:
            b = lead(info, in_dims[2:], b)[0].contiguous()
        x, w = lead(info, in_dims, x, w)
        y, where = torch.ops.fedblur.client_conv_pool(conv_ops.last(x), conv_ops.last(w), b, padding, relu)
        return (conv_ops.first(y), conv_ops.first(where)), (0, 0)


class PoolInputGrad(Gradient):
    """gx of a pooled convolution."""

    @staticmethod
    def forward(gy: Tensor, where: Tensor, w: Tensor, height: int, width: int, padding: Pair) -> Tensor:
        tensors = (conv_ops.last(t[None]) for t in (gy, where, w))
        gx: Tensor = torch.ops.fedblur.client_conv_pool_input_grad(*tensors, height, width, padding)
        return conv_ops.first(gx)[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, gy: Tensor, where: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, int]:
        tensors = (conv_ops.last(t) for t in lead(info, in_dims, gy, where, w))
        return conv_ops.first(torch.ops.fedblur.client_conv_pool_input_grad(*tensors, *rest)), 0


class PoolWeightGrad(Gradient):
    """gw and gb of a pooled convolution."""

    @staticmethod
    def forward(gy: Tensor, where: Tensor, x: Tensor, height: int, width: int, padding: Pair) -> tuple[Tensor, Tensor]:
        tensors = (conv_ops.last(t[None]) for t in (gy, where, x))
        gw, gb = torch.ops.fedblur.client_conv_pool_weight_grad(*tensors, height, width, padding)
        return conv_ops.first(gw)[0], gb[0]

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, gy: Tensor, where: Tensor, x: Tensor, *rest: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        tensors = (conv_ops.last(t) for t in lead(info, in_dims, gy, where, x))
        gw, gb = torch.ops.fedblur.client_conv_pool_weight_grad(*tensors, *rest)
        return (conv_ops.first(gw), gb), (0, 0)


class ConvReluDropout(torch.autograd.Function):
    """One client's convolution, ReLU and seeded dropout; a value of zero was closed by one of the two."""

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, b: Tensor | None, key: Tensor, stride: Pair, padding: Pair, dilation: Pair, rate: float
    ) -> Tensor:
        return fused_ops.relu_dropout(torch.conv2d(x, w, b, stride, padding, dilation), key, rate)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, b, _, *ctx.spec, ctx.rate = inputs
        ctx.has_bias = b is not None
        ctx.save_for_backward(x, w, output)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:  # type: ignore[override]
        x, w, y = ctx.saved_tensors
        opened = ReluDropoutGrad.apply(gy, y, ctx.rate)
        gx = InputGrad.apply(opened, w, x.shape[-2], x.shape[-1], *ctx.spec) if ctx.needs_input_grad[0] else None
        gw, gb = WeightGrad.apply(opened, x, w.shape[-2], w.shape[-1], *ctx.spec)
        return gx, gw, gb if ctx.has_bias else None, None, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, w: Tensor, b: Tensor | None, key: Tensor, *rest: Any
    ) -> tuple[Tensor, int]:
        if b is not None:
            b = lead(info, in_dims[2:], b)[0].contiguous()
        key = lead(info, in_dims[3:], key)[0].contiguous()
        x, w = lead(info, in_dims, x, w)
        return torch.ops.fedblur.client_conv_relu_dropout(conv_ops.last(x), conv_ops.last(w), b, key, *rest), 0


class ReluDropoutGrad(Gradient):
    """gx of ReLU and dropout."""

    @staticmethod
    def forward(gy: Tensor, y: Tensor, rate: float) -> Tensor:
        return torch.where(y > 0, gy / (1 - rate), 0.0)

    @staticmethod
    def vmap(info: Any, in_dims: Any, gy: Tensor, y: Tensor, rate: float) -> tuple[Tensor, int]:
        gy, y = lead(info, in_dims, gy, y)
        gx = torch.ops.fedblur.client_relu_dropout_grad(gy.contiguous(), y.contiguous(), rate)
        return conv_ops.first(gx), 0
