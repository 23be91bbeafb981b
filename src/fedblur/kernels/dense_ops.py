"""The operator behind a large dense layer's update. `updating` puts it into a compiled step's graph."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedblur.kernels.conv_ops import Ints, uses_kernels

MOST_SAMPLES = 128  # of a batch: the kernel holds a tile's slopes of all of them at once
TILE = [64, 128]  # outputs and inputs that a program takes at once


@torch.library.custom_op("fedblur::client_dense_update", mutates_args=())
def client_dense_update(
    slope: Tensor, x: Tensor, delta: Tensor, decay: Tensor, start: Tensor, tile: Ints
) -> tuple[Tensor, Tensor, Tensor]:
    """Δ ← (1 − decay)·Δ + slope·x for each client; also start + Δ in bf16, and Σ Δ² of each tile.

    slope [clients, outputs, batch], x [clients, batch, inputs], delta [clients, outputs, inputs], decay [clients],
    start [outputs, inputs], the same for all. The tile is an argument, as it decides a result's shape and the compiler
    keeps its code by arguments.
    """
    if uses_kernels(x) and covers(slope, x):
        from fedblur.kernels import triton_dense

        return triton_dense.update(slope, x, delta, decay, start, tile)
    new = delta * (1 - decay)[:, None, None] + slope.float() @ x.float()
    bands, tiles = _counts(delta, tile)
    over = bands * tile[0] - delta.shape[1], tiles * tile[1] - delta.shape[2]
    squares = pad(new.square(), (0, over[1], 0, over[0])).view(-1, bands, tile[0], tiles, tile[1])
    return new, (start + new).bfloat16(), squares.sum((2, 4))


def covers(slope: Tensor, x: Tensor) -> bool:
    """Whether the kernel can take such a product: a batch that is not too large, and a GPU that can hold its loads."""
    if slope.shape[2] > MOST_SAMPLES or slope.device.type != "cuda":
        return slope.shape[2] <= MOST_SAMPLES
    from fedblur.kernels import triton_dense

    return triton_dense.stages(slope, x, TILE) is not None


def padded(samples: int) -> int:
    """A product's inner dimension is a power of two, and at least 16."""
    return max(16, 1 << (samples - 1).bit_length())


def _counts(delta: Tensor, tile: Ints) -> tuple[int, int]:
    return -(-delta.shape[1] // tile[0]), -(-delta.shape[2] // tile[1])


@client_dense_update.register_fake
def _(
    slope: Tensor, x: Tensor, delta: Tensor, decay: Tensor, start: Tensor, tile: Ints
) -> tuple[Tensor, Tensor, Tensor]:
    new = delta.new_empty(delta.shape)
    return new, new.new_empty(delta.shape, dtype=torch.bfloat16), new.new_empty(len(delta), *_counts(delta, tile))
