"""The operators behind per-client convolutions, channels last: x [clients, B, H, W, C], w [clients, O, KH, KW, C].

Changes of layout are left to the callers, where a compiler sees them and folds them into the code that makes or uses
the tensors. On a device without the kernels the operators fall back to torch's grouped convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import grad as conv_grad

from fedblur.kernels.geometry import Geometry

Ints = list[int]


def first(tensor: Tensor) -> Tensor:
    """A view of [.., .., H, W, C] as [.., .., C, H, W]."""
    return tensor.permute(0, 1, 4, 2, 3)


def last(tensor: Tensor) -> Tensor:
    """[.., .., C, H, W] as contiguous [.., .., H, W, C]."""
    return tensor.permute(0, 1, 3, 4, 2).contiguous()


def uses_kernels(tensor: Tensor, g: Geometry | None = None) -> bool:
    """Whether this tensor, and a convolution of this geometry, is for our kernels."""
    return tensor.device.type == "cuda" and tensor.dtype == torch.bfloat16 and (g is None or g.addressable)


def geometry(x_shape: Ints | torch.Size, w_shape: Ints | torch.Size, *spec: Ints) -> Geometry:
    clients, batch, height, width, channels = x_shape
    stride, padding, dilation = ((int(a), int(b)) for a, b in spec)
    kernel = (w_shape[2], w_shape[3])
    return Geometry(clients, batch, channels, height, width, w_shape[1], kernel, stride, padding, dilation)


def _grouped(tensor: Tensor) -> Tensor:
    """[clients, B, H, W, C] -> [B, clients·C, H, W]: one group per client."""
    clients, batch, height, width, channels = tensor.shape
    return first(tensor).transpose(0, 1).reshape(batch, clients * channels, height, width)


def _ungrouped(tensor: Tensor, clients: int) -> Tensor:
    """The inverse of `_grouped`."""
    return last(tensor.unflatten(1, (clients, -1)).transpose(0, 1))


def _filters(w: Tensor) -> Tensor:
    """[clients, O, KH, KW, C] -> [clients·O, C, KH, KW]."""
    return first(w).flatten(0, 1)


@torch.library.custom_op("fedblur::client_conv", mutates_args=())
def client_conv(x: Tensor, w: Tensor, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """Each client's convolution with its own bias [clients, O]: y [clients, B, OH, OW, O]."""
    g = geometry(x.shape, w.shape, stride, padding, dilation)
    if uses_kernels(x, g):
        from fedblur.kernels import triton_conv

        return triton_conv.forward(x, w, bias, g)
    y = torch.conv2d(
        _grouped(x), _filters(w), None if bias is None else bias.flatten(), stride, padding, dilation, len(w)
    )
    return _ungrouped(y, len(w))


@client_conv.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    sides = zip(x.shape[2:4], w.shape[2:4], stride, padding, dilation, strict=True)
    out_h, out_w = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)
    return x.new_empty(x.shape[0], x.shape[1], out_h, out_w, w.shape[1])


@torch.library.custom_op("fedblur::client_conv_input_grad", mutates_args=())
def client_conv_input_grad(
    gy: Tensor, w: Tensor, height: int, width: int, stride: Ints, padding: Ints, dilation: Ints
) -> Tensor:
    """The gradient with respect to each client's input, [clients, B, H, W, C]."""
    clients, channels = w.shape[0], w.shape[4]
    g = geometry([clients, gy.shape[1], height, width, channels], w.shape, stride, padding, dilation)
    if uses_kernels(gy, g):
        from fedblur.kernels import triton_conv

        return triton_conv.input_grad(gy, w, g)
    size = [gy.shape[1], clients * channels, height, width]
    gx: Tensor = conv_grad.conv2d_input(size, _filters(w), _grouped(gy), stride, padding, dilation, clients)
    return _ungrouped(gx, clients)


@client_conv_input_grad.register_fake
def _(gy: Tensor, w: Tensor, height: int, width: int, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    return gy.new_empty(gy.shape[0], gy.shape[1], height, width, w.shape[4])


@torch.library.custom_op("fedblur::client_conv_weight_grad", mutates_args=())
def client_conv_weight_grad(
    gy: Tensor, x: Tensor, height: int, width: int, stride: Ints, padding: Ints, dilation: Ints
) -> tuple[Tensor, Tensor]:
    """The gradients with respect to each client's weights [clients, O, KH, KW, C] and bias [clients, O]."""
    clients, outputs, channels = x.shape[0], gy.shape[4], x.shape[4]
    g = geometry(x.shape, [clients, outputs, height, width, channels], stride, padding, dilation)
    if uses_kernels(gy, g):
        from fedblur.kernels import triton_weight_grad

        return triton_weight_grad.weight_grad(gy, x, g)
    size = [clients * outputs, channels, height, width]
    gw: Tensor = conv_grad.conv2d_weight(_grouped(x), size, _grouped(gy), stride, padding, dilation, clients)
    return last(gw.unflatten(0, (clients, outputs))), gy.sum((1, 2, 3))


@client_conv_weight_grad.register_fake
def _(
    gy: Tensor, x: Tensor, height: int, width: int, stride: Ints, padding: Ints, dilation: Ints
) -> tuple[Tensor, Tensor]:
    gw = gy.new_empty(x.shape[0], gy.shape[4], height, width, x.shape[4])
    return gw, gy.new_empty(x.shape[0], gy.shape[4])
