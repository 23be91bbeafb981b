"""Bugs that were seen in public code, planted into ours by monkeypatching. Each says who must catch it.

A bug is a function that patches the real code; a catcher (catchers.py) is a check that passes on the code as it is and
must fail on the patched one. The table in docs/privacy.md is made from this list (`table.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedblur.core.rng
import fedblur.engines.local
import fedblur.learning.module_function
import fedblur.privacy.clipping
import fedblur.training.loop
from fedblur.core.rng import Rng, Seeded, System
from fedblur.engines import LocalEngine
from fedblur.learning import client
from fedblur.learning.methods.lus import Lus
from fedblur.privacy.clipping import Bounded, Message, clip_l2
from fedblur.privacy.ledger import Ledger
from fedblur.privacy.mechanisms.base import Noise, Release
from fedblur.privacy.mechanisms.ddgauss import DDGauss
from fedblur.privacy.mechanisms.gaussian import FixedPoint, Gaussian
from fedblur.privacy.mechanisms.secure_sum import SecureSum
from fedblur.privacy.sampling import PoissonSampler
from fedblur.training.server import Server
from tests.planted import catchers

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Bug:
    """One way to be wrong."""

    name: str
    what: str  # for the table: what the code does wrong
    plant: Plant
    catchers: tuple[str, ...]  # names in catchers.py; every one of them must catch it
    asked: bool = True  # on the list of the issue; the others were added


BUGS: list[Bug] = []


def bug(what: str, *catchers: str, asked: bool = True) -> Callable[[Plant], Plant]:
    def add(plant: Plant) -> Plant:
        BUGS.append(Bug(plant.__name__.replace("_", " "), what, plant, catchers, asked))
        return plant

    return add


def _clip_block(
    how: Callable[[Tensor, client.ClientJob], Tensor],
) -> Callable[..., client.Block]:
    """The client's last step, with another way to bound its update."""

    def clip_block(trained: client.Trained, job: client.ClientJob) -> client.Block:
        norms = trained.update.double().norm(dim=1)
        return client.Block(Bounded(how(trained.update, job), job.clip_norm), trained.trained_norm, norms)

    return clip_block


@bug("each tensor is clipped to S on its own: L tensors let √L·S through", "worst case", "a client sends at most S")
def clip_per_tensor(patch: pytest.MonkeyPatch) -> None:
    def per_tensor(update: Tensor, job: client.ClientJob) -> Tensor:
        sizes = [int(np.prod(shape)) for shape in job.layout.shapes]
        return torch.cat([clip_l2(part, job.clip_norm)[0].value for part in torch.split(update, sizes, dim=1)], dim=1)

    patch.setattr(client, "clip_block", _clip_block(per_tensor))


@bug(
    "the update is clipped, then sparsified and rescaled by 1/(1 − c)",
    "worst case with LUS",
    "a client sends at most S",
)
def clip_before_sparsifying_and_rescale(patch: pytest.MonkeyPatch) -> None:
    def clip_then_shape(update: Tensor, job: client.ClientJob) -> Tensor:
        clipped = clip_l2(update, job.clip_norm)[0].value
        kept = next((1 - method.sparsity for method in job.methods if isinstance(method, Lus)), 1.0)
        return clipped * (clipped != 0) / kept

    patch.setattr(client, "clip_block", _clip_block(clip_then_shape))


def _drawn(patch: pytest.MonkeyPatch, how: Callable[[Tensor, Release], Tensor]) -> None:
    """Something else in place of the Gaussian noise that was drawn, in whole numbers."""
    draw = Gaussian.draw

    def other(self: Gaussian, release: Release, rng: Rng) -> Noise:
        coming = draw(self, release, rng)
        return lambda: how(coming(), release)

    patch.setattr(Gaussian, "draw", other)


def _times(noise: Tensor, factor: float) -> Tensor:
    return (noise.double() * factor).round().long()


@bug("noise made for the mean, σS/n, is added to the sum", "worst case", "noise has the claimed size")
def noise_on_the_mean_with_a_wrong_denominator(patch: pytest.MonkeyPatch) -> None:
    _drawn(patch, lambda noise, release: _times(noise, 1 / max(release.cohort, 1)))


@bug("only coordinates that some client sent get noise", "worst case", "noise is dense")
def noise_only_on_the_kept_support(patch: pytest.MonkeyPatch) -> None:
    whole = Gaussian.release

    def release(self: Gaussian, total: Tensor, release: Release, noise: Tensor) -> Tensor:
        return torch.where(total == 0, 0.0, whole(self, total, release, noise))

    patch.setattr(Gaussian, "release", release)


@bug("every round draws its noise from the same seed", "worst case", "rounds differ")
def noise_from_a_reused_seed(patch: pytest.MonkeyPatch) -> None:
    draw = Gaussian.draw
    patch.setattr(Gaussian, "draw", lambda self, release, rng: draw(self, release, Seeded.root(1234)))


@bug("clipped updates are weighted by n_k over the mean n", "worst case", "a client sends at most S")
def weights_by_sample_count(patch: pytest.MonkeyPatch) -> None:
    train = LocalEngine._train

    def weighted(self, job, shard, ids, chosen, rng):
        block = train(self, job, shard, ids, chosen, rng)
        weights = shard.sizes[chosen] / shard.sizes.float().mean()
        scaled = Bounded(block.bounded.value * weights[:, None], block.bounded.l2_bound)
        return client.Block(scaled, block.trained_norms, block.norms)

    patch.setattr(LocalEngine, "_train", weighted)


@bug("a cohort of fixed size is accounted as Poisson", "sampling is what is accounted", "worst case with sampling")
def fixed_size_sampling_under_poisson_accounting(patch: pytest.MonkeyPatch) -> None:
    def cohort(self: PoissonSampler, rng) -> Tensor:
        order = np.argsort(rng.uniform(self.clients))[: round(self.expected_cohort)]
        return torch.from_numpy(np.sort(order))

    patch.setattr(PoissonSampler, "cohort", cohort)


@bug("updates are clipped to the mean norm of the cohort", "worst case", "a client sends at most S", "isolation")
def a_data_dependent_clip_norm(patch: pytest.MonkeyPatch) -> None:
    def by_mean_norm(update: Tensor, job: client.ClientJob) -> Tensor:
        return clip_l2(update, float(update.double().norm(dim=1).mean()))[0].value

    patch.setattr(client, "clip_block", _clip_block(by_mean_norm))


@bug("a model with BatchNorm, whose statistics leave without clip or noise", "refusal of BatchNorm")
def batchnorm_statistics_shared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(catchers, "MODEL", BatchNormed)  # the user's own; in our code there is no sharing of buffers to break


@bug("every other round is not written down", "ledger verify", "a line before each release")
def a_forgotten_round_in_the_ledger(patch: pytest.MonkeyPatch) -> None:
    spend = Ledger.spend

    def forgetful(self: Ledger, round_: int, event, replay: bool) -> None:
        if round_ % 2:
            spend(self, round_, event, replay)

    patch.setattr(Ledger, "spend", forgetful)


@bug("noise follows from the round's number, so a resumed run draws it again", "fresh noise after a resume")
def resume_that_replays_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(System, "child", lambda self, *path: _Replaying(Seeded.root(9).child(*path).key))


@dataclass(frozen=True)
class _Replaying(Seeded):
    """A seeded stream that says it is private."""

    private: bool = True

    def child(self, *path: str | int) -> _Replaying:
        return _Replaying(Seeded.child(self, *path).key)


@bug("the norm is taken in float32 and nothing is left for rounding", "clip exact to the last bit")
def float_rounding_in_the_norm(patch: pytest.MonkeyPatch) -> None:
    def naive(updates: Tensor, clip_norm: float) -> tuple[Bounded, Tensor]:
        norms = updates.norm(dim=-1)
        return Bounded(updates * (clip_norm / norms).clamp(max=1.0)[:, None], clip_norm), norms

    patch.setattr(fedblur.privacy.clipping, "clip_l2", naive)


@bug("the sum is divided by the cohort that came", "the denominator is constant", asked=False)
def a_private_denominator(patch: pytest.MonkeyPatch) -> None:
    step, report = Server.step, Gaussian.release
    sizes: list[int] = []

    def release(self: Gaussian, total: Tensor, release: Release, noise: Tensor) -> Tensor:
        sizes.append(release.cohort)
        return report(self, total, release, noise)

    def divided(self, state, mean_update, *, round_, rounds, noise_std):
        update = mean_update * 10.0 / max(sizes[-1], 1)  # pN = 10 in the catcher's world
        return step(self, state, update, round_=round_, rounds=rounds, noise_std=noise_std)

    patch.setattr(Gaussian, "release", release)
    patch.setattr(Server, "step", divided)


@bug("no noise in a round that nobody joined", "an empty cohort is noisy", asked=False)
def an_empty_cohort_without_noise(patch: pytest.MonkeyPatch) -> None:
    _drawn(patch, lambda noise, release: noise if release.cohort else torch.zeros_like(noise))


@bug("the noise is left out altogether", "worst case", "one-shot audit", asked=False)
def no_noise(patch: pytest.MonkeyPatch) -> None:
    _drawn(patch, lambda noise, release: torch.zeros_like(noise))


@bug("half of the noise: σ is taken for the sensitivity 2S of another neighbourhood", "worst case", asked=False)
def half_the_noise(patch: pytest.MonkeyPatch) -> None:
    _drawn(patch, lambda noise, release: _times(noise, 0.5))


@bug("a client with NaN in its update reaches the sum", "NaN counts as zero", asked=False)
def nan_passes_the_clip(patch: pytest.MonkeyPatch) -> None:
    def trusting(updates: Tensor, clip_norm: float) -> tuple[Bounded, Tensor]:
        norms = updates.double().norm(dim=-1)
        return Bounded(updates * (clip_norm / norms).clamp(max=1.0).float()[:, None], clip_norm), norms

    patch.setattr(fedblur.privacy.clipping, "clip_l2", trusting)


@bug("noise shares are sized for more clients than take part", "worst case with shares", asked=False)
def shares_for_clients_who_are_not_there(patch: pytest.MonkeyPatch) -> None:
    share = SecureSum._share_std
    patch.setattr(SecureSum, "_share_std", lambda self, grid, cohort: share(self, grid, 4 * cohort))


@bug("the secure sum forgets its noise", "worst case with DDGauss", asked=False)
def a_secure_sum_without_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DDGauss, "draw", lambda self, std, count, *more: np.zeros(count, dtype=np.int64))


@bug("a seeded run does not say that it is not private", "a seeded run says so", asked=False)
def a_seed_passed_off_as_private(patch: pytest.MonkeyPatch) -> None:
    make = fedblur.core.rng.make_rng
    patch.setattr(
        "fedblur.training.setup.make_rng", lambda seed: make(None) if seed is None else _Replaying(make(seed).key)
    )


@bug("the second half of the noise repeats the first: one draw for all tensors of a shape", "worst case", asked=False)
def noise_tiled_across_tensors(patch: pytest.MonkeyPatch) -> None:
    _drawn(patch, lambda noise, release: noise[: -(-len(noise) // 2)].repeat(2)[: len(noise)])


@bug("the bit of adaptive clipping is sent 50 times too loud", "worst case with adaptive clipping", asked=False)
def a_clip_bit_50_times_too_loud(patch: pytest.MonkeyPatch) -> None:
    half = Message._half
    patch.setattr(Message, "_half", lambda self: 50 * half(self))


@bug("clients join with three times the probability that is accounted for", "worst case with sampling", asked=False)
def sampling_at_three_times_the_rate(patch: pytest.MonkeyPatch) -> None:
    cohort = PoissonSampler.cohort
    patch.setattr(PoissonSampler, "cohort", lambda self, rng: cohort(replace(self, rate=min(1.0, 3 * self.rate)), rng))


@bug("every round asks the same cohort", "worst case with sampling", asked=False)
def the_same_cohort_in_every_round(patch: pytest.MonkeyPatch) -> None:
    cohort = PoissonSampler.cohort
    patch.setattr(PoissonSampler, "cohort", lambda self, rng: cohort(self, Seeded.root(5)))


@bug("2 % of the releases have no noise", "worst case", asked=False)
def no_noise_in_2_percent_of_the_releases(patch: pytest.MonkeyPatch) -> None:
    lots = torch.Generator().manual_seed(3)

    def now_and_then(noise: Tensor, release: Release) -> Tensor:
        return noise * int(torch.rand((), generator=lots) >= 0.02)

    _drawn(patch, now_and_then)


@bug("the noise is 30 % too small", "worst case", asked=False)
def noise_30_percent_too_small(patch: pytest.MonkeyPatch) -> None:
    _drawn(patch, lambda noise, release: _times(noise, 0.7))


@bug("noise is a float32 sample, scaled, added and rounded to float32", "worst case", asked=False)
def float_noise(patch: pytest.MonkeyPatch) -> None:
    def release(self: Gaussian, total: Tensor, release: Release, noise: Tensor) -> Tensor:
        step = FixedPoint.of(release).step
        sample = (noise.double() * step / release.noise_std).float()
        return (total.double() * step + release.noise_std * sample.double()).float()

    patch.setattr(Gaussian, "release", release)


class BatchNormed(nn.Sequential):
    """The user's model of `batchnorm_statistics_shared`."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
