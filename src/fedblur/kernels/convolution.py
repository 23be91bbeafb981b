"""A convolution with weights of each client's own, as an autograd function with a vmap rule and so its gradients.

For one client it is torch's own convolution, for a block of clients one custom operator (`conv_ops`), which
`torch.compile` passes through untouched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import grad as conv_grad

from fedblur.kernels import conv_ops

Pair = tuple[int, int]
Spec = tuple[Pair, Pair, Pair]  # stride, padding, dilation


class Conv2d(NamedTuple):
    """The arguments of `F.conv2d`."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    def plainly(self) -> Tensor:
        """By torch's own convolution."""
        return F.conv2d(*self)


def resolve(weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Spec | None:
    """Numbers for "same" and "valid"; None for a "same" that pads unevenly."""
    steps, spread = pair(stride), pair(dilation)
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(spread, weight.shape[-2:], strict=True)]
        if any(t % 2 for t in total):
            return None
        padding = (total[0] // 2, total[1] // 2)
    return steps, pair(padding), spread


def pair(value: Any) -> Pair:
    if isinstance(value, int):
        return value, value
    first, second = value if len(value) == 2 else (value[0], value[0])
    return int(first), int(second)


class ClientConv(torch.autograd.Function):
    """y = conv(x, w) + b, for one client; its vmap rule is one launch for all clients."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
        return F.conv2d(x, w, b, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, b, *ctx.spec = inputs
        ctx.has_bias = b is not None
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        gx = InputGrad.apply(gy, w, x.shape[-2], x.shape[-1], *ctx.spec) if ctx.needs_input_grad[0] else None
        gw, gb = WeightGrad.apply(gy, x, w.shape[-2], w.shape[-1], *ctx.spec)
        return gx, gw, gb if ctx.has_bias else None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor, b: Tensor | None, *spec: Pair) -> tuple[Tensor, int]:
        if b is not None:
            b = lead(info, in_dims[2:], b)[0].contiguous()
        x, w = lead(info, in_dims, x, w)
        return conv_ops.first(torch.ops.fedblur.client_conv(conv_ops.last(x), conv_ops.last(w), b, *spec)), 0


class Gradient(torch.autograd.Function):
    """A gradient of a convolution; not differentiable again."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        raise NotImplementedError("second derivatives of per-client convolutions")


class InputGrad(Gradient):
    """gx of a convolution."""

    @staticmethod
    def forward(gy: Tensor, w: Tensor, height: int, width: int, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
        shape = [gy.shape[0], w.shape[1], height, width]
        return conv_grad.conv2d_input(shape, w, gy, stride, padding, dilation)

    @staticmethod
    def vmap(info: Any, in_dims: Any, gy: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, int]:
        gy, w = lead(info, in_dims, gy, w)
        return conv_ops.first(torch.ops.fedblur.client_conv_input_grad(conv_ops.last(gy), conv_ops.last(w), *rest)), 0


class WeightGrad(Gradient):
    """gw and gb of a convolution."""

    @staticmethod
    def forward(
        gy: Tensor, x: Tensor, height: int, width: int, stride: Pair, padding: Pair, dilation: Pair
    ) -> tuple[Tensor, Tensor]:
        shape = [gy.shape[1], x.shape[1], height, width]
        return conv_grad.conv2d_weight(x, shape, gy, stride, padding, dilation), gy.sum((0, 2, 3))

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, gy: Tensor, x: Tensor, *rest: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        gy, x = lead(info, in_dims, gy, x)
        gw, gb = torch.ops.fedblur.client_conv_weight_grad(conv_ops.last(gy), conv_ops.last(x), *rest)
        return (conv_ops.first(gw), gb), (0, 0)


def lead(info: Any, in_dims: Any, *tensors: Tensor) -> list[Tensor]:
    """Both tensors with the clients in front; what is shared by all clients is expanded."""
    return [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=False)
    ]
