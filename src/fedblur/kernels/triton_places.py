"""Where a row of an implicit GEMM lies in its image: what all convolution kernels share.

Rows count the pixels of all images of a client. Turning them into coordinates takes two divisions by numbers that the
compiler does not know, tens of instructions each, in loops that otherwise multiply matrices: a third of their time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fedblur.kernels import geometry

_SHIFT = tl.constexpr(geometry.SHIFT)


@triton.jit
def divided(m, reciprocal):
    """m // divisor, as a product with `geometry.reciprocals`."""
    return ((m.to(tl.int64) * reciprocal) >> _SHIFT).to(tl.int32)


@triton.jit
def coordinates(m, height, width, by_image, by_row):
    """(image, row, column) of pixel m."""
    image = divided(m, by_image)
    pixel = m - image * (height * width)
    row = divided(pixel, by_row)
    return image, row, pixel - row * width


@triton.jit
def within(place, size):
    """0 <= place < size, by one comparison."""
    return place.to(tl.uint32) < size.to(tl.uint32)
