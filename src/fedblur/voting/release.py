"""Stages 3 to 5, count, noise and account. In: votes. Out: labels, the only thing about clients that leaves.

Formal guarantee: one client changes each query's counts by a vector of l2 norm at most 1 vote, whatever it sent: a vote
that is not finite or longer than 1 counts as zero. Over Q queries the counts change by at most √Q. Votes are rounded
towards zero to multiples of 2^-20 and counted in whole numbers, so the guarantee is about what is summed.

One client moves the counts of a query by at most 1 in l2 norm, so Q answers with noise σ_v are one Gaussian mechanism
with μ = √Q/σ_v, and its epsilon is exact (Balle and Wang 2018): δ = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ). A check of
agreement looks at the largest count, which moves by at most 1 too: C checks with noise σ₁ add C/σ₁² to μ². All checks
come first; the answers then go to the first samples that passed, at most Q, so both numbers are fixed in advance.

Counts are whole numbers of `VOTE_STEP` and noise is a rounded Gaussian on the same grid, so this holds in the
arithmetic that runs (docs/exact-noise.md). What is compared, a largest count or a threshold, is post-processing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedblur.core.config import Config
from fedblur.core.rng import Rng
from fedblur.privacy.accounting import PrivacyPlan, make_plan
from fedblur.privacy.events import Event, Votes
from fedblur.privacy.mechanisms import rounded_gaussian
from fedblur.privacy.sampling import FullSampler

VOTE_STEP = 2.0**-20  # what counts are multiples of
UNANSWERED = -1


@dataclass(frozen=True)
class Tally:
    """Votes counted so far. Everything here is local_only: it has no noise yet."""

    counts: Tensor  # [asked, classes], int64, in units of VOTE_STEP
    accuracies: Tensor  # [clients so far], float64: of each voter, on held-out samples

    @classmethod
    def empty(cls, asked: int, classes: int, device: torch.device) -> Tally:
        counts = torch.zeros(asked, classes, dtype=torch.int64, device=device)
        return cls(counts, torch.zeros(0, dtype=torch.float64, device=device))

    @property
    def clients(self) -> int:
        return len(self.accuracies)

    def add(self, votes: Tensor, held_out: Tensor) -> Tally:
        """Return the tally with a block's votes [clients, asked + held-out, classes]; the last only measure."""
        asked = len(self.counts)
        right = (votes[:, asked:].argmax(-1) == held_out).double().mean(-1)
        return Tally(self.counts + bounded(votes[:, :asked]).sum(0), torch.cat([self.accuracies, right]))


def bounded(votes: Tensor) -> Tensor:
    """Return votes [..., classes] in whole numbers of VOTE_STEP; those not finite or longer than 1 become zero.

    Sums of squares are exact in float64 up to 2^53 and compared with 2^40: a longer vote is never taken for a shorter
    one, however many classes there are.
    """
    allowed = torch.isfinite(votes).all(-1, keepdim=True) & (votes.abs() <= 1).all(-1, keepdim=True)
    whole = (torch.where(allowed, votes, 0.0).double() / VOTE_STEP).trunc()
    short = whole.square().sum(-1, keepdim=True) <= VOTE_STEP**-2
    return torch.where(short, whole, 0.0).long()


@dataclass(frozen=True)
class VoteNoise:
    """The noise of a release, which follows from one number."""

    queries: int  # Q_v
    checks: int = 0
    check_noise: float = 1.0  # σ₁/σ_v

    @property
    def shows_cohort(self) -> bool:
        return False  # everyone votes

    @property
    def excess(self) -> float:
        return 1.0

    def event(self, noise_multiplier: float) -> Event:
        """Return the event: σ_v is the multiplier times √(Q + C·(σ_v/σ₁)²), for one query the multiplier itself."""
        noise_std = noise_multiplier * math.sqrt(self.queries + self.checks / self.check_noise**2)
        return Votes(self.queries, noise_std, self.checks, self.check_noise * noise_std if self.checks else 0.0)


def plan_votes(config: Config, clients: int, noise: VoteNoise) -> PrivacyPlan:
    """Return the plan of one release by all clients."""
    return make_plan(
        FullSampler(clients),
        noise,
        rounds=1,
        delta=config.delta,
        accountant=config.accountant,
        epsilon=config.epsilon,
        noise_multiplier=config.noise_multiplier,
    )


def release_labels(counts: Tensor, event: Votes, threshold: float, rng: Rng) -> Tensor:
    """Return [asked] noisy plurality labels; UNANSWERED where too few agree. `threshold` is in votes.

    | counts                      | label                                                    |
    |-----------------------------|----------------------------------------------------------|
    | noise_std = 0               | the plurality, lowest class first                        |
    | all zero                    | noise alone decides                                      |
    | more pass than there are Q  | the first Q are answered                                 |
    """
    labels = _noisy(counts, event.noise_std, rng.child("votes")).argmax(1)
    if not event.checks:
        return labels
    agreement = _noisy(counts.amax(1, keepdim=True), event.check_noise_std, rng.child("checks"))[:, 0]
    passed = agreement * VOTE_STEP >= threshold
    answered = passed & (torch.cumsum(passed, 0) <= event.queries)
    return torch.where(answered, labels, UNANSWERED)


def _noisy(counts: Tensor, noise_std: float, rng: Rng) -> Tensor:
    """Add rounded Gaussian noise to counts, [rows, columns] on the grid of votes: whole numbers, int64."""
    scale = noise_std / VOTE_STEP * (1 + 2.0**-50)
    noise = torch.from_numpy(rounded_gaussian.draw(scale, counts.numel(), rng.keystream()))
    return counts + noise.view(counts.shape).to(counts.device)
