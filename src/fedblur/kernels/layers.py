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
from torch.overrides import TorchFunctionMode

from fedblur.kernels import fusion
from fedblur.kernels.convolution import resolve

_POOLS = {F.max_pool2d, torch.max_pool2d}
_RELUS = {F.relu, torch.relu, Tensor.relu}


class PerClientLayers(TorchFunctionMode):
    """Within this context convolutions, and what may be fused with them, are ready for a batch of clients."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.conv2d, torch.conv2d):
            return _conv2d(*args, **kwargs)
        fused = None
        if func in _POOLS:
            fused = fusion.max_pool(*args, **kwargs)
        elif func in _RELUS:
            fused = fusion.relu(*args, **kwargs)
        return func(*args, **kwargs) if fused is None else fused


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if groups != 1 or input.dim() != 4:
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    spec = resolve(weight, stride, padding, dilation)
    if spec is None:
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    return fusion.convolution(input, weight, bias, spec)
