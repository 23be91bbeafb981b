"""A public random rotation that spreads an update evenly over its coordinates, so that none leaves the modulus alone.

The rotation is y = M·D·x. D holds random signs, from a public seed. M is a Kronecker product of small matrices, each
symmetric and orthonormal, so M is its own inverse and x = D·M·y. A Walsh-Hadamard matrix alone would need the length
2^⌈log₂ d⌉, half as long again for a ResNet-18. Here x is laid out as q ≤ 32 blocks whose length is a power of two: a
Walsh-Hadamard transform runs inside every block, and one q × q matrix mixes the blocks (Walsh-Hadamard where q is
a power of two, else Hartley's). Padding stays below 1/16 of d (none at all for d ≤ 32), and no block can keep an update
to itself, as it could if blocks were rotated apart.

All is float64: the norm survives to 1e-14, and reduced-precision matrix products of an accelerator do not apply.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedblur.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_BLOCKS = 32  # at most; more would pad less and cost more
_RADIX = 5  # inside blocks, 2^5 × 2^5 matrices: a few large products instead of many passes over memory


@dataclass(frozen=True)
class Rotation:
    """The rotation for updates of `dimension` values. Linear, orthonormal, cost O(d log d)."""

    dimension: int  # d

    @property
    def block(self) -> int:
        """Length of a block."""
        return int(2 ** max(0, math.ceil(math.log2(self.dimension / _BLOCKS))))

    @property
    def blocks(self) -> int:
        """q."""
        return -(-self.dimension // self.block)

    @property
    def padded(self) -> int:
        """d', the values that are sent."""
        return self.blocks * self.block

    @property
    def flatness(self) -> float:
        """ρ: a rotated coordinate of a vector x has a variance (over signs) of at most ρ·‖x‖²/d'."""
        return 1.0 if _is_power_of_two(self.blocks) else 2.0

    def signs(self, seed: int, device: torch.device) -> Tensor:
        """Return a round's D, [d']: the same for everyone who knows the seed. It needs no secrecy."""
        bits = np.random.Generator(np.random.Philox(key=seed)).integers(0, 2, self.padded, dtype=np.int8)
        return torch.from_numpy(2.0 * bits - 1.0).to(device)

    def forward(self, x: Tensor, signs: Tensor) -> Tensor:
        """Rotate [rows, d] to [rows, d'], float64; every row keeps its norm.

        Formal guarantee: a row's result is a function of that row alone, to the last bit: rows are rotated one by one.
        In one product for all of them, its last bits could depend on how many there are (docs/isolation.md).
        """
        padding = (0, self.padded - self.dimension)
        rotated = x.new_empty(len(x), self.padded, dtype=torch.float64)
        for row, source in zip(rotated, x, strict=True):
            row.copy_(self._mix((torch.nn.functional.pad(source.double(), padding) * signs)[None])[0])
        return rotated

    def inverse(self, y: Tensor, signs: Tensor) -> Tensor:
        """Undo `forward`: [rows, d'] to [rows, d]."""
        return (self._mix(y.double()) * signs)[:, : self.dimension]

    def _mix(self, x: Tensor) -> Tensor:
        """Compute M·x for every row, one small matrix along one axis after the other."""
        rows, stride = len(x), self.padded
        full, rest = divmod(self.block.bit_length() - 1, _RADIX)
        for size in [self.blocks, *([2**_RADIX] * full), *([2**rest] if rest else [])]:
            stride //= size
            matrix = _orthonormal(size).to(x.device)
            shaped = x.reshape(-1, size, stride)  # [rows · outer, size, inner]
            x = shaped.squeeze(-1) @ matrix if stride == 1 else matrix @ shaped
        return x.reshape(rows, self.padded)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


@functools.cache  # at most 32 sizes, and every row of every round asks for two or three
def _orthonormal(size: int) -> Tensor:
    """Return a symmetric orthonormal matrix whose entries are at most √(2/size): Walsh-Hadamard's, or Hartley's."""
    if not _is_power_of_two(size):
        angle = 2 * np.pi * (np.outer(np.arange(size), np.arange(size)) % size) / size
        return torch.from_numpy((np.cos(angle) + np.sin(angle)) / math.sqrt(size))
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return torch.from_numpy(matrix / math.sqrt(size))
