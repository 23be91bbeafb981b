"""`nn.Conv2d` under `vmap`, with weights of each client's own: our Triton kernels in place of cuDNN's grouped path.

Inside `PerClientLayers` every `F.conv2d` that the kernels cover (2-d, one group) goes through an autograd function with
a vmap rule, and pools and ReLUs that follow it are fused where `fusion` allows; anything else, and any other device or
type, takes torch's own path, which is also the reference in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from fedblur.kernels import fusion
from fedblur.kernels.convolution import Conv2d, resolve

_POOLS = {F.max_pool2d, torch.max_pool2d}
_RELUS = {F.relu, torch.relu, Tensor.relu}


class PerClientLayers(TorchFunctionMode):
    """Within this context convolutions, and what may be fused with them, are ready for a batch of clients."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.conv2d, torch.conv2d):
            return _conv2d(Conv2d(*args, **kwargs))
        fused = None
        if func in _POOLS:
            fused = fusion.max_pool(*args, **kwargs)
        elif func in _RELUS:
            fused = fusion.relu(*args, **kwargs)
        return func(*args, **kwargs) if fused is None else fused


def _conv2d(call: Conv2d) -> Tensor:
    spec = resolve(call.weight, call.stride, call.padding, call.dilation)
    if call.groups != 1 or call.input.dim() != 4 or spec is None or not _own(call.weight):
        return call.plainly()
    return fusion.convolution(call.input, call.weight, call.bias, spec)


def _own(weight: Tensor) -> bool:
    """Whether a transform batches or differentiates the weight; one for all, as in a fixed front, is torch's to use."""
    return torch.compiler.is_compiling() or bool(is_functorch_wrapped_tensor(weight))  # dynamo cannot trace it
