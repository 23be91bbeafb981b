"""Augmentation inside the client: each step sees its images moved, turned, bent or mirrored, differently each time.

A client holds a few images and trains on them for hundreds of steps over a run. Views of them make the update say more
about the task and less about these very images, and cost no privacy: the clip comes later (invariant 1).

The randomness of a view is a hash of the client's seed, the step and the row, so a loop, `vmap` and compiled code see
the same views. Images are read by index arithmetic, without `grid_sample`, whose batching rule is slow; what lies
outside an image is its nearest edge pixel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.hashing import hash32
from fedblur.core.registry import register
from fedblur.data.population import Inputs
from fedblur.learning.methods.base import Method

_STREAM = 0x3C6EF372  # keeps a step's views apart from its dropout masks
_SLOT = 0x2545F491  # keeps a row's draws apart from each other
_ROW = 0x05EBCA6B
_SLOWEST, _FASTEST = 0.5, 1.5  # waves of the warp across an image


@register("method", "augment")
@dataclass(frozen=True)
class Augment(Method):
    """Train on disturbed views of the images. Lengths are shares of an image's side."""

    shift: float = 0.07  # up to so far each way: 2 pixels of 28
    rotation: float = 0.0  # degrees, up to so far each way
    scale: float = 0.0  # 0.1: from 90 to 110 %
    shear: float = 0.0  # 0.1: a column slants by up to a tenth of its length
    warp: float = 0.0  # amplitude of a slow wave that bends lines
    flip: bool = False  # mirror every other image: not for characters
    cutout: float = 0.0  # side of a square that is replaced by the image's mean
    views: int = 1  # of each sample in a step

    def __post_init__(self) -> None:
        for field in fields(self):
            value, limit = getattr(self, field.name), 180 if field.name == "rotation" else 1
            if field.name not in ("flip", "views") and not 0 <= value < limit:
                raise ConfigError(f"method.augment.{field.name}={value} must be in [0, {limit})")
        if self.views < 1:
            raise ConfigError(f"method.augment.views={self.views} must be at least 1")

    def view(self, inputs: Inputs, seed: Tensor, step: Tensor | int) -> Tensor:
        if isinstance(inputs, dict):
            raise ConfigError(f"method 'augment' moves images, but samples have inputs {', '.join(inputs)}; drop it")
        if inputs.dim() != 4:
            raise ConfigError(f"method 'augment' moves images, but samples have shape {[*inputs.shape[1:]]}; drop it")
        draws = _Draws(inputs.shape[0], seed, step)
        bends = any((self.rotation, self.scale, self.shear, self.warp))  # not only whole pixels move
        moved = self._bent(inputs, draws) if bends else self._shifted(inputs, draws)
        return self._cut(moved, draws) if self.cutout else moved

    def _shifted(self, inputs: Tensor, draws: _Draws) -> Tensor:
        """Move by whole pixels and mirror: no pixel changes its value."""
        height, width = inputs.shape[-2:]
        rows, columns = _grid(height, width, inputs)  # [pixels]
        down, right = (self.shift * side for side in (height, width))
        if self.flip:
            columns = torch.where(draws.signed()[:, None] < 0, width - 1 - columns, columns)
        rows = rows + (draws.signed() * (down + 0.5)).round()[:, None]
        columns = columns + (draws.signed() * (right + 0.5)).round()[:, None]
        return _read(inputs, rows, columns)

    def _bent(self, inputs: Tensor, draws: _Draws) -> Tensor:
        """Apply an affine map and a wave, read bilinearly."""
        height, width = inputs.shape[-2:]
        rows, columns = _grid(height, width, inputs)
        v, u = rows - (height - 1) / 2, columns - (width - 1) / 2  # from the centre
        angle = draws.signed() * math.radians(self.rotation)
        stretch, slant = 1 + draws.signed() * self.scale, draws.signed() * self.shear
        across, along = stretch * torch.cos(angle), stretch * torch.sin(angle)
        mirror = torch.where(draws.signed() < 0, -1.0, 1.0) if self.flip else 1.0
        down, right = draws.signed() * self.shift * height, draws.signed() * self.shift * width
        x = (across * mirror)[:, None] * u + (slant - along)[:, None] * v + right[:, None]
        y = (along * mirror)[:, None] * u + across[:, None] * v + down[:, None]
        if self.warp:
            x, y = x + self._wave(v / height, draws) * width, y + self._wave(u / width, draws) * height
        return _read_between(inputs, y + (height - 1) / 2, x + (width - 1) / 2)

    def _wave(self, position: Tensor, draws: _Draws) -> Tensor:
        """Return the displacement [rows, pixels] as a share of the side, of one sine per row."""
        waves = (_SLOWEST + _FASTEST) / 2 + draws.signed() * (_FASTEST - _SLOWEST) / 2
        phase, height = draws.signed() * math.pi, draws.signed() * self.warp
        return height[:, None] * torch.sin(2 * math.pi * waves[:, None] * position + phase[:, None])

    def _cut(self, inputs: Tensor, draws: _Draws) -> Tensor:
        rows, columns = _grid(inputs.shape[-2], inputs.shape[-1], inputs)
        inside = torch.ones_like(rows, dtype=torch.bool)
        for place, side in ((rows, inputs.shape[-2]), (columns, inputs.shape[-1])):
            centre = (draws.signed() + 1) / 2 * side
            inside = inside & ((place + 0.5 - centre[:, None]).abs() < self.cutout * side / 2)
        hole = inside.view(-1, 1, *inputs.shape[-2:])
        return torch.where(hole, inputs.mean((-1, -2), keepdim=True), inputs)


class _Draws:
    """Numbers for each row; every call gives new ones, in the order of the calls."""

    def __init__(self, rows: int, seed: Tensor, step: Tensor | int) -> None:
        key = hash32((seed + step * 0x1E3779B1 + _STREAM).to(torch.int32))
        self.keys = hash32(key + torch.arange(rows, device=seed.device, dtype=torch.int32) * _ROW)  # [rows]
        self.slot = 0

    def signed(self) -> Tensor:
        """Draw uniform numbers in [-1, 1), 24 bits each: exact in float32."""
        self.slot += 1
        bits = hash32(self.keys + (self.slot * _SLOT & 0x7FFFFFFF)) & 0xFFFFFF
        return bits.float() / 2**23 - 1


def _grid(height: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and column of each pixel, [height · width] floats."""
    pixel = torch.arange(height * width, device=like.device)
    return (pixel // width).float(), (pixel % width).float()


def _read(inputs: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Read pixels at whole coordinates [rows, pixels]; outside, the nearest edge."""
    height, width = inputs.shape[-2:]
    place = rows.clamp(0, height - 1).long() * width + columns.clamp(0, width - 1).long()
    place = place[:, None].expand(-1, inputs.shape[1], -1)
    return inputs.flatten(2).gather(2, place).view(inputs.shape)


def _read_between(inputs: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Read pixels at any coordinates [rows, pixels]: the mean of the four around, by distance."""
    top, left = rows.floor(), columns.floor()
    down, right = (rows - top), (columns - left)
    shape = (len(rows), 1, *inputs.shape[-2:])
    corners = [
        _read(inputs, top + i, left + j) * ((down if i else 1 - down) * (right if j else 1 - right)).view(shape)
        for i in (0, 1)
        for j in (0, 1)
    ]
    return torch.stack(corners).sum(0)
