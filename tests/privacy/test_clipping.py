"""Invariant 1: the clip is global, last, and rounding cannot cheat it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedblur.privacy.clipping import clip_l2


def exact_norm(row: torch.Tensor) -> float:
    return math.sqrt(math.fsum(float(v) ** 2 for v in row.double().tolist()))


@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 300),
    scale=st.floats(1e-20, 1e20),
    clip_norm=st.floats(1e-6, 1e6),
)
@settings(max_examples=300, deadline=None)
def test_clip__exact_norm_never_exceeds_the_bound(seed: int, size: int, scale: float, clip_norm: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = scale * torch.randn(3, size, generator=generator)
    bounded, _ = clip_l2(rows, clip_norm)
    assert all(exact_norm(row) <= clip_norm for row in bounded.value)


def test_clip__holds_in_float64_on_a_million_values() -> None:
    rows = torch.randn(4, 1_200_000, generator=torch.Generator().manual_seed(0))
    for clip_norm in (0.03, 0.1, 1.0, float(rows[0].double().norm())):
        bounded, _ = clip_l2(rows, clip_norm)
        assert float(bounded.value.double().norm(dim=1).max()) <= clip_norm
    # The bound is not bought with a visible loss of signal.
    assert float(bounded.value[0].double().norm()) >= clip_norm * (1 - 1e-6)


def test_clip__float32_norms_would_have_let_it_through() -> None:
    """Why the norm is taken in float64: scaling by torch's float32 norm can leave more than S."""
    rows = torch.rand(1, 4_000_000, generator=torch.Generator().manual_seed(0))
    naive = rows * (1.0 / torch.linalg.vector_norm(rows, dim=1))
    bounded, _ = clip_l2(rows, 1.0)
    assert float(bounded.value.double().norm()) <= 1.0
    if float(naive.double().norm()) <= 1.0:
        pytest.skip("this CPU's float32 norm does not underestimate")


def test_clip__below_the_bound_is_unchanged_bit_for_bit() -> None:
    rows = torch.randn(5, 100)
    bounded, norms = clip_l2(rows, 1e3)
    assert torch.equal(bounded.value, rows)
    assert torch.allclose(norms, rows.double().norm(dim=1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_clip__non_finite_becomes_zero(bad: float) -> None:
    rows = torch.ones(3, 10)
    rows[1, 4] = bad
    bounded, norms = clip_l2(rows, 0.5)
    assert bool((bounded.value[1] == 0).all())
    assert bool((bounded.value[[0, 2]] != 0).all())
    assert not math.isfinite(float(norms[1]))


def test_clip__zero_stays_zero_huge_is_clipped_and_absurd_is_zero() -> None:
    rows = torch.stack([torch.zeros(8), torch.full((8,), 1e29), torch.full((8,), 3e38)])
    bounded, _ = clip_l2(rows, 1.0)
    assert bool((bounded.value[0] == 0).all())
    assert 0.999 < float(bounded.value[1].double().norm()) <= 1.0
    assert bool((bounded.value[2] == 0).all())


def test_clip__infinite_bound_changes_nothing() -> None:
    rows = torch.randn(2, 9)
    assert torch.equal(clip_l2(rows, math.inf)[0].value, rows)


def test_clip__one_norm_over_all_tensors_not_one_per_tensor() -> None:
    """Two 'layers' of norm S each: per-tensor clipping would leave S·√2."""
    row = torch.cat([torch.full((4,), 0.5), torch.full((4,), 0.5)])[None]  # each half has norm 1
    bounded, _ = clip_l2(row, 1.0)
    assert float(bounded.value.double().norm()) <= 1.0
