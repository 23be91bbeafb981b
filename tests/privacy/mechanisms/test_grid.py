"""The grid: rounding within a bound that holds for certain, and whole numbers modulo 2^b."""

from __future__ import annotations

import math

import pytest
import torch

from fedblur.core.errors import PrivacyError
from fedblur.core.rng import Seeded
from fedblur.privacy.mechanisms.hadamard import Rotation
from fedblur.privacy.mechanisms.secure_sum import Grid, fit_grid, norm_bound, round_within

BETA = math.exp(-0.5)


def on_sphere(rows: int, dimension: int, norm: float) -> torch.Tensor:
    x = torch.randn(rows, dimension, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return norm * x / x.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("clip_steps", [1.0, 5.0, 100.0, 4000.0])
def test_rounding__no_row_is_longer_than_the_bound(clip_steps: float) -> None:
    bound = norm_bound(clip_steps, 256, BETA)
    for values in (on_sphere(200, 256, clip_steps), torch.full((50, 256), 0.5, dtype=torch.float64)):
        values = values * min(1.0, clip_steps / float(values.norm(dim=1).max()))
        rounded = round_within(values, bound, range(len(values)), Seeded.root(0))
        assert float(rounded.norm(dim=1).max()) <= bound
        assert float((rounded - values).abs().max()) < 1
        assert torch.equal(rounded, rounded.round())


def test_rounding__what_exceeds_the_bound_is_drawn_again() -> None:
    """All halves: the plain rounding's squared norm is binomial, so a bound at its mean rejects about half."""
    values = torch.full((200, 64), 0.5, dtype=torch.float64)
    bound = math.sqrt(32)
    rounded = round_within(values, bound, range(len(values)), Seeded.root(0))
    assert float(rounded.norm(dim=1).max()) <= bound
    plain = round_within(values, math.inf, range(len(values)), Seeded.root(0))
    assert 0.3 < float((plain.norm(dim=1) > bound).double().mean()) < 0.6
    kept = plain.norm(dim=1) <= bound
    assert torch.equal(rounded[kept], plain[kept])


def test_rounding__is_unbiased_where_nothing_is_drawn_again() -> None:
    values = on_sphere(1, 50, 8.0).repeat(20_000, 1)
    mean = round_within(values, math.inf, range(len(values)), Seeded.root(0)).mean(0)
    assert float((mean - values[0]).abs().max()) < 5 * 0.5 / math.sqrt(20_000)


def test_rounding__does_not_depend_on_blocks_of_clients() -> None:
    values, rng = on_sphere(6, 100, 20.0), Seeded.root(3)
    bound = norm_bound(20.0, 100, BETA)
    parts = [
        round_within(values[:4], bound, range(4), rng),
        round_within(values[4:], bound, range(4, len(values)), rng),
    ]
    assert torch.equal(torch.cat(parts), round_within(values, bound, range(len(values)), rng))


def test_bound__is_the_smaller_of_two() -> None:
    assert norm_bound(10.0, 400, 0.0) == 30.0
    assert norm_bound(10.0, 400, BETA) == pytest.approx(math.sqrt(100 + 100 + 10 + 10))  # √(2·ln(1/β)) = 1


def test_fit__uses_the_modulus_to_the_full() -> None:
    rotation, n, bits, k, sigma = Rotation(2**12), 50.0, 16, 4.0, 1.3
    grid = fit_grid(sigma, rotation, n, bits, k, BETA)
    spread = math.sqrt((n * grid.clip_steps) ** 2 / 2**12 + n / 4 + grid.noise_steps**2)
    assert 2 * k * spread == pytest.approx(2**bits)
    assert grid.noise_steps == sigma * grid.clip_steps
    assert fit_grid(2 * sigma, rotation, n, bits, k, BETA).clip_steps < grid.clip_steps


def test_fit__refuses_a_grid_coarser_than_the_clip_norm() -> None:
    with pytest.raises(PrivacyError, match="bits=8 is broken here: rounding 65,536 coordinates"):
        fit_grid(100.0, Rotation(2**16), 10.0, 8, 4.0, BETA)


def test_wrap__is_a_remainder_around_zero() -> None:
    grid = Grid(1.0, 1.0, 2.0, 16)
    values = torch.arange(-40, 40)
    wrapped = grid.wrap(values)
    assert int(wrapped.min()) == -8
    assert int(wrapped.max()) == 7
    assert torch.equal((wrapped - values) % 16, torch.zeros(80, dtype=torch.int64))
    assert torch.equal(grid.wrap(grid.wrap(values) + grid.wrap(values)), grid.wrap(2 * values))
