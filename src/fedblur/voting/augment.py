"""Stage 6, two views of a sample. In: inputs as a model reads them. Out: the same samples, disturbed a little or a lot.

Made for small images whose meaning a mirror would change (digits, letters): shifts, noise, and a square cut out.
Samples that are not images get noise, and some of their values are dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WEAK, _STRONG = 28, 9  # an image moves by up to its side over this: 1 and 3 pixels of 28
_HOLE = 3  # the square that is cut out: its side over this
_DROPPED = 0.2  # of the values of a sample that is not an image
_NOISE = 0.3  # in units of the pool's standard deviation


def weak(x: Tensor, generator: torch.Generator) -> Tensor:
    """[samples, *shape], moved a little."""
    return _shift(x, x.shape[-1] // _WEAK, generator) if x.dim() == 4 else x


def strong(x: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
    """[samples, *shape], moved, blurred by noise, and with a part missing. `scale`: the pool's standard deviation."""
    if x.dim() == 4:
        x = _cut(_shift(x, x.shape[-1] // _STRONG, generator), generator)
    else:
        x = x * (_uniform(x.shape, x, generator) >= _DROPPED)
    return x + _NOISE * scale * torch.randn(x.shape, generator=generator, device=x.device)


def _shift(x: Tensor, reach: int, generator: torch.Generator) -> Tensor:
    """Each image moved by up to `reach` pixels both ways; zeros come in."""
    if reach == 0:
        return x
    samples, channels, height, width = x.shape
    padded = torch.nn.functional.pad(x, (reach,) * 4)
    by = torch.randint(0, 2 * reach + 1, (2, samples, 1), generator=generator, device=x.device)
    rows = by[0] + torch.arange(height, device=x.device)  # [samples, height]
    columns = by[1] + torch.arange(width, device=x.device)
    tall = padded.gather(2, rows[:, None, :, None].expand(-1, channels, -1, padded.shape[3]))
    return tall.gather(3, columns[:, None, None, :].expand(-1, channels, height, -1))


def _cut(x: Tensor, generator: torch.Generator) -> Tensor:
    """Zero a square around a random pixel."""
    samples, _, height, width = x.shape
    centre = _uniform((2, samples, 1), x, generator)
    inside = [
        (torch.arange(side, device=x.device) + 0.5 - centre[axis] * side).abs() < side / _HOLE / 2
        for axis, side in enumerate((height, width))
    ]
    return x * ~(inside[0][:, None, :, None] & inside[1][:, None, None, :])


def _uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=like.device)
