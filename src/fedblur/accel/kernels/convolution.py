"""Shared by layers for one client and for a block of clients: the arguments of a convolution, and notes on tensors."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[int, int]
Spec = tuple[Pair, Pair, Pair]  # stride, padding, dilation
Origin = TypeVar("Origin")
CONVOLUTIONS = {F.conv2d, torch.conv2d}
RELUS = {F.relu, torch.relu, Tensor.relu}
POOLS = {F.max_pool2d, torch.max_pool2d}
_NOTE = "_fedblur_origin"


class Conv2d(NamedTuple):
    """The arguments of `F.conv2d`."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    def by_torch(self) -> Tensor:
        """Return the result of torch's own convolution."""
        return F.conv2d(*self)


def resolve(weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Spec | None:
    """Return stride, padding and dilation as numbers, also for "same" and "valid"; None for a "same" that is uneven."""
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
    """Return two numbers for a setting that torch takes as one number or as two."""
    if isinstance(value, int):
        return value, value
    first, second = value if len(value) == 2 else (value[0], value[0])
    return int(first), int(second)


def is_2x2_pool(
    kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:  # fmt: skip
    """Return whether these arguments of `F.max_pool2d` ask for the values of 2x2 windows that lie side by side."""
    window = pair(kernel_size), pair(stride or 2), pair(padding), pair(dilation)
    return window == ((2, 2), (2, 2), (0, 0), (1, 1)) and not ceil_mode and not return_indices


def note(tensor: Tensor, origin: object) -> Tensor:
    """Note on a tensor how it was made, and return it: a layer that follows can make use of that."""
    setattr(tensor, _NOTE, (origin, tensor._version))
    return tensor


def origin_of(tensor: Tensor, kind: type[Origin]) -> Origin | None:
    """Return the note on this tensor if it is of this kind, and None once the tensor was changed in place."""
    origin, version = getattr(tensor, _NOTE, (None, -1))
    return origin if isinstance(origin, kind) and tensor._version == version else None
