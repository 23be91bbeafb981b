"""`nn.Conv2d` under `vmap` with a separate weight for each client, and the layers that are fused with it.

Inside `PerClientLayers`, every `F.conv2d` that our Triton kernels cover (2-d, one group) goes through an autograd
function with a vmap rule. For one client it is torch's own convolution. For a block of clients it is one custom
operator (`operators`), which replaces cuDNN's slow grouped convolution and which `torch.compile` passes through
untouched. Anything else takes torch's own path, which is also the reference in the tests.

What follows a convolution can run in its kernel: 2x2 max-pool, ReLU, and ReLU with dropout. While a function is traced
for the compiler, a note on every convolution's output says how it was made. A layer that finds such a note computes
from the convolution's inputs instead, and the compiler drops the unfused call, whose result nobody uses any more.
Without tracing nothing is noted: the unfused call has already run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import grad as conv_grad
from torch.overrides import TorchFunctionMode

from fedblur.accel.kernels import operators
from fedblur.accel.kernels.convolution import (
    CONVOLUTIONS,
    POOLS,
    RELUS,
    Conv2d,
    Pair,
    Spec,
    is_2x2_pool,
    note,
    origin_of,
    resolve,
)
from fedblur.accel.kernels.operators import first, last

_FUSING: ContextVar[bool] = ContextVar("fusing", default=False)


@contextmanager
def fusing() -> Iterator[None]:
    """Fuse layers within this context. It is for tracing, where calls whose result nobody uses cost nothing."""
    token = _FUSING.set(True)
    try:
        yield
    finally:
        _FUSING.reset(token)


class PerClientLayers(TorchFunctionMode):
    """A context in which convolutions, and the layers that can be fused with them, work on a batch of clients."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in CONVOLUTIONS:
            return _convolution(Conv2d(*args, **kwargs))
        fused = None
        if func in POOLS:
            fused = _max_pool(*args, **kwargs)
        elif func in RELUS:
            fused = _relu(*args, **kwargs)
        return func(*args, **kwargs) if fused is None else fused


@dataclass(frozen=True)
class _Origin:
    """The origin of a tensor: by a convolution, perhaps pooled, perhaps followed by a ReLU."""

    x: Tensor
    w: Tensor
    b: Tensor | None
    spec: Spec
    pooled: bool = False
    relu: bool = False
    before: Tensor | None = None  # the input of the ReLU

    @property
    def poolable(self) -> bool:
        (b, c, *image), (o, _, *kernel) = self.x.shape, self.w.shape
        return not self.pooled and operators.geometry([1, b, *image, c], [1, o, *kernel, c], *self.spec).poolable


def _convolution(call: Conv2d) -> Tensor:
    spec = resolve(call.weight, call.stride, call.padding, call.dilation)
    # whether a transform batches or differentiates the weight; a shared one (a frozen front) is for torch
    per_client = torch.compiler.is_compiling() or is_functorch_wrapped_tensor(call.weight)  # dynamo cannot trace it
    if call.groups != 1 or call.input.dim() != 4 or spec is None or not per_client:
        return call.by_torch()
    return _note(ClientConv.apply(*call[:3], *spec), _Origin(*call[:3], spec))


def _max_pool(input: Tensor, *window: Any, **options: Any) -> Tensor | None:
    """Return the pooled convolution, or None where this pool or its input is of another kind."""
    origin = origin_of(input, _Origin)
    if origin is None or not is_2x2_pool(*window, **options) or not origin.poolable:
        return None
    return _pooled(replace(origin, pooled=True, before=None))


def _relu(input: Tensor, inplace: bool = False) -> Tensor | None:
    """Return the convolution's output after a ReLU, or None where there is nothing to fuse."""
    origin = origin_of(input, _Origin)
    if origin is None or inplace or origin.relu:
        return None
    if origin.pooled:
        return _pooled(replace(origin, relu=True))
    return _note(torch.relu(input), replace(origin, relu=True, before=input))


def _pooled(origin: _Origin) -> Tensor:
    y, _ = ConvPool.apply(origin.x, origin.w, origin.b, origin.spec[1], origin.relu)
    return _note(y, origin)


def _note(tensor: Tensor, origin: _Origin) -> Tensor:
    return note(tensor, origin) if _FUSING.get() else tensor


def before_relu(input: Tensor) -> Tensor | None:
    """Return the convolution's output whose ReLU this is, if dropout can be fused with both."""
    origin = origin_of(input, _Origin)
    return origin.before if origin is not None else None


def relu_dropout(before: Tensor, key: Tensor, rate: float) -> Tensor:
    """Return ReLU and dropout of a convolution's output that `before_relu` returned."""
    origin = origin_of(before, _Origin)
    assert origin is not None
    return ConvReluDropout.apply(origin.x, origin.w, origin.b, key, *origin.spec, rate)


class ClientConv(torch.autograd.Function):
    """y = conv(x, w) + b for one client. The vmap rule is one launch for all clients."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
        return torch.conv2d(x, w, b, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, _, *ctx.spec = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        gx = InputGrad.apply(gy, w, x.shape[-2], x.shape[-1], *ctx.spec) if ctx.needs_input_grad[0] else None
        gw, gb = WeightGrad.apply(gy, x, w.shape[-2], w.shape[-1], *ctx.spec)
        return gx, gw, gb if ctx.needs_input_grad[2] else None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor, b: Tensor | None, *spec: Pair) -> tuple[Tensor, int]:
        return first(torch.ops.fedblur.client_conv(*operands(info, in_dims, x, w, b), *spec)), 0


class Gradient(torch.autograd.Function):
    """A gradient of a convolution; it cannot be differentiated again."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        raise NotImplementedError("second derivatives of per-client convolutions")


class InputGrad(Gradient):
    """The gradient of a convolution with respect to its input."""

    @staticmethod
    def forward(gy: Tensor, w: Tensor, height: int, width: int, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
        shape = [gy.shape[0], w.shape[1], height, width]
        return conv_grad.conv2d_input(shape, w, gy, stride, padding, dilation)

    @staticmethod
    def vmap(info: Any, in_dims: Any, gy: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, int]:
        return first(torch.ops.fedblur.client_conv_input_grad(*lead_last(info, in_dims, gy, w), *rest)), 0


class WeightGrad(Gradient):
    """The gradients of a convolution with respect to its weight and bias."""

    @staticmethod
    def forward(
        gy: Tensor, x: Tensor, height: int, width: int, stride: Pair, padding: Pair, dilation: Pair
    ) -> tuple[Tensor, Tensor]:
        shape = [gy.shape[1], x.shape[1], height, width]
        return conv_grad.conv2d_weight(x, shape, gy, stride, padding, dilation), gy.sum((0, 2, 3))

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, gy: Tensor, x: Tensor, *rest: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        gw, gb = torch.ops.fedblur.client_conv_weight_grad(*lead_last(info, in_dims, gy, x), *rest)
        return (first(gw), gb), (0, 0)


def lead(info: Any, in_dims: Any, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors with the clients in front. What all clients share is expanded."""
    return [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=False)
    ]


def lead_last(info: Any, in_dims: Any, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors with the clients in front and the channels last, as the operators take them."""
    return [last(tensor) for tensor in lead(info, in_dims, *tensors)]


def operands(info: Any, in_dims: Any, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a convolution's operands as the operators take them; the bias has no channels to move."""
    bias = None if b is None else lead(info, in_dims[2:], b)[0].contiguous()
    x, w = lead_last(info, in_dims, x, w)
    return x, w, bias


class ConvPool(torch.autograd.Function):
    """One client's convolution, 2x2 max-pool and perhaps ReLU; it returns the values and the winners."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor | None, padding: Pair, relu: bool) -> tuple[Tensor, Tensor]:
        y = torch.conv2d(x, w, b, 1, padding)
        values, where = operators.pool(y.movedim(1, -1), relu)
        return values.movedim(-1, 1), where.movedim(-1, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, w, _, ctx.padding, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, w, output[1])

    @staticmethod
    def backward(ctx: Any, gy: Tensor, _: Any) -> Any:  # type: ignore[override]
        x, w, where = ctx.saved_tensors
        gx = None
        if ctx.needs_input_grad[0]:
            gx = PoolInputGrad.apply(gy, where, w, x.shape[-2], x.shape[-1], ctx.padding)
        gw, gb = PoolWeightGrad.apply(gy, where, x, w.shape[-2], w.shape[-1], ctx.padding)
        return gx, gw, gb if ctx.needs_input_grad[2] else None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, w: Tensor, b: Tensor | None, padding: Pair, relu: bool
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        y, where = torch.ops.fedblur.client_conv_pool(*operands(info, in_dims, x, w, b), padding, relu)
        return (first(y), first(where)), (0, 0)


class PoolInputGrad(Gradient):
    """The gradient of a pooled convolution with respect to its input."""

    @staticmethod
    def forward(gy: Tensor, where: Tensor, w: Tensor, height: int, width: int, padding: Pair) -> Tensor:
        tensors = (last(t[None]) for t in (gy, where, w))
        return first(torch.ops.fedblur.client_conv_pool_input_grad(*tensors, height, width, padding))[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, gy: Tensor, where: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, int]:
        tensors = lead_last(info, in_dims, gy, where, w)
        return first(torch.ops.fedblur.client_conv_pool_input_grad(*tensors, *rest)), 0


class PoolWeightGrad(Gradient):
    """The gradients of a pooled convolution with respect to its weight and bias."""

    @staticmethod
    def forward(gy: Tensor, where: Tensor, x: Tensor, height: int, width: int, padding: Pair) -> tuple[Tensor, Tensor]:
        tensors = (last(t[None]) for t in (gy, where, x))
        gw, gb = torch.ops.fedblur.client_conv_pool_weight_grad(*tensors, height, width, padding)
        return first(gw)[0], gb[0]

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, gy: Tensor, where: Tensor, x: Tensor, *rest: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        tensors = lead_last(info, in_dims, gy, where, x)
        gw, gb = torch.ops.fedblur.client_conv_pool_weight_grad(*tensors, *rest)
        return (first(gw), gb), (0, 0)


class ConvReluDropout(torch.autograd.Function):
    """One client's convolution, ReLU and seeded dropout; a value of zero means that one of the two set it to zero."""

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, b: Tensor | None, key: Tensor, stride: Pair, padding: Pair, dilation: Pair, rate: float
    ) -> Tensor:
        return operators.relu_dropout(torch.conv2d(x, w, b, stride, padding, dilation), key, rate)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, _, _, *ctx.spec, ctx.rate = inputs
        ctx.save_for_backward(x, w, output)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:  # type: ignore[override]
        x, w, y = ctx.saved_tensors
        opened = ReluDropoutGrad.apply(gy, y, ctx.rate)
        gx = InputGrad.apply(opened, w, x.shape[-2], x.shape[-1], *ctx.spec) if ctx.needs_input_grad[0] else None
        gw, gb = WeightGrad.apply(opened, x, w.shape[-2], w.shape[-1], *ctx.spec)
        return gx, gw, gb if ctx.needs_input_grad[2] else None, None, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, w: Tensor, b: Tensor | None, key: Tensor, *rest: Any
    ) -> tuple[Tensor, int]:
        keys = lead(info, in_dims[3:], key)[0].contiguous()
        return torch.ops.fedblur.client_conv_relu_dropout(*operands(info, in_dims, x, w, b), keys, *rest), 0


class ReluDropoutGrad(Gradient):
    """The gradient of ReLU and dropout with respect to their input."""

    @staticmethod
    def forward(gy: Tensor, y: Tensor, rate: float) -> Tensor:
        return torch.where(y > 0, gy / (1 - rate), 0.0)

    @staticmethod
    def vmap(info: Any, in_dims: Any, gy: Tensor, y: Tensor, rate: float) -> tuple[Tensor, int]:
        tensors = (tensor.contiguous() for tensor in lead(info, in_dims, gy, y))
        return first(torch.ops.fedblur.client_relu_dropout_grad(*tensors, rate)), 0
