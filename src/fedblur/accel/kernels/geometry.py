"""The numbers of a convolution, and what 32-bit kernels can reach and divide."""

from __future__ import annotations

from dataclasses import dataclass

SHIFT = 40  # of a reciprocal
_BEYOND = 1024  # pixels by which a tile may reach beyond the last one
MAX_PATCH = 64  # values of an input patch that one tile holds


@dataclass(frozen=True)
class Geometry:
    """The numbers of a convolution. Rows and columns may differ in stride, padding and dilation."""

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
    def pooled_size(self) -> tuple[int, int]:
        return self.out_size[0] // 2, self.out_size[1] // 2

    @property
    def pool_patch(self) -> int:
        """Return how many values the four members of a 2x2 pooling window see together."""
        return (self.kernel[0] + 1) * (self.kernel[1] + 1) * self.channels

    @property
    def poolable(self) -> bool:
        """Return whether the convolution's own kernel can do a 2x2 max-pool as well."""
        plain = self.stride == (1, 1) and self.dilation == (1, 1) and min(self.out_size) >= 2
        return plain and (self.channels >= 16 or self.pool_patch <= MAX_PATCH)

    @property
    def addressable(self) -> bool:
        """Return whether the kernels' 32-bit numbers reach all of a client's tensors, and their divisions are exact."""
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
        """Return whether a kernel may look outside the image. Without padding it need not check."""
        return self.padding != (0, 0)

    def constants(self) -> dict[str, int]:
        """Return the constants that kernels are compiled for."""
        (kh, kw), (sh, sw), (ph, pw), (dh, dw) = self.kernel, self.stride, self.padding, self.dilation
        return {"KH": kh, "KW": kw, "SH": sh, "SW": sw, "PH": ph, "PW": pw, "DH": dh, "DW": dw}


def reciprocals(height: int, width: int) -> tuple[int, int]:
    """Return the reciprocals, for `triton_common.divided`, of an image's pixels and of a row's."""
    return tuple(-(-(1 << SHIFT) // divisor) for divisor in (height * width, width))  # type: ignore[return-value]


def divides(m: int, divisor: int) -> bool:
    """Return whether the product with the reciprocal is the quotient for all numbers up to m.

    The reciprocal is too large by a share of e/2^SHIFT, with e below the divisor. The first number that is rounded up
    has the form k·divisor − 1.
    """
    return m * (-(1 << SHIFT) % divisor) < 1 << SHIFT
