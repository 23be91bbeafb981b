"""A convolution's numbers: what 32-bit kernels can reach, and divisions as products with reciprocals."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedblur.accel.kernels.geometry import SHIFT, Geometry, divides, reciprocals

PLAIN = Geometry(2, 64, 3, 32, 32, 64, (3, 3), (1, 1), (1, 1), (1, 1))


@given(st.integers(1, 2**22), st.integers(1, 2**12), st.integers(0, 2**31))
def test_reciprocal__divides_exactly_up_to_what_it_says(height: int, width: int, m: int) -> None:
    for divisor, reciprocal in zip((height * width, width), reciprocals(height, width), strict=True):
        last = m // divisor * divisor + divisor - 1  # the largest with its quotient, and the first to be wrong
        if divides(last, divisor):
            assert (last * reciprocal) >> SHIFT == last // divisor
            assert (m * reciprocal) >> SHIFT == m // divisor


def test_reciprocal__of_a_large_image_is_wrong_for_many_pixels() -> None:
    size = 336 * 448
    by_image, _ = reciprocals(336, 448)
    first = next(image for image in range(1, 200) if ((image * size - 1) * by_image) >> SHIFT != image - 1)
    assert first == 58
    assert not divides(first * size - 1, size)
    assert divides((first - 1) * size - 1, size)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"batch": 256, "height": 224, "width": 224}, True),
        ({"batch": 128, "height": 512, "width": 512, "outputs": 64}, False),  # 2^31 values
        ({"batch": 127, "height": 512, "width": 512, "outputs": 63}, True),
        ({"batch": 58, "height": 336, "width": 448, "outputs": 16}, False),  # see above
        ({"channels": 2**14, "outputs": 2**14, "batch": 1}, False),  # weights
    ],
    ids=str,
)
def test_addressable__is_what_32_bits_can_reach(changes: dict[str, int], expected: bool) -> None:
    assert replace(PLAIN, **changes).addressable is expected
