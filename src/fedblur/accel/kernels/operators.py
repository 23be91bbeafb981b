"""The custom operators behind per-client layers, channels last: x [clients, B, H, W, C], w [clients, O, KH, KW, C].

Each operator calls a Triton kernel where there is one for its tensors. Everywhere else it computes the same with
torch's own operations, which are also the reference in the tests. The compiler does not look inside an operator.
Changes of layout are therefore left to the callers, where the compiler can fold them into the code around them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import grad as conv_grad
from torch.nn.functional import pad

from fedblur.accel.kernels.geometry import Geometry
from fedblur.core.hashing import kept, threshold

Ints = list[int]
ONE = [1, 1]
MOST_SAMPLES = 128  # in a batch: a dense layer's kernel holds a tile's slopes of all of them at once
TILE = [64, 128]  # outputs and inputs of a dense layer that a program takes at once


def first(tensor: Tensor) -> Tensor:
    """Return a view of [.., .., H, W, C] as [.., .., C, H, W]."""
    return tensor.permute(0, 1, 4, 2, 3)


def last(tensor: Tensor) -> Tensor:
    """Return [.., .., C, H, W] as contiguous [.., .., H, W, C]."""
    return tensor.permute(0, 1, 3, 4, 2).contiguous()


def uses_kernels(tensor: Tensor, g: Geometry | None = None) -> bool:
    """Return whether our kernels take this tensor, and a convolution of this geometry."""
    return tensor.device.type == "cuda" and tensor.dtype == torch.bfloat16 and (g is None or g.addressable)


def geometry(x_shape: Ints | torch.Size, w_shape: Ints | torch.Size, *spec: Ints | tuple[int, int]) -> Geometry:
    """Return the geometry of a convolution from the shapes of its operands, stride, padding and dilation."""
    clients, batch, height, width, channels = x_shape
    stride, padding, dilation = ((int(a), int(b)) for a, b in spec)
    kernel = (w_shape[2], w_shape[3])
    return Geometry(clients, batch, channels, height, width, w_shape[1], kernel, stride, padding, dilation)


def _grouped(tensor: Tensor) -> Tensor:
    """Return [clients, B, H, W, C] as [B, clients·C, H, W], with one group for each client."""
    clients, batch, height, width, channels = tensor.shape
    return first(tensor).transpose(0, 1).reshape(batch, clients * channels, height, width)


def _ungrouped(tensor: Tensor, clients: int) -> Tensor:
    """Return the inverse of `_grouped`."""
    return last(tensor.unflatten(1, (clients, -1)).transpose(0, 1))


def _filters(w: Tensor) -> Tensor:
    """Return [clients, O, KH, KW, C] as [clients·O, C, KH, KW]."""
    return first(w).flatten(0, 1)


@torch.library.custom_op("fedblur::client_conv", mutates_args=())
def client_conv(x: Tensor, w: Tensor, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """Return each client's convolution, with a bias [clients, O]: y [clients, B, OH, OW, O]."""
    g = geometry(x.shape, w.shape, stride, padding, dilation)
    if uses_kernels(x, g):
        from fedblur.accel.kernels import triton_conv

        return triton_conv.forward(x, w, bias, g)
    shift = None if bias is None else bias.flatten()
    return _ungrouped(torch.conv2d(_grouped(x), _filters(w), shift, stride, padding, dilation, len(w)), len(w))


@client_conv.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    g = geometry(x.shape, w.shape, stride, padding, dilation)
    return x.new_empty(g.clients, g.batch, *g.out_size, g.outputs)


@torch.library.custom_op("fedblur::client_conv_input_grad", mutates_args=())
def client_conv_input_grad(
    gy: Tensor, w: Tensor, height: int, width: int, stride: Ints, padding: Ints, dilation: Ints
) -> Tensor:
    """Return the gradient with respect to each client's input, [clients, B, H, W, C]."""
    clients, channels = w.shape[0], w.shape[4]
    g = geometry([clients, gy.shape[1], height, width, channels], w.shape, stride, padding, dilation)
    if uses_kernels(gy, g):
        from fedblur.accel.kernels import triton_conv

        return triton_conv.input_grad(gy, w, g)
    size = [gy.shape[1], clients * channels, height, width]
    return _ungrouped(
        conv_grad.conv2d_input(size, _filters(w), _grouped(gy), stride, padding, dilation, clients), clients
    )


@client_conv_input_grad.register_fake
def _(gy: Tensor, w: Tensor, height: int, width: int, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    return gy.new_empty(gy.shape[0], gy.shape[1], height, width, w.shape[4])


@torch.library.custom_op("fedblur::client_conv_weight_grad", mutates_args=())
def client_conv_weight_grad(
    gy: Tensor, x: Tensor, height: int, width: int, stride: Ints, padding: Ints, dilation: Ints
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to each client's weights [clients, O, KH, KW, C] and bias [clients, O]."""
    clients, outputs, channels = x.shape[0], gy.shape[4], x.shape[4]
    g = geometry(x.shape, [clients, outputs, height, width, channels], stride, padding, dilation)
    if uses_kernels(gy, g):
        from fedblur.accel.kernels import triton_conv

        return triton_conv.weight_grad(gy, x, g)
    size = [clients * outputs, channels, height, width]
    gw = conv_grad.conv2d_weight(_grouped(x), size, _grouped(gy), stride, padding, dilation, clients)
    return last(gw.unflatten(0, (clients, outputs))), gy.sum((1, 2, 3))


@client_conv_weight_grad.register_fake
def _(
    gy: Tensor, x: Tensor, height: int, width: int, stride: Ints, padding: Ints, dilation: Ints
) -> tuple[Tensor, Tensor]:
    gw = gy.new_empty(x.shape[0], gy.shape[4], height, width, x.shape[4])
    return gw, gy.new_empty(x.shape[0], gy.shape[4])


@torch.library.custom_op("fedblur::client_conv_pool", mutates_args=())
def client_conv_pool(x: Tensor, w: Tensor, bias: Tensor | None, padding: Ints, relu: bool) -> tuple[Tensor, Tensor]:
    """Return each client's convolution pooled 2x2: the values, and which of four won (4: ReLU zeroed it)."""
    g = geometry(x.shape, w.shape, ONE, padding, ONE)
    if uses_kernels(x, g):
        from fedblur.accel.kernels import triton_conv_pool

        return triton_conv_pool.forward(x, w, bias, g, relu)
    return pool(client_conv(x, w, bias, ONE, padding, ONE), relu)


def pool(y: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    """Return the 2x2 max-pool of [.., H, W, C] and the winners; among equals the first, row by row."""
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
    """Return the gradient before the pool: each pooled gradient at its winner's place."""
    full = gy.new_zeros(*gy.shape[:-3], height, width, gy.shape[-1])
    for number, place in enumerate(_candidates(full)):
        place.copy_(torch.where(where == number, gy, 0.0))
    return full


def _candidates(y: Tensor) -> list[Tensor]:
    """Return views of the four members of every window."""
    rows, columns = y.shape[-3] // 2 * 2, y.shape[-2] // 2 * 2
    return [y[..., j // 2 : rows : 2, j % 2 : columns : 2, :] for j in range(4)]


@client_conv_pool.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor | None, padding: Ints, relu: bool) -> tuple[Tensor, Tensor]:
    g = geometry(x.shape, w.shape, ONE, padding, ONE)
    y = x.new_empty(g.clients, g.batch, *g.pooled_size, g.outputs)
    return y, torch.empty_like(y, dtype=torch.uint8)


@torch.library.custom_op("fedblur::client_conv_pool_input_grad", mutates_args=())
def client_conv_pool_input_grad(gy: Tensor, where: Tensor, w: Tensor, height: int, width: int, padding: Ints) -> Tensor:
    """Return the gradient with respect to each client's input, [clients, B, H, W, C]."""
    g = geometry([gy.shape[0], gy.shape[1], height, width, w.shape[4]], w.shape, ONE, padding, ONE)
    if uses_kernels(gy, g):
        from fedblur.accel.kernels import triton_conv_pool

        return triton_conv_pool.input_grad(gy, where, w, g)
    return client_conv_input_grad(unpool(gy, where, *g.out_size), w, height, width, ONE, padding, ONE)


@client_conv_pool_input_grad.register_fake
def _(gy: Tensor, where: Tensor, w: Tensor, height: int, width: int, padding: Ints) -> Tensor:
    return gy.new_empty(gy.shape[0], gy.shape[1], height, width, w.shape[4])


@torch.library.custom_op("fedblur::client_conv_pool_weight_grad", mutates_args=())
def client_conv_pool_weight_grad(
    gy: Tensor, where: Tensor, x: Tensor, height: int, width: int, padding: Ints
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to each client's weights [clients, O, KH, KW, C] and bias [clients, O]."""
    g = geometry(x.shape, [gy.shape[0], gy.shape[4], height, width, x.shape[4]], ONE, padding, ONE)
    if uses_kernels(gy, g):
        from fedblur.accel.kernels import triton_conv_pool

        return triton_conv_pool.weight_grad(gy, where, x, g)
    return client_conv_weight_grad(unpool(gy, where, *g.out_size), x, height, width, ONE, padding, ONE)


@client_conv_pool_weight_grad.register_fake
def _(gy: Tensor, where: Tensor, x: Tensor, height: int, width: int, padding: Ints) -> tuple[Tensor, Tensor]:
    gw = gy.new_empty(gy.shape[0], gy.shape[4], height, width, x.shape[4])
    return gw, gy.new_empty(gy.shape[0], gy.shape[4])


@torch.library.custom_op("fedblur::client_conv_relu_dropout", mutates_args=())
def client_conv_relu_dropout(
    x: Tensor, w: Tensor, bias: Tensor | None, keys: Tensor, stride: Ints, padding: Ints, dilation: Ints, rate: float
) -> Tensor:
    """Return each client's convolution, ReLU and seeded dropout, channels first; keys [clients] are int32."""
    g = geometry(x.shape, w.shape, stride, padding, dilation)
    if uses_kernels(x, g):
        from fedblur.accel.kernels import triton_conv

        return triton_conv.forward(x, w, bias, g, triton_conv.Dropout(keys, threshold(rate), 1 / (1 - rate)))
    y = first(client_conv(x, w, bias, stride, padding, dilation))
    return torch.stack([relu_dropout(one, key, rate) for one, key in zip(y, keys, strict=True)])


def relu_dropout(x: Tensor, key: Tensor, rate: float) -> Tensor:
    """Return ReLU and seeded dropout of one client's x, channels first, by torch's own operations."""
    return (x.relu() * kept(key, x.shape, x.device, rate) / (1 - rate)).contiguous()


@client_conv_relu_dropout.register_fake
def _(
    x: Tensor, w: Tensor, bias: Tensor | None, keys: Tensor, stride: Ints, padding: Ints, dilation: Ints, rate: float
) -> Tensor:
    g = geometry(x.shape, w.shape, stride, padding, dilation)
    return x.new_empty(g.clients, g.batch, g.outputs, *g.out_size)


@torch.library.custom_op("fedblur::client_relu_dropout_grad", mutates_args=())
def client_relu_dropout_grad(gy: Tensor, y: Tensor, rate: float) -> Tensor:
    """Return the gradient before ReLU and dropout: gy and y [clients, B, C, H, W] -> gx [clients, B, H, W, C]."""
    if uses_kernels(gy):
        from fedblur.accel.kernels import triton_common

        return triton_common.relu_dropout_grad(gy, y, 1 / (1 - rate))
    return last(torch.where(y > 0, gy / (1 - rate), 0.0))


@client_relu_dropout_grad.register_fake
def _(gy: Tensor, y: Tensor, rate: float) -> Tensor:
    clients, batch, channels, height, width = gy.shape
    return gy.new_empty(clients, batch, height, width, channels)


@torch.library.custom_op("fedblur::client_dense_update", mutates_args=())
def client_dense_update(
    slope: Tensor, x: Tensor, delta: Tensor, decay: Tensor, start: Tensor, tile: Ints
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Δ ← (1 − decay)·Δ + slope·x for each client, start + Δ in bf16, and Σ Δ² of each tile.

    slope [clients, outputs, batch], x [clients, batch, inputs], delta [clients, outputs, inputs], decay [clients],
    start [outputs, inputs], the same for all. `dense_update` puts this operator into a compiled step's graph. The tile
    is an argument because it decides the shape of a result, and the compiler caches its code by arguments.
    """
    if uses_kernels(x) and covers(slope, x):
        from fedblur.accel.kernels import triton_dense

        return triton_dense.update(slope, x, delta, decay, start, tile)
    new = delta * (1 - decay)[:, None, None] + slope.float() @ x.float()
    bands, tiles = _counts(delta, tile)
    over = bands * tile[0] - delta.shape[1], tiles * tile[1] - delta.shape[2]
    squares = pad(new.square(), (0, over[1], 0, over[0])).view(-1, bands, tile[0], tiles, tile[1])
    return new, (start + new).bfloat16(), squares.sum((2, 4))


def covers(slope: Tensor, x: Tensor) -> bool:
    """Return whether the kernel takes such a product: the batch is not too large, and a GPU can hold its loads."""
    if slope.shape[2] > MOST_SAMPLES or slope.device.type != "cuda":
        return slope.shape[2] <= MOST_SAMPLES
    from fedblur.accel.kernels import triton_dense

    return triton_dense.stages(slope, x, TILE) is not None


def _counts(delta: Tensor, tile: Ints) -> tuple[int, int]:
    return -(-delta.shape[1] // tile[0]), -(-delta.shape[2] // tile[1])


@client_dense_update.register_fake
def _(
    slope: Tensor, x: Tensor, delta: Tensor, decay: Tensor, start: Tensor, tile: Ints
) -> tuple[Tensor, Tensor, Tensor]:
    new = delta.new_empty(delta.shape)
    return new, new.new_empty(delta.shape, dtype=torch.bfloat16), new.new_empty(len(delta), *_counts(delta, tile))
