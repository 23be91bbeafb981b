"""Dropout whose masks are a pure function of a client's seed, the local step and the element.

torch's own dropout draws from a global generator: masks would depend on which clients share a block, and a loop,
`vmap` and a Flower node would train different models. Inside `SeededDropout`, `F.dropout` and its kin hash
(seed, call, element) instead, so any model that uses `nn.Dropout` is reproducible on every engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedblur.errors import ModelError

_ELEMENTWISE = {F.dropout, torch.dropout}
_CHANNELWISE = {F.dropout1d, F.dropout2d, F.dropout3d}
_REFUSED = {F.alpha_dropout, F.feature_alpha_dropout}


class SeededDropout(TorchFunctionMode):
    """Within this context dropout is seeded; with `seed=None` it is switched off (scores, evaluation)."""

    def __init__(self, seed: Tensor | None, step: Tensor | int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.step = step
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ELEMENTWISE:
            return self._drop(False, *args, **(kwargs or {}))
        if func in _CHANNELWISE:
            return self._drop(True, *args, **(kwargs or {}))
        if func in _REFUSED:
            raise ModelError(f"{func.__name__} cannot be seeded per client; use nn.Dropout instead")
        return func(*args, **(kwargs or {}))

    def _drop(
        self, channels: bool, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0 or self.seed is None:
            return input
        self.calls += 1
        key = hash32((self.seed + self.step * 0x1E3779B1 + self.calls * 0x05EBCA77).to(torch.int32))
        shape = [*input.shape[:2], *[1] * (input.dim() - 2)] if channels else input.shape
        index = torch.arange(math.prod(shape), device=input.device, dtype=torch.int32).view(shape)
        bits = hash32(key + index) & 0x7FFFFFFF
        return input * (bits >= int(p * 2**31)) / (1 - p)


def hash32(value: Tensor) -> Tensor:
    """A 32-bit integer mixer (constants of the murmur3 finaliser) on int32, whose products wrap on every device."""
    value = (value ^ ((value >> 16) & 0xFFFF)) * -0x7A143595
    value = (value ^ ((value >> 13) & 0x7FFFF)) * -0x3D4D51CB
    return value ^ ((value >> 16) & 0xFFFF)
