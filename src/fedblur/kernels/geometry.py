"""The numbers of a convolution, and how kernels cut it into tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PROGRAMS = 4 * 132  # enough to fill an H100 or H200 a few times over
# Not to be specialised by Triton: with constant sides Triton 3.6 compiled wrong addresses for some strides
# and paddings (even out_w, stride 2, padding 2: every value wrong), though its interpreter is right.
SIZES = ("batch", "height", "width", "out_h", "out_w", "stride_rows", "by_image", "by_row")
SHIFT = 40  # of a reciprocal
_BEYOND = 1024  # pixels by which a tile may reach beyond the last
MAX_PATCH = 64  # values of an input patch that one tile holds


@dataclass(frozen=True)
class Geometry:
    """The numbers of a convolution; square strides, paddings and dilations are not assumed."""

    clients: int
    batch: int
    channels: int  # C
    height: int
    width: int
    outputs: int  # O
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def out_size(self) -> tuple[int, int]:
        sides = zip((self.height, self.width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        rows, columns = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)
        return rows, columns

    @property
    def pool_patch(self) -> int:
        """Values that all four members of a 2x2 pooling window see together."""
        return (self.kernel[0] + 1) * (self.kernel[1] + 1) * self.channels

    @property
    def poolable(self) -> bool:
        """Whether a 2x2 max-pool can be done by the convolution's own kernel."""
        plain = self.stride == (1, 1) and self.dilation == (1, 1) and min(self.out_size) >= 2
        return plain and (self.channels >= 16 or self.pool_patch <= MAX_PATCH)

    @property
    def addressable(self) -> bool:
        """Whether the kernels' 32-bit numbers reach all of a client's tensors, and their divisions are exact."""
        sizes = (self.height, self.width), self.out_size
        values = [self.batch * h * w * c for (h, w), c in zip(sizes, (self.channels, self.outputs), strict=True)]
        weights = self.outputs * self.kernel[0] * self.kernel[1] * self.channels
        exact = all(divides(self.batch * h * w + _BEYOND, h * w) and divides(h * w, w) for h, w in sizes)
        return max(*values, weights) < 2**31 - _BEYOND * max(self.channels, self.outputs) and exact

    @property
    def sides(self) -> tuple[int, int, int, int]:
        return self.height, self.width, *self.out_size

    @property
    def padded(self) -> bool:
        """Whether a kernel may look outside the image; without padding nobody has to check."""
        return self.padding != (0, 0)

    def constants(self) -> dict[str, int]:
        """What kernels are specialised to."""
        (kh, kw), (sh, sw), (ph, pw), (dh, dw) = self.kernel, self.stride, self.padding, self.dilation
        return {"KH": kh, "KW": kw, "SH": sh, "SW": sw, "PH": ph, "PW": pw, "DH": dh, "DW": dw}


class Tiles(NamedTuple):
    """How a kernel is cut: a tile's rows, columns and depth, warps, loads in flight (benchmarks/tune_kernels.py)."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def reciprocals(height: int, width: int) -> tuple[int, int]:
    """For `divided`, by the pixels of an image and by those of a row."""
    return tuple(-(-(1 << SHIFT) // divisor) for divisor in (height * width, width))  # type: ignore[return-value]


def divides(m: int, divisor: int) -> bool:
    """Whether the product with the reciprocal is the quotient for all numbers up to m.

    It is 1/divisor too large by a share of e/2^SHIFT, e below the divisor; k·divisor − 1 is the first to be rounded up.
    """
    return m * (-(1 << SHIFT) % divisor) < 1 << SHIFT


def tile(size: int, most: int) -> int:
    """A power of two that covers `size`, between 16 (the least a tensor core takes) and `most`."""
    return min(most, max(16, 1 << (size - 1).bit_length()))
