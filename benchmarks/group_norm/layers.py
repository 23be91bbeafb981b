"""GroupNorm with scales of each client's own, as an autograd function with a vmap rule, and with a ReLU behind it.

A ReLU is fused while a function is traced, by a note on the norm's output, as `fusion` does for convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.kernels import conv_ops
from fedblur.kernels.convolution import Gradient, lead
from fedblur.kernels.fusion import note
from fedblur.kernels.layers import PerClientLayers, _own
from fedblur.kernels.notes import origin_of
from group_norm import ops


class GroupNorm(NamedTuple):
    """The arguments of `F.group_norm`."""

    input: Tensor
    num_groups: int
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5

    @property
    def covered(self) -> bool:
        """Whether the kernels can take this norm; torch's own is compiled well enough where they cannot."""
        if self.input.dim() != 4 or self.weight is None or self.bias is None:
            return False
        batch, channels, height, width = self.input.shape
        return ops.covers(torch.Size((1, batch, height, width, channels)), self.num_groups)

    def applied(self, relu: bool) -> Tensor:
        y: Tensor
        y, _, _ = ClientGroupNorm.apply(self.input, self.weight, self.bias, self.num_groups, self.eps, relu)
        return y


class WithGroupNorm(PerClientLayers):
    """The library's layers and these."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = None
        if func is F.group_norm:
            found = group_norm(GroupNorm(*args, **(kwargs or {})))
        elif func in (F.relu, torch.relu, Tensor.relu):
            found = relu(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs) if found is None else found


def group_norm(call: GroupNorm) -> Tensor | None:
    """None where this norm is torch's."""
    if not call.covered or call.weight is None or not _own(call.weight):
        return None
    return note(call.applied(relu=False), call)


def relu(input: Tensor, inplace: bool = False) -> Tensor | None:
    """The norm's output after a ReLU, or None where there is nothing to fuse."""
    call = origin_of(input, GroupNorm)
    return None if call is None or inplace else call.applied(relu=True)


class ClientGroupNorm(torch.autograd.Function):
    """One client's norm and perhaps ReLU; returns the values, the groups' means and reciprocal deviations."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = conv_ops.last(x[None]), weight[None], bias[None]
        y, mean, rstd = torch.ops.fedblur.client_group_norm(*given, groups, eps, relu)
        return conv_ops.first(y)[0], mean[0], rstd[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, weight, bias, _, _, ctx.relu = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, *output[1:], weight, bias)

    @staticmethod
    def backward(ctx: Any, gy: Tensor, *_: Any) -> Any:  # type: ignore[override]
        gx, by_weight, by_bias = GroupNormGrad.apply(gy, *ctx.saved_tensors, ctx.relu)
        return gx, by_weight, by_bias, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> tuple[Any, Any]:
        x, weight, bias = lead(info, in_dims, x, weight, bias)
        y, mean, rstd = torch.ops.fedblur.client_group_norm(conv_ops.last(x), weight, bias, *rest)
        return (conv_ops.first(y), mean, rstd), (0, 0, 0)


class GroupNormGrad(Gradient):
    """gx, and the gradients by weight and bias."""

    @staticmethod
    def forward(gy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        *statistics, relu = rest
        given = conv_ops.last(gy[None]), conv_ops.last(x[None]), *(t[None] for t in statistics)
        gx, by_weight, by_bias = torch.ops.fedblur.client_group_norm_grad(*given, relu)
        return conv_ops.first(gx)[0], by_weight[0].sum(0).to(x.dtype), by_bias[0].sum(0).to(x.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: Any, gy: Tensor, x: Tensor, *rest: Any) -> tuple[Any, Any]:
        *statistics, relu = rest
        gy, x, *statistics = lead(info, in_dims, gy, x, *statistics)
        gx, by_weight, by_bias = torch.ops.fedblur.client_group_norm_grad(
            conv_ops.last(gy), conv_ops.last(x), *statistics, relu
        )
        sums = (part.sum(1).to(x.dtype) for part in (by_weight, by_bias))
        return (conv_ops.first(gx), *sums), (0, 0, 0)
