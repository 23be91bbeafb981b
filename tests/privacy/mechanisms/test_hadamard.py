"""The rotation: orthonormal, its own inverse up to signs, flat, and hardly padded."""

from __future__ import annotations

import pytest
import torch

from fedblur.privacy.mechanisms.hadamard import Rotation
from tests.worlds import CPU

SIZES = [1, 2, 3, 31, 32, 33, 100, 650, 1024, 5000, 39_454]


@pytest.mark.parametrize("dimension", SIZES)
def test_rotation__keeps_norms_and_angles_and_is_undone(dimension: int) -> None:
    rotation = Rotation(dimension)
    x = torch.randn(4, dimension, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    signs = rotation.signs(5, CPU)
    y = rotation.forward(x, signs)
    assert y.shape == (4, rotation.padded)
    torch.testing.assert_close(y @ y.T, x @ x.T, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(rotation.inverse(y, signs), x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dimension", [7, 40, 650])
def test_rotation__matrix_is_orthonormal_to_1e_6_and_its_own_inverse(dimension: int) -> None:
    rotation = Rotation(dimension)
    eye = torch.eye(rotation.padded, dtype=torch.float64)
    matrix = rotation._mix(eye)
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-12)
    torch.testing.assert_close(matrix @ matrix, eye, rtol=0, atol=1e-12)
    assert float(matrix.square().max()) <= rotation.flatness / rotation.padded + 1e-12


@pytest.mark.parametrize("dimension", [*SIZES, 1_018_174, 1_405_258, 11_173_962])
def test_rotation__padding_stays_small(dimension: int) -> None:
    assert dimension <= Rotation(dimension).padded <= dimension * 17 / 16


def test_rotation__the_papers_network_is_one_walsh_hadamard_transform() -> None:
    rotation = Rotation(1_018_174)
    assert rotation.padded == 2**20
    assert rotation.flatness == 1.0


@pytest.mark.parametrize("dimension", [5000, 39_454])
def test_rotation__spreads_an_update_that_sits_in_one_block(dimension: int) -> None:
    """Blocks that were rotated apart would leave the largest coordinate √q times higher."""
    rotation = Rotation(dimension)
    x = torch.zeros(1, dimension)
    x[0, -7:] = 1.0
    y = rotation.forward(x, rotation.signs(1, CPU))
    assert float(y.abs().max()) <= 7 * (rotation.flatness / rotation.padded) ** 0.5 + 1e-9


def test_rotation__signs_follow_from_the_round() -> None:
    rotation = Rotation(1000)
    assert torch.equal(rotation.signs(3, CPU), rotation.signs(3, CPU))
    assert not torch.equal(rotation.signs(3, CPU), rotation.signs(4, CPU))
    assert set(rotation.signs(3, CPU).tolist()) == {-1.0, 1.0}


def test_rotation__of_a_row_does_not_depend_on_the_others() -> None:
    """To the last bit: rounding to whole numbers comes next, and must not show who else is in the block."""
    generator = torch.Generator().manual_seed(0)
    rotation = Rotation(5000)
    rows, signs = torch.randn(9, 5000, generator=generator), rotation.signs(3, torch.device("cpu"))
    together = rotation.forward(rows, signs)
    for count in (1, 4, 9):
        loud = torch.cat([1e30 * rows[count:], rows[:count]])
        alone = rotation.forward(loud, signs)[-count:]
        assert torch.equal(alone, together[:count])
