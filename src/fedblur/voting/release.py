"""Stages 4 and 5, noise and account. In: counts. Out: labels, the only thing about clients that leaves.

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

from fedblur.accounting import Accountant, PrivacyPlan, make_plan
from fedblur.events import Event, Votes
from fedblur.mechanisms import rounded_gaussian
from fedblur.rng import Rng
from fedblur.sampling import FullSampler
from fedblur.voting.tally import VOTE_STEP

UNANSWERED = -1


@dataclass(frozen=True)
class VoteNoise:
    """How the noise of a release follows from one number."""

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
        """σ_v is the multiplier times √(Q + C·(σ_v/σ₁)²): for one query it is the multiplier itself."""
        noise_std = noise_multiplier * math.sqrt(self.queries + self.checks / self.check_noise**2)
        return Votes(self.queries, noise_std, self.checks, self.check_noise * noise_std if self.checks else 0.0)


def plan_votes(
    clients: int,
    noise: VoteNoise,
    *,
    delta: float | str = "1/N",
    accountant: Accountant = "pld",
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
) -> PrivacyPlan:
    """The plan of one release by all clients, with this epsilon or this noise multiplier; the other one follows."""
    return make_plan(
        FullSampler(clients),
        noise,
        rounds=1,
        delta=delta,
        accountant=accountant,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
    )


def release_labels(counts: Tensor, event: Votes, threshold: float, rng: Rng) -> Tensor:
    """[asked] noisy plurality labels; UNANSWERED where too few agree. `threshold` is in votes.

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
    """The counts, [rows, columns] on the grid of votes, with rounded Gaussian noise: whole numbers, int64."""
    scale = noise_std / VOTE_STEP * (1 + 2.0**-50)
    noise = torch.from_numpy(rounded_gaussian.draw(scale, counts.numel(), rng.keystream()))
    return counts + noise.view(counts.shape).to(counts.device)
