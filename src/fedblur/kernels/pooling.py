"""Max-pooling over windows that do not overlap, in a form that a compiler turns into one pass each way.

torch's own backward looks up, for every input pixel, all windows that could contain it, and a compiler that recomputes
the winners does so four times over. Here each window's winner (the first of equals, as in torch) is kept, and the
gradient is written once. Windows that overlap, padding and dilation take torch's path.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """`F.max_pool2d`."""
    window, step = _pair(kernel_size), _pair(stride if stride not in (None, []) else kernel_size)
    simple = window == step and _pair(padding) == (0, 0) and _pair(dilation) == (1, 1)
    if not simple or ceil_mode or return_indices:
        return F.max_pool2d(  # type: ignore[no-any-return, call-overload]
            input, kernel_size, stride, padding, dilation, ceil_mode, return_indices
        )
    output: Tensor = Windows.apply(input, *window)[0]
    return output


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


class Windows(torch.autograd.Function):
    """The maximum of each window and which of its pixels it was."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        height, width = x.shape[-2] // rows, x.shape[-1] // columns
        whole = x[..., : height * rows, : width * columns]
        windows = whole.unflatten(-1, (width, columns)).unflatten(-3, (height, rows))  # [.., OH, rows, OW, columns]
        best, winner = windows[..., 0, :, 0], torch.zeros_like(windows[..., 0, :, 0], dtype=torch.uint8)
        for place in range(1, rows * columns):
            rival = windows[..., place // columns, :, place % columns]
            better = (rival > best) | rival.isnan()
            best, winner = torch.where(better, rival, best), torch.where(better, place, winner)
        return best, winner

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.rows, ctx.columns = inputs
        ctx.shape = x.shape
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, gy: Tensor, unused: Tensor) -> Any:
        (winner,) = ctx.saved_tensors
        rows, columns = ctx.rows, ctx.columns
        places = torch.arange(rows * columns, device=gy.device, dtype=torch.uint8).view(rows, 1, columns)
        spread = torch.where(winner[..., :, None, :, None] == places, gy[..., :, None, :, None], 0.0)
        whole = spread.flatten(-2).flatten(-3, -2)  # [.., OH·rows, OW·columns]
        return F.pad(whole, (0, ctx.shape[-1] - whole.shape[-1], 0, ctx.shape[-2] - whole.shape[-2])), None, None
