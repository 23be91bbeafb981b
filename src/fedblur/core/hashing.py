"""A 32-bit hash on tensors, and the dropout masks made of it: pure functions, the same bits on every device."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hash32(value: Tensor) -> Tensor:
    """Mix 32-bit integers (constants of the murmur3 finaliser) on int32, whose products wrap on every device."""
    value = (value ^ ((value >> 16) & 0xFFFF)) * -0x7A143595
    value = (value ^ ((value >> 13) & 0x7FFFF)) * -0x3D4D51CB
    return value ^ ((value >> 16) & 0xFFFF)


def kept(key: Tensor, shape: torch.Size, device: torch.device, rate: float) -> Tensor:
    """Return which elements of a tensor dropout keeps; `key` is a scalar int32."""
    index = torch.arange(math.prod(shape), device=device, dtype=torch.int32).view(shape)
    return (hash32(key + index) & 0x7FFFFFFF) >= threshold(rate)


def threshold(rate: float) -> int:
    """Return the threshold below which an element's 31 bits drop it."""
    return int(rate * 2**31)
