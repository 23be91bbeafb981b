"""Custom operators behind fused layers: convolution + max-pool + ReLU, and convolution + ReLU + dropout.

Same contract as `conv_ops`; on a device without the kernels they are composed of torch's own operations, which the
tests use as the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedblur.hashing import kept, threshold
from fedblur.kernels.conv_ops import Ints, first, geometry, last, uses_kernels

ONE = [1, 1]


@torch.library.custom_op("fedblur::client_conv_pool", mutates_args=())
def client_conv_pool(x: Tensor, w: Tensor, bias: Tensor | None, padding: Ints, relu: bool) -> tuple[Tensor, Tensor]:
    """Each client's convolution, pooled 2x2: the values and which of four won (4: closed by ReLU), channels last."""
    g = geometry(x.shape, w.shape, ONE, padding, ONE)
    if uses_kernels(x, g):
        from fedblur.kernels import triton_conv_pool

        return triton_conv_pool.forward(x, w, bias, g, relu)
    y = torch.ops.fedblur.client_conv(x, w, bias, ONE, padding, ONE)
    return pool(y, relu)


def pool(y: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    """2x2 max-pool of [.., H, W, C] and the winners; among equals the first, row by row."""
    best, *others = _candidates(y)
    winner = torch.zeros_like(best, dtype=torch.uint8)
    for number, candidate in enumerate(others, start=1):
        better = (candidate > best) | candidate.isnan()
        best, winner = torch.where(better, candidate, best), torch.where(better, number, winner).to(torch.uint8)
    if relu:
        winner = torch.where(best > 0, winner, 4).to(torch.uint8)
        best = best.relu()
    return best.contiguous(), winner.contiguous()


def unpool(gy: Tensor, where: Tensor, height: int, width: int) -> Tensor:
    """The gradient before the pool: each pooled gradient at its winner's place."""
    full = gy.new_zeros(*gy.shape[:-3], height, width, gy.shape[-1])
    for number, place in enumerate(_candidates(full)):
        place.copy_(torch.where(where == number, gy, 0.0))
    return full


def _candidates(y: Tensor) -> list[Tensor]:
    """The four members of every window, as views."""
    rows, columns = y.shape[-3] // 2 * 2, y.shape[-2] // 2 * 2
    return [y[..., j // 2 : rows : 2, j % 2 : columns : 2, :] for j in range(4)]


@client_conv_pool.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor | None, padding: Ints, relu: bool) -> tuple[Tensor, Tensor]:
    out_h, out_w = (n + 2 * p - k + 1 for n, p, k in zip(x.shape[2:4], padding, w.shape[2:4], strict=True))
    y = x.new_empty(x.shape[0], x.shape[1], out_h // 2, out_w // 2, w.shape[1])
    return y, torch.empty_like(y, dtype=torch.uint8)


@torch.library.custom_op("fedblur::client_conv_pool_input_grad", mutates_args=())
def client_conv_pool_input_grad(gy: Tensor, where: Tensor, w: Tensor, height: int, width: int, padding: Ints) -> Tensor:
    """The gradient with respect to each client's input, [clients, B, H, W, C]."""
    shape = [gy.shape[0], gy.shape[1], height, width, w.shape[4]]
    g = geometry(shape, w.shape, ONE, padding, ONE)
    if uses_kernels(gy, g):
        from fedblur.kernels import triton_conv_pool

        return triton_conv_pool.input_grad(gy, where, w, g)
    full = unpool(gy, where, *g.out_size)
    gx: Tensor = torch.ops.fedblur.client_conv_input_grad(full, w, height, width, ONE, padding, ONE)
    return gx


@client_conv_pool_input_grad.register_fake
def _(gy: Tensor, where: Tensor, w: Tensor, height: int, width: int, padding: Ints) -> Tensor:
    return gy.new_empty(gy.shape[0], gy.shape[1], height, width, w.shape[4])


@torch.library.custom_op("fedblur::client_conv_pool_weight_grad", mutates_args=())
def client_conv_pool_weight_grad(
    gy: Tensor, where: Tensor, x: Tensor, height: int, width: int, padding: Ints
) -> tuple[Tensor, Tensor]:
    """The gradients with respect to each client's weights [clients, O, KH, KW, C] and bias [clients, O]."""
    shape = [gy.shape[0], gy.shape[4], height, width, x.shape[4]]
    g = geometry(x.shape, shape, ONE, padding, ONE)
    if uses_kernels(gy, g):
        from fedblur.kernels import triton_conv_pool

        return triton_conv_pool.weight_grad(gy, where, x, g)
    full = unpool(gy, where, *g.out_size)
    gradients: tuple[Tensor, Tensor] = torch.ops.fedblur.client_conv_weight_grad(
        full, x, height, width, ONE, padding, ONE
    )
    return gradients


@client_conv_pool_weight_grad.register_fake
def _(gy: Tensor, where: Tensor, x: Tensor, height: int, width: int, padding: Ints) -> tuple[Tensor, Tensor]:
    gw = gy.new_empty(gy.shape[0], gy.shape[4], height, width, x.shape[4])
    return gw, gy.new_empty(gy.shape[0], gy.shape[4])


@torch.library.custom_op("fedblur::client_conv_relu_dropout", mutates_args=())
def client_conv_relu_dropout(
    x: Tensor, w: Tensor, bias: Tensor | None, keys: Tensor, stride: Ints, padding: Ints, dilation: Ints, rate: float
) -> Tensor:
    """Each client's convolution, ReLU and seeded dropout; keys [clients] int32. Channels last in, first out."""
    g = geometry(x.shape, w.shape, stride, padding, dilation)
    if uses_kernels(x, g):
        from fedblur.kernels import triton_conv

        return triton_conv.forward(x, w, bias, g, triton_conv.Dropout(keys, threshold(rate), 1 / (1 - rate)))
    y = first(torch.ops.fedblur.client_conv(x, w, bias, stride, padding, dilation))
    return torch.stack([relu_dropout(one, key, rate) for one, key in zip(y, keys, strict=True)])


def relu_dropout(x: Tensor, key: Tensor, rate: float) -> Tensor:
    """One client's, of torch's own operations; x channels first."""
    return (x.relu() * kept(key, x.shape, x.device, rate) / (1 - rate)).contiguous()


@client_conv_relu_dropout.register_fake
def _(
    x: Tensor, w: Tensor, bias: Tensor | None, keys: Tensor, stride: Ints, padding: Ints, dilation: Ints, rate: float
) -> Tensor:
    y = torch.ops.fedblur.client_conv(x, w, bias, stride, padding, dilation)
    return x.new_empty(first(y).shape)


@torch.library.custom_op("fedblur::client_relu_dropout_grad", mutates_args=())
def client_relu_dropout_grad(gy: Tensor, y: Tensor, rate: float) -> Tensor:
    """gy and y [clients, B, C, H, W] -> gx [clients, B, H, W, C]."""
    if uses_kernels(gy):
        from fedblur.kernels import triton_relu_dropout

        return triton_relu_dropout.grad(gy, y, 1 / (1 - rate))
    return last(torch.where(y > 0, gy / (1 - rate), 0.0))


@client_relu_dropout_grad.register_fake
def _(gy: Tensor, y: Tensor, rate: float) -> Tensor:
    clients, batch, channels, height, width = gy.shape
    return gy.new_empty(clients, batch, height, width, channels)
