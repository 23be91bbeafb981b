"""Tests of noise and cohorts against their laws: each finds what it is for, and none fires on the law itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fedblur.core.rng import Seeded
from fedblur.privacy.laws import ALARM, Check, CohortLog, NoiseLog, Observation, messages_fit
from fedblur.privacy.mechanisms.base import Release
from fedblur.privacy.mechanisms.gaussian import FixedPoint, Gaussian
from fedblur.privacy.sampling import FixedSizeSampler, FullSampler, PoissonSampler, Sampler

WIDTH, RELEASES = 300, 60
RELEASE = Release(WIDTH, 0.1, 1.5, 10, torch.device("cpu"))
Bend = Callable[[int, Tensor, list[Tensor]], Tensor]  # release, its noise, those before


def noise_checks(bend: Bend = lambda number, noise, before: noise) -> dict[str, Check]:
    """Of releases of one known sum, whose noise is bent."""
    log, mechanism, before = NoiseLog(Gaussian()), Gaussian(), []
    step = FixedPoint.of(RELEASE).step
    whole = torch.arange(WIDTH) * 1001
    for number in range(RELEASES):
        drawn = mechanism.draw(RELEASE, Seeded.root(number))()
        before.append(drawn)
        noise = bend(number, drawn, before)
        values = mechanism.release(whole, RELEASE, noise) if noise.dtype == torch.int64 else whole * step + noise
        log.add(Observation(RELEASE, values.float(), whole.double() * step))
    return {check.name: check for check in log.checks()}


def test_noise__that_follows_its_law_breaks_nothing() -> None:
    found = noise_checks()
    assert len(found) == 6
    assert all(check.p_value is not None and check.p_value > 1e-3 for check in found.values()), found


def times(noise: Tensor, factor: float) -> Tensor:
    return (noise.double() * factor).round().long()


@pytest.mark.parametrize(
    ("name", "bend"),
    [
        ("variance of the noise", lambda number, noise, before: times(noise, 0.9)),
        ("noise in every release", lambda number, noise, before: noise * (number != 40)),
        ("noise across coordinates", lambda number, noise, before: noise[: WIDTH // 4].repeat(4)),
        ("noise across coordinates", lambda number, noise, before: torch.cat([noise[:200], noise[:100]])),
        ("noise between releases", lambda number, noise, before: before[20] if number == 50 else noise),
        ("noise between releases", lambda number, noise, before: -before[0] if number else noise),
        ("released values on the grid", lambda number, noise, before: RELEASE.noise_std * torch.randn(WIDTH)),
        ("low bits", lambda number, noise, before: noise // 2 * 2),
    ],
)
def test_noise__that_does_not_is_found_by_name(name: str, bend: Bend) -> None:
    torch.manual_seed(0)
    found = noise_checks(bend)[name]
    assert found.broken
    assert found.p_value is not None
    assert found.p_value < ALARM


def test_noise__more_than_is_claimed_breaks_nothing() -> None:
    assert not any(check.broken for check in noise_checks(lambda number, noise, before: times(noise, 3.0)).values())


def test_messages__longer_than_noise_is_made_for_break_the_check() -> None:
    assert not messages_fit(1.0).broken
    assert messages_fit(np.nextafter(1.0, 2.0)).broken


Draw = Callable[[int, Seeded], Tensor]


def cohort_checks(sampler: Sampler, draw: Draw | None = None, rounds: int = 200) -> dict[str, Check]:
    log = CohortLog(sampler)
    for round_ in range(rounds):
        rng = Seeded.root(1).child("round", round_)
        log.add(draw(round_, rng) if draw else sampler.cohort(rng))
    return {check.name: check for check in log.checks()}


POISSON, FIXED = PoissonSampler(500, 0.1), FixedSizeSampler(500, 50)


@pytest.mark.parametrize(
    "sampler", [POISSON, FIXED, FullSampler(20), PoissonSampler(20, 1.0), PoissonSampler(5000, 0.001)]
)
def test_cohorts__that_follow_their_law_break_nothing(sampler: Sampler) -> None:
    found = cohort_checks(sampler)
    assert all(check.p_value is None or check.p_value > 1e-3 for check in found.values()), found


@pytest.mark.parametrize(
    ("name", "sampler", "draw"),
    [
        ("sampling rate", POISSON, lambda round_, rng: PoissonSampler(500, 0.3).cohort(rng)),
        ("sampling rate", PoissonSampler(5000, 0.001), lambda round_, rng: PoissonSampler(5000, 0.003).cohort(rng)),
        ("sizes of cohorts", POISSON, lambda round_, rng: FIXED.cohort(rng)),
        ("sizes of cohorts", FIXED, lambda round_, rng: POISSON.cohort(rng)),
        ("the busiest client", POISSON, lambda round_, rng: POISSON.cohort(Seeded.root(3))),
        ("the busiest client", FIXED, lambda round_, rng: FIXED.cohort(Seeded.root(3))),
        ("cohorts of different rounds", POISSON, lambda round_, rng: POISSON.cohort(Seeded.root(round_ // 2))),
        ("cohorts of different rounds", FIXED, lambda round_, rng: FIXED.cohort(Seeded.root(round_ % 100))),
        ("cohorts are everyone", FullSampler(20), lambda round_, rng: torch.arange(20 - (round_ == 7))),
    ],
)
def test_cohorts__that_do_not_are_found_by_name(name: str, sampler: Sampler, draw: Draw) -> None:
    assert cohort_checks(sampler, draw)[name].broken


def test_cohorts__of_a_sampler_without_a_known_law_are_not_tested_and_say_so() -> None:
    class Other:
        clients, expected_cohort, cohort_spread = 20, 20.0, 0.0

    log = CohortLog(Other())  # type: ignore[arg-type]
    log.add(torch.arange(20))
    (check,) = log.checks()
    assert check.p_value is None
    assert "Other" in check.words
