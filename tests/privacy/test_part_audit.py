"""Audits of mechanisms and samplers that are not FedBlur's: each mistake is found by name, honest ones pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fedblur.core.rng import Rng, Seeded
from fedblur.privacy import events
from fedblur.privacy.clipping import Bounded
from fedblur.privacy.mechanisms.base import Conditions, Noise, Once, Release
from fedblur.privacy.mechanisms.ddgauss import DDGauss
from fedblur.privacy.mechanisms.gaussian import Gaussian
from fedblur.privacy.part_audit import audit_mechanism, audit_sampler
from fedblur.privacy.sampling import FixedSizeSampler, FullSampler, PoissonSampler, Sampler

HERE = Conditions(650, 0.1, 36.0, 359)


def broken(part: Gaussian | DDGauss, sigma: float = 2.0) -> set[str]:
    return {check.name for check in audit_mechanism(part, HERE, sigma, Seeded.root(3)) if check.broken}


class Scaled(Gaussian):
    """Draws noise for another σ than it states."""

    factor = 1.0

    def draw(self, release: Release, rng: Rng) -> Noise:
        return super().draw(dataclasses.replace(release, noise_multiplier=self.factor * release.noise_multiplier), rng)


class Free(Scaled):
    factor = 0.0


class Half(Scaled):
    factor = 0.5


class Doubled(Scaled):
    factor = 2.0


class Weighted(Gaussian):
    """Counts each client three times."""

    def accumulate(self, blocks: Iterable[Bounded], release: Release, rng: Rng) -> Tensor:
        return 3 * super().accumulate(blocks, release, rng)


class Counting(Gaussian):
    """Adds the number of clients to the first coordinate."""

    def accumulate(self, blocks: Iterable[Bounded], release: Release, rng: Rng) -> Tensor:
        seen = list(blocks)
        total = super().accumulate(seen, release, rng)
        total[0] += sum(len(block.value) for block in seen) << 30
        return total


class Silent(Gaussian):
    """Leaves the last tenth of the coordinates without noise."""

    def draw(self, release: Release, rng: Rng) -> Noise:
        noise = super().draw(release, rng)()
        noise[-len(noise) // 10 :] = 0
        return Once(lambda: noise)


class Lazy(Gaussian):
    """Repeats a short draw over the whole vector."""

    def draw(self, release: Release, rng: Rng) -> Noise:
        noise = super().draw(release, rng)()
        return Once(lambda: noise[: len(noise) // 4 + 1].repeat(4)[: len(noise)])


class Flat(Gaussian):
    """Adds uniform noise of the right variance, and calls it Gaussian."""

    def draw(self, release: Release, rng: Rng) -> Noise:
        noise = super().draw(release, rng)()
        spread = noise.double().std()
        uniform = torch.special.ndtr(noise.double() / spread) - 0.5
        return Once(lambda: (uniform * spread * 12**0.5).round().long())


class Showing(Gaussian):
    """More noise for larger cohorts, without saying so."""

    def draw(self, release: Release, rng: Rng) -> Noise:
        return super().draw(dataclasses.replace(release, noise_multiplier=2.0 + release.cohort), rng)


class Elsewhere(Gaussian):
    """Draws from a generator of its own."""

    def draw(self, release: Release, rng: Rng) -> Noise:
        return super().draw(release, Seeded.root(torch.randint(2**31, (1,)).item()))


class Understated(Gaussian):
    """Accounts for more noise than the σ that it is asked for."""

    def event(self, noise_multiplier: float) -> events.Gaussian:
        return events.Gaussian(1.5 * noise_multiplier)


class Wide(Gaussian):
    """Adds less noise to wide vectors."""

    def draw(self, release: Release, rng: Rng) -> Noise:
        some = release.noise_multiplier * (0.5 if release.dimension > 600 else 1)
        return super().draw(dataclasses.replace(release, noise_multiplier=some), rng)


@dataclass(frozen=True)
class Foreign(events.Event):
    """An event that FedBlur does not know."""


class Unknown(Gaussian):
    def event(self, noise_multiplier: float) -> Foreign:  # type: ignore[override]
        return Foreign()


class Crashing(Gaussian):
    def draw(self, release: Release, rng: Rng) -> Noise:
        raise ValueError("not here")


@pytest.mark.parametrize("part", [Gaussian(), Doubled(), DDGauss()], ids=["gaussian", "doubled", "ddgauss"])
def test_mechanism__that_is_honest_passes(part: Gaussian | DDGauss) -> None:
    found = audit_mechanism(part, HERE, 2.0, Seeded.root(4))
    assert len(found) >= 9
    assert not [check for check in found if check.broken]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (Free(), "variance of the noise"),
        (Half(), "variance of the noise"),
        (Understated(), "variance of the noise"),
        (Weighted(), "a client moves it by at most S"),
        (Weighted(), "what is released is the sum"),
        (Counting(), "a client moves it by at most S"),
        (Silent(), "noise at every coordinate"),
        (Lazy(), "noise across coordinates"),
        (Flat(), "noise is Gaussian"),
        (Showing(), "noise is the same for every cohort"),
        (Elsewhere(), "noise is drawn from the run's stream"),
        (Wide(), "noise at the model's full width"),
        (Unknown(), "its event is FedBlur's"),
        (Crashing(), "the audit itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_mechanism__that_is_not_is_found_by_name(part: Gaussian, name: str) -> None:
    assert name in broken(part)


def test_mechanism__without_noise_claims_nothing_and_has_no_checks() -> None:
    assert audit_mechanism(Free(), HERE, 0.0, Seeded.root(0)) == []


@dataclass(frozen=True)
class Constant(PoissonSampler):
    """Takes the same clients in every round."""

    def cohort(self, rng: Rng) -> Tensor:
        return torch.arange(round(self.expected_cohort))


@dataclass(frozen=True)
class Often(PoissonSampler):
    """Draws more clients than it accounts for."""

    def cohort(self, rng: Rng) -> Tensor:
        return PoissonSampler(self.clients, 1.5 * self.rate).cohort(rng)


@dataclass(frozen=True)
class Favourite(PoissonSampler):
    """Takes one client in most rounds."""

    def cohort(self, rng: Rng) -> Tensor:
        drawn = super().cohort(rng)
        return drawn if drawn[0] == 0 or rng.uniform(1)[0] > 0.5 else torch.cat([torch.tensor([0]), drawn])


@dataclass(frozen=True)
class Together(PoissonSampler):
    """Lets neighbours come together."""

    def cohort(self, rng: Rng) -> Tensor:
        pairs = PoissonSampler(self.clients // 2, self.rate).cohort(rng)
        return torch.stack([2 * pairs, 2 * pairs + 1], 1).flatten()


@dataclass(frozen=True)
class Twice(PoissonSampler):
    """Names a client twice."""

    def cohort(self, rng: Rng) -> Tensor:
        return super().cohort(rng).repeat_interleave(2)


@dataclass(frozen=True)
class Realised(PoissonSampler):
    """Divides by the size of the cohort that came."""

    @property
    def expected_cohort(self) -> float:
        return float(torch.randint(20, 50, (1,)))


@dataclass(frozen=True)
class Rounded(PoissonSampler):
    """Cohorts of one size, accounted for as Poisson's."""

    def cohort(self, rng: Rng) -> Tensor:
        return FixedSizeSampler(self.clients, 36).cohort(rng)


POISSON = (359, 0.1)


@pytest.mark.parametrize("part", [PoissonSampler(*POISSON), FixedSizeSampler(359, 36), FullSampler(359)], ids=repr)
def test_sampler__that_is_honest_passes(part: Sampler) -> None:
    assert not [check for check in audit_sampler(part, False, Seeded.root(5)) if check.broken]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (Constant(*POISSON), "the busiest client"),
        (Constant(*POISSON), "cohorts of different rounds"),
        (Often(*POISSON), "sampling rate"),
        (Favourite(*POISSON), "the busiest client"),
        (Together(*POISSON), "sizes of cohorts"),
        (Rounded(*POISSON), "sizes of cohorts"),
        (Twice(*POISSON), "a cohort names each client once"),
        (Realised(*POISSON), "the denominator is a constant"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_sampler__that_is_not_is_found_by_name(part: Sampler, name: str) -> None:
    found = {check.name for check in audit_sampler(part, False, Seeded.root(5)) if check.broken}
    assert name in found


def test_sampler__whose_cohorts_are_seen_may_not_claim_amplification() -> None:
    found = {check.name for check in audit_sampler(PoissonSampler(*POISSON), True, Seeded.root(5)) if check.broken}
    assert found == {"a cohort that is seen"}
    assert not [c for c in audit_sampler(PoissonSampler(*POISSON).seen(), True, Seeded.root(5)) if c.broken]
