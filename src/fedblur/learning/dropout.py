"""Dropout whose masks are a pure function of a client's seed, the local step and the element.

torch's own dropout draws from a global generator: masks would depend on which clients share a block, and a loop,
`vmap` and a Flower node would train different models. Inside `SeededDropout`, `F.dropout` and its kin hash
(seed, call, element) instead, so any model that uses `nn.Dropout` is reproducible on every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedblur.core.accel_switch import accelerated
from fedblur.core.errors import ModelError
from fedblur.core.hashing import hash32, kept

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
        after_relu = None  # ReLU and dropout as one kernel, where the input comes from a ReLU that can be fused
        if not channels and accelerated():
            from fedblur.accel.kernels import fused_layers

            before = fused_layers.before_relu(input)
            after_relu = None if before is None else partial(fused_layers.relu_dropout, before)
        if self.seed is None:  # the fused kernel all the same, for the sake of its layout: nothing is dropped
            nothing = torch.zeros((), dtype=torch.int32, device=input.device)
            return input if after_relu is None or p == 0 else after_relu(nothing, 0.0)
        if not training or p == 0:
            return input
        self.calls += 1
        key = hash32((self.seed + self.step * 0x1E3779B1 + self.calls * 0x05EBCA77).to(torch.int32))
        if after_relu is not None:
            return after_relu(key, p)
        shape = torch.Size([*input.shape[:2], *[1] * (input.dim() - 2)]) if channels else input.shape
        return input * kept(key, shape, input.device, p) / (1 - p)
