"""Discrete mechanisms in a round: sums modulo 2^b, two modes of noise, and what is refused."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from fedblur.core.errors import ConfigError, PrivacyError, RoundAborted
from fedblur.core.rng import Rng, Seeded, System
from fedblur.privacy.clipping import Bounded
from fedblur.privacy.mechanisms.base import Conditions, Release
from fedblur.privacy.mechanisms.ddgauss import DDGauss
from fedblur.privacy.mechanisms.secure_sum import SecureSum, overflow_share, round_within
from fedblur.privacy.mechanisms.skellam import Skellam
from tests.privacy.mechanisms import laws
from tests.worlds import CPU

S = 0.5
KINDS = [DDGauss, Skellam]


def bind(part, dimension: int, cohort: int) -> SecureSum:
    return part.bind(Conditions(dimension, S, cohort, 10 * cohort))


def updates(rows: int, dimension: int, seed: int = 0) -> torch.Tensor:
    """Rows of norm 0.999·S."""
    x = torch.randn(rows, dimension, generator=torch.Generator().manual_seed(seed))
    return 0.999 * S * x / x.norm(dim=1, keepdim=True)


def blocks(rows: torch.Tensor, size: int = 3) -> list[Bounded]:
    return [Bounded(part, S) for part in rows.split(size)]


# --- the sum ---


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("kind", KINDS)
def test_sum__modulo_equals_the_true_sum_when_nothing_overflows(kind, mode: str) -> None:
    rows, sigma = updates(7, 700), 1.0
    mechanism, rng = bind(kind(mode=mode, k_stddevs=7.0), 700, 7), Seeded.root(0)
    request, grid = Release(700, S, sigma, 7, CPU, round_=4), mechanism.grid(sigma)
    signs = mechanism.rotation.signs(4, CPU)
    steps = mechanism.rotation.forward(rows, signs) / grid.step(S)
    truth = round_within(steps, grid.sensitivity, range(len(steps)), rng).long()
    if mode == "exact":
        truth = truth + mechanism._shares(range(7), grid, request, rng)
    assert int(truth.sum(0).abs().max()) < grid.modulus // 2
    assert torch.equal(mechanism.accumulate(blocks(rows), request, rng), truth.sum(0))


@pytest.mark.parametrize("kind", KINDS)
def test_sum__without_noise_is_the_sum_of_updates_to_the_grid(kind) -> None:
    rows, request, rng = updates(9, 650), Release(650, S, 0.0, 9, CPU), Seeded.root(1)
    mechanism = bind(kind(bits=20), 650, 9)
    noiseless = mechanism.release(
        mechanism.accumulate(blocks(rows), request, rng), request, mechanism.draw(request, rng)()
    )
    step = mechanism.grid(0.0).step(S)
    error = (noiseless.double() - rows.double().sum(0)).norm() / math.sqrt(9 * 650)
    assert 0 < float(error) < step  # a random rounding's deviation is half a step at most


def test_overflow__its_share_at_four_deviations_is_as_predicted() -> None:
    """All updates aligned, the case that the grid is laid for."""
    n, d, rounds, sigma = 3, 2**15, 150, 0.02
    mechanism, rows = bind(DDGauss(), d, n), updates(1, d).repeat(n, 1) / 0.999 * (1 - 1e-6)
    grid, wrapped = mechanism.grid(sigma), 0
    for t in range(rounds):
        request, rng = Release(d, S, sigma, n, CPU, round_=t), Seeded.root(t)
        signs = mechanism.rotation.signs(t, CPU)
        noisy = mechanism.release(
            mechanism.accumulate(blocks(rows), request, rng), request, mechanism.draw(request, rng)()
        )
        error = mechanism.rotation.forward((noisy - rows.sum(0))[None], signs) / grid.step(S)
        wrapped += int((error.abs() > grid.modulus / 2).sum())
    expected = overflow_share(4.0) * d * rounds
    assert overflow_share(4.0) == pytest.approx(6.33e-5, rel=1e-3)
    assert wrapped == pytest.approx(expected, abs=4 * math.sqrt(expected))


# --- the noise ---


def noise_of(mechanism: SecureSum, cohort: int, sigma: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What a cohort of zeros adds up to before the release, and after it."""
    d, rng = mechanism.conditions.dimension, Seeded.root(2)
    request = Release(d, S, sigma, cohort, CPU)
    total = mechanism.accumulate([Bounded(torch.zeros(cohort, d), S)], request, rng)
    noise = mechanism.draw(request, rng.child(mechanism.part.mode))
    return total, mechanism.release(total, request, noise())


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_modes__fast_and_exact_agree_in_distribution(kind, bits: int) -> None:
    """The noise on the sum: one draw, or the sum of six clients' draws; in whole steps and as released."""
    n, d, sigma = 6, 100_000, 2.0
    exact, fast = bind(kind(bits=bits, mode="exact"), d, n), bind(kind(bits=bits), d, n)
    shares, released = noise_of(exact, n, sigma)
    nothing, released_fast = noise_of(fast, n, sigma)
    assert int(nothing.abs().max()) == 0  # fast noise comes with the release
    once = torch.from_numpy(fast.part.draw(fast.grid(sigma).noise_steps, len(shares), Seeded.root(7).keystream()))
    assert stats.ks_2samp(shares.numpy(), fast.grid(sigma).wrap(once).numpy()).pvalue > 1e-3
    assert stats.ks_2samp(released.numpy(), released_fast.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("cohort", [3, 7, 11])
def test_noise__and_its_shares_are_never_rounded_down(monkeypatch: pytest.MonkeyPatch, cohort: int) -> None:
    """In fractions: n shares have at least the variance that is accounted, and a Skellam draw at least std²."""
    from fedblur.privacy.mechanisms import skellam

    for sigma in (1.1, 2.0, 3.3):
        sum_ = bind(Skellam(mode="exact"), 100, cohort)
        std, grid = Fraction(sum_._share_std(sum_.grid(sigma), cohort)), sum_.grid(sigma)
        assert (
            Fraction(grid.noise_steps) ** 2
            <= cohort * std**2
            <= Fraction(grid.noise_steps) ** 2 * (1 + Fraction(2**-47))
        )
        asked: list[float] = []
        monkeypatch.setattr(skellam, "sample_skellam", lambda variance, *_, asked=asked: asked.append(variance))
        Skellam().draw(float(std), 1, Seeded.root(0).keystream())
        assert std**2 <= Fraction(asked[0]) <= std**2 * (1 + Fraction(2**-48))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_noise__belongs_to_one_release(kind, mode: str) -> None:
    noise = bind(kind(mode=mode), 100, 5).draw(Release(100, S, 2.0, 5, CPU), System())
    noise()
    with pytest.raises(PrivacyError, match="belongs to one release"):
        noise()


def test_modes__shares_of_half_a_step_are_told_apart() -> None:
    """Where τ_n is large the two laws do differ: what fast mode draws is not what such clients would add up to."""
    share, n = 0.3, 4
    law = laws.summed(laws.discrete_gaussian(share, 20), n)
    one = laws.discrete_gaussian(share * math.sqrt(n), 20)
    assert float(np.abs(np.exp(law) - np.exp(one)).sum()) > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("cohort", [0, 1, 4, 30])
def test_noise__has_its_size_whatever_the_cohort(kind, mode: str, cohort: int) -> None:
    """Shares are sized for the cohort that came, not for the expected 10."""
    mechanism, request = bind(kind(mode=mode), 8000, 10), Release(8000, S, 2.0, cohort, CPU)
    rng = Seeded.root(5)
    rows = torch.zeros(cohort, 8000)
    noisy = mechanism.release(
        mechanism.accumulate(blocks(rows) if cohort else [], request, rng), request, mechanism.draw(request, rng)()
    )
    assert float(noisy.double().std()) == pytest.approx(2.0 * S, rel=0.04)
    assert int((noisy == 0).sum()) < 10


def test_release__wraps_around_after_the_noise_and_not_before() -> None:
    """Modulo 2^b of sum and noise together is post-processing; of the sum alone it is a jump that noise must hide."""
    mechanism, request = bind(DDGauss(bits=8), 50, 5), Release(50, S, 1.0, 5, CPU)
    total = torch.full((mechanism.rotation.padded,), 127)
    noise = torch.full_like(total, 5)
    nothing = torch.zeros_like(total)
    expected = mechanism.release(total + noise - 256, request, nothing)
    assert torch.equal(mechanism.release(total, request, noise), expected)
    assert torch.equal(mechanism.release(total - 256, request, noise), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_event__counts_what_rounding_adds_to_a_message(kind) -> None:
    """On a coarse grid messages are longer than the clip norm, and the event says how much."""
    mechanism, request = bind(kind(bits=8), 1000, 5), Release(1000, S, 1.0, 5, CPU)
    whole = mechanism.encode(Bounded(updates(100, 1000), S), range(100), request, Seeded.root(0))
    longest = float(whole.double().norm(dim=1).max())
    assert mechanism.grid(1.0).clip_steps < longest <= mechanism.event(1.0).sensitivity


def test_invariant_8__fewer_discrete_shares_than_planned_abort_the_round() -> None:
    mechanism, request = bind(DDGauss(mode="exact"), 100, 5), Release(100, S, 1.0, 5, CPU)
    with pytest.raises(PrivacyError, match="3 noise shares arrived of the 5"):
        mechanism.accumulate([Bounded(torch.zeros(3, 100), S)], request, Seeded.root(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cohort", [4, 9, 30])
def test_min_cohort__shares_are_sized_for_the_fewest_clients_that_are_accepted(kind, cohort: int) -> None:
    """Four clients carry the promised noise, more carry more; the grid leaves room for it."""
    mechanism, request = bind(kind(mode="exact", min_cohort=4), 8000, 10), Release(8000, S, 2.0, cohort, CPU)
    rng = Seeded.root(5)
    total = mechanism.accumulate(blocks(torch.zeros(cohort, 8000)), request, rng)
    noisy = mechanism.release(total, request, mechanism.draw(request, rng)())
    assert float(noisy.double().std()) == pytest.approx(2.0 * S * math.sqrt(cohort / 4), rel=0.04)
    assert mechanism.grid(2.0).clip_steps < bind(kind(mode="exact"), 8000, 10).grid(2.0).clip_steps


def test_invariant_8__fewer_clients_than_shares_are_sized_for_abort_the_round() -> None:
    mechanism, request = bind(DDGauss(mode="exact", min_cohort=4), 100, 5), Release(100, S, 1.0, 3, CPU)
    for came in ([Bounded(torch.zeros(3, 100), S)], []):  # before anyone's message is looked at
        with pytest.raises(RoundAborted, match="3 clients of the 4"):
            mechanism.accumulate(came, request, Seeded.root(0))


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_release__does_not_depend_on_blocks_of_clients(mode: str) -> None:
    rows, mechanism, request = updates(7, 300), bind(DDGauss(mode=mode), 300, 7), Release(300, S, 1.0, 7, CPU)
    totals = [mechanism.accumulate(blocks(rows, size), request, Seeded.root(0)) for size in (1, 3, 7)]
    assert torch.equal(totals[0], totals[1])
    assert torch.equal(totals[0], totals[2])


# --- what is refused ---


def test_secure_sum__refuses_updates_with_a_larger_bound_or_another_shape() -> None:
    mechanism, rng = bind(DDGauss(), 100, 5), Seeded.root(0)
    with pytest.raises(PrivacyError, match="bounded by 0.6"):
        mechanism.accumulate([Bounded(torch.zeros(1, 100), 0.6)], Release(100, S, 1.0, 5, CPU), rng)
    with pytest.raises(PrivacyError, match="101 values"):
        mechanism.accumulate([Bounded(torch.zeros(1, 101), S)], Release(101, S, 1.0, 5, CPU), rng)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 1}, "bits=1"),
        ({"bits": 25}, "bits=25"),
        ({"k_stddevs": 0.0}, "k_stddevs"),
        ({"beta": 1.0}, "beta=1.0"),
        ({"min_cohort": 3}, 'needs mechanism.mode = "exact"'),
        ({"min_cohort": 0, "mode": "exact"}, "min_cohort=0"),
    ],
)
def test_settings__out_of_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DDGauss(**settings)


def test_bind__refuses_conditions_that_no_grid_fits() -> None:
    with pytest.raises(ConfigError, match="clip_norm=inf leaves ddgauss no grid"):
        DDGauss().bind(Conditions(10, math.inf, 5, 50))
    with pytest.raises(PrivacyError, match="bits=4 cannot hold the rounding errors of 50 clients"):
        Skellam(bits=4).bind(Conditions(10, 1.0, 50, 500))


def test_notes__name_the_reason_and_the_way_out() -> None:
    paper = Conditions(1_018_174, 0.03, 136, 3400)
    assert len(DDGauss().bind(paper).notes(0.98)) == 1
    broken = DDGauss(bits=12).bind(paper).notes(5.16)[0]
    assert "12 bits are broken here: rounding 1,048,576 coordinates" in broken
    assert "use 14 bits or more" in broken
    assert "coarse" in DDGauss(bits=13).bind(paper).notes(1.2)[0]


# --- other devices ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("rng", [Seeded.root(0), System()])
@pytest.mark.parametrize("kind", KINDS)
def test_gpu__sum_and_noise_are_those_of_the_cpu(kind, rng: Rng, mode: str) -> None:
    device, rows = torch.device("cuda"), updates(6, 5000)
    mechanism = bind(kind(mode=mode), 5000, 6)
    request = Release(5000, S, 2.0, 6, device, round_=3)
    parts = [Bounded(part.to(device), S) for part in rows.split(4)]
    noisy = mechanism.release(mechanism.accumulate(parts, request, rng), request, mechanism.draw(request, rng)())
    assert noisy.device.type == "cuda"
    noise = (noisy.cpu() - rows.sum(0)).double()
    assert float(noise.std()) == pytest.approx(2.0 * S, rel=0.05)
    assert abs(float(noise.mean())) < 5 * 2.0 * S / math.sqrt(5000)
