"""The public grid: integer norms within the bound, exact sums, and a sum that no float leaves without its noise."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedblur.core.errors import PrivacyError
from fedblur.core.rng import Seeded, System
from fedblur.privacy.clipping import Bounded, clip_l2
from fedblur.privacy.mechanisms.base import Once, Release
from fedblur.privacy.mechanisms.gaussian import FixedPoint, Gaussian, _floor_log2
from tests.worlds import CPU


def release(d: int, clip_norm: float = 0.5, sigma: float = 2.0, cohort: int = 8) -> Release:
    return Release(d, clip_norm, sigma, cohort, CPU)


def whole(rows: torch.Tensor, request: Release) -> list[list[int]]:
    """Each row on the grid, alone."""
    grid, found = FixedPoint.of(request), []
    for row in rows:
        total = torch.zeros(rows.shape[1], dtype=torch.int64)
        grid.add_rows(total, row[None])
        found.append(total.tolist())
    return found


def demand_norms(rows: torch.Tensor, request: Release) -> None:
    """In whole numbers and fractions alone: Σ k² ≤ (S/γ)²; towards zero; less than a step away."""
    step = Fraction(FixedPoint.of(request).step)
    most = (Fraction(request.clip_norm) / step) ** 2
    for row, found in zip(rows.tolist(), whole(rows, request), strict=True):
        assert sum(k * k for k in found) <= most
        for value, k in zip(row, found, strict=True):
            assert 0 <= abs(Fraction(value)) - abs(k) * step < step
            assert k == 0 or (k > 0) == (value > 0)


FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
PLAIN = st.floats(-1, 1, width=32)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.lists(FLOATS | PLAIN, min_size=6, max_size=6), min_size=1, max_size=4),
    clip_norm=st.sampled_from([0.5, 1.0, 1e-6, 3.7, 1e5, math.pi]),
    sigma=st.sampled_from([0.0, 0.01, 1.0, 7.3, 1e6]),
)
def test_grid__integer_norms_are_within_the_bound_for_any_updates(rows, clip_norm: float, sigma: float) -> None:
    bounded, _ = clip_l2(torch.tensor(rows), clip_norm)
    demand_norms(bounded.value, release(6, clip_norm, sigma))


@pytest.mark.parametrize("d", [1, 2, 3, 100, 4097])
def test_grid__integer_norms_are_within_the_bound_for_adversarial_updates(d: int) -> None:
    """On the ball, on the grid and one unit in the last place beside it, one coordinate, all alike, tiny, huge."""
    generator = torch.Generator().manual_seed(0)
    request = release(d)
    step = FixedPoint.of(request).step
    on_grid = torch.randint(-3, 4, (3, d), generator=generator) * step
    rows = [
        *torch.randn(4, d, generator=generator),
        torch.eye(1, d)[0],
        -torch.ones(d),
        *on_grid,
        *torch.nextafter(on_grid, torch.tensor(1.0)),
        *torch.nextafter(on_grid, torch.tensor(-1.0)),
        torch.full((d,), 1e-45),
        torch.full((d,), 3e38),
        torch.full((d,), math.nan),
    ]
    bounded, _ = clip_l2(torch.stack(rows).float(), 0.5)
    demand_norms(bounded.value, request)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 9))
def test_sum__is_exact_in_any_order_and_any_split(seed: int, clients: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    request = release(50, cohort=clients)
    rows = clip_l2(torch.randn(clients, 50, generator=generator) * 10 ** float(seed % 7 - 3), 0.5)[0].value
    exact = [sum(column) for column in zip(*whole(rows, request), strict=True)]
    for order in (torch.arange(clients), torch.randperm(clients, generator=generator)):
        blocks = [Bounded(part, 0.5) for part in rows[order].split(size)]
        total = Gaussian().accumulate(blocks, request, Seeded.root(0))
        assert total.dtype == torch.int64
        assert total.tolist() == exact
    halves = [
        Gaussian().accumulate([Bounded(part, 0.5)], request, Seeded.root(0)) for part in rows.split(-(-clients // 2))
    ]
    assert sum(halves).tolist() == exact


def test_sum__of_the_longest_messages_is_exact_in_one_block() -> None:
    """Messages of 2^41 steps, and single steps among them: a sum beyond 2^53 in float64 would lose those."""
    request = release(2, 1.0, 2.0**-21, 10_000)
    grid = FixedPoint.of(request)
    assert 1.0 / grid.step == 2**41
    rows = torch.zeros(10_000, 2)
    rows[:, 0] = 1 - 2.0**-24
    rows[::10, 0] = grid.step
    rows[0, 0] = 0  # an odd sum is none of float64's beyond 2^53
    total = torch.zeros(2, dtype=torch.int64)
    grid.add_rows(total, rows)
    assert total.tolist() == [9000 * (2**41 - 2**17) + 999, 0]


def test_sum__that_leaves_int64_wraps_and_the_noise_with_it() -> None:
    """Addition modulo 2^64 is a function of the exact noisy sum, so it costs nothing, whatever it does to accuracy."""
    request = release(1)
    total, noise = torch.tensor([2**63 - 5]), torch.tensor([10])
    step = FixedPoint.of(request).step
    assert float(Gaussian().release(total, request, noise)) == pytest.approx((2**63 + 5 - 2**64) * step)


def test_sum__of_more_clients_than_were_announced_is_refused() -> None:
    with pytest.raises(PrivacyError, match="3 clients came of the 2"):
        Gaussian().accumulate([Bounded(torch.zeros(3, 4), 0.5)], release(4, cohort=2), Seeded.root(0))


# --- the grid is public and fine ---


def test_grid__depends_on_public_constants_alone() -> None:
    request = release(1000)
    others = [replace(request, cohort=0), replace(request, cohort=10**6), replace(request, part=range(3), round_=7)]
    assert {FixedPoint.of(other) for other in others} == {FixedPoint.of(request)}


@pytest.mark.parametrize("d", [1, 39, 10_000, 1_000_000, 25_000_000])
@pytest.mark.parametrize("sigma", [0.1, 1.0, 4.0])
def test_grid__is_fine_against_noise_and_typical_coordinates(d: int, sigma: float) -> None:
    """What rounding takes from an update is at most √d·γ: a share of 2^-20, or √d·σ·2^-32 if that is more."""
    request = release(d, 0.5, sigma)
    grid = FixedPoint.of(request)
    assert math.frexp(grid.step)[0] == 0.5  # a power of two
    assert 2**20 <= grid.scale(request.noise_std) <= 2**33
    share = math.sqrt(d) * grid.step / request.clip_norm
    assert share <= max(2.0**-20, math.sqrt(d) * sigma * 2.0**-32)
    assert share < 1e-4


@pytest.mark.parametrize("d", [10, 10_000])
def test_grid__bias_of_rounding_towards_zero_is_within_its_bound(d: int) -> None:
    request = release(d)
    rows = clip_l2(torch.randn(4, d, generator=torch.Generator().manual_seed(1)), 0.5)[0].value
    step = FixedPoint.of(request).step
    lost = rows.double() - torch.tensor(whole(rows, request)).double() * step
    assert float(lost.norm(dim=1).max()) <= math.sqrt(d) * step <= 2.0**-20 * 0.5
    assert bool((lost * rows >= 0).all())  # always towards zero


@pytest.mark.parametrize("sigma", [0.3, 1.0, math.pi, 1e5])
def test_noise__is_at_least_the_exact_quotient(sigma: float) -> None:
    for clip_norm in (0.1, 0.5, 1 / 3, 7e-5):
        request = release(1000, clip_norm, sigma)
        grid = FixedPoint.of(request)
        exact = Fraction(sigma) * Fraction(clip_norm) / Fraction(grid.step)
        assert exact <= Fraction(grid.scale(request.noise_std)) <= exact * (1 + Fraction(1, 2**49))


def test_grid__logarithms_are_whole_and_exact() -> None:
    for exponent in (-100, -1, 0, 1, 52, 100):
        power = 2.0**exponent
        assert _floor_log2(power) == exponent == _floor_log2(np.nextafter(2 * power, 0))
        assert _floor_log2(np.nextafter(power, 0)) == exponent - 1


@pytest.mark.parametrize(
    ("clip_norm", "sigma", "d", "message"),
    [
        (math.inf, 1.0, 10, "above 0 and finite"),
        (0.0, 0.0, 10, "above 0 and finite"),
        (1e43, 1.0, 10, "float32 cannot hold"),
        (1e-36, 1.0, 10, "float32 cannot hold"),
        (1.0, 2.0**-30, 10, "more than 2\\^41 grid steps"),
    ],
)
def test_grid__refuses_what_it_cannot_hold(clip_norm: float, sigma: float, d: int, message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        FixedPoint.of(release(d, clip_norm, sigma))


# --- release ---


def test_release__of_floats_is_refused_under_a_clip_norm() -> None:
    request = release(4)
    noise = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(PrivacyError, match="the sum must be 4 whole numbers"):
        Gaussian().release(torch.zeros(4, dtype=torch.float64), request, noise)
    with pytest.raises(PrivacyError, match="the noise must be 4 whole numbers"):
        Gaussian().release(noise, request, torch.zeros(4))
    for wrong in (noise[:1], noise[None]):  # one draw for all coordinates, or for two releases
        with pytest.raises(PrivacyError, match="the noise must be 4 whole numbers"):
            Gaussian().release(noise, request, wrong)


def test_release__without_a_clip_norm_has_no_noise_and_refuses_to_have_it() -> None:
    free = release(4, math.inf, 0.0)
    assert Gaussian().release(torch.ones(4, dtype=torch.float64), free, Gaussian().draw(free, System())()).sum() == 4
    noisy = release(4, math.inf, 1.0)
    with pytest.raises(PrivacyError, match="above 0 and finite"):
        Gaussian().draw(noisy, System())
    with pytest.raises(PrivacyError, match="whole numbers"):
        Gaussian().release(torch.ones(4, dtype=torch.float64), noisy, torch.zeros(4, dtype=torch.int64))


def test_release__is_the_exact_sum_plus_whole_noise_times_the_step() -> None:
    request = release(300, cohort=5)
    rows = clip_l2(torch.randn(5, 300), 0.5)[0]
    total = Gaussian().accumulate([rows], request, Seeded.root(0))
    noise = Gaussian().draw(request, Seeded.root(3))()
    assert noise.dtype == torch.int64
    step = FixedPoint.of(request).step
    expected = [float(np.float32((a + b) * step)) for a, b in zip(total.tolist(), noise.tolist(), strict=True)]
    assert Gaussian().release(total, request, noise).tolist() == expected


# --- noise belongs to one release ---


@pytest.mark.parametrize("d", [50, 40_000])
def test_noise__of_two_draws_in_one_process_differs(d: int) -> None:
    request = release(d)
    one, two = (Gaussian().draw(request, System().child("round", 1))() for _ in range(2))
    assert float((one == two).double().mean()) < 0.01


@pytest.mark.parametrize("d", [50, 40_000])
def test_noise__can_be_had_once(d: int) -> None:
    noise = Gaussian().draw(release(d), System())
    noise()
    with pytest.raises(PrivacyError, match="belongs to one release"):
        noise()


def test_noise__begun_before_a_fork_belongs_to_the_process_that_began_it() -> None:
    """Of two processes that both released it the difference would be free of noise."""
    noise = Gaussian().draw(release(50), System())
    child = os.fork()
    if not child:
        try:
            noise()
        except PrivacyError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(noise()) == 50


def test_noise__of_a_forked_process_is_another() -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, repr(Gaussian().draw(release(50), System())().tolist()).encode())
        os._exit(0)
    mine = Gaussian().draw(release(50), System())().tolist()
    os.waitpid(child, 0)
    theirs = os.read(read, 2**16).decode()
    assert len(theirs) > 100
    assert theirs != repr(mine)


def test_once__passes_errors_on() -> None:
    def fail() -> torch.Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Once(fail)()
