"""Stage 3, count. In: clients' votes. Out: their sum per query, and how good each voter is (local_only).

Formal guarantee: one client changes each query's counts by a vector of l2 norm at most 1 vote, whatever it sent: a vote
that is not finite or longer than 1 counts as zero. Over Q queries the counts change by at most √Q. Votes are rounded
towards zero to multiples of 2^-20 and counted in whole numbers, so the guarantee is about what is summed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VOTE_STEP = 2.0**-20  # what counts are multiples of


@dataclass(frozen=True)
class Tally:
    """Votes counted so far. Everything here is local_only: nothing was blurred yet."""

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
        """Count a block's votes [clients, asked + held-out, classes]; the last are only for measuring."""
        asked = len(self.counts)
        right = (votes[:, asked:].argmax(-1) == held_out).double().mean(-1)
        return Tally(self.counts + bounded(votes[:, :asked]).sum(0), torch.cat([self.accuracies, right]))


def bounded(votes: Tensor) -> Tensor:
    """The votes [..., classes] as whole numbers of VOTE_STEP; those that are not finite or longer than 1 become zero.

    Sums of squares are exact in float64 up to 2^53 and compared with 2^40: a longer vote is never taken for a shorter
    one, however many classes there are.
    """
    allowed = torch.isfinite(votes).all(-1, keepdim=True) & (votes.abs() <= 1).all(-1, keepdim=True)
    whole = (torch.where(allowed, votes, 0.0).double() / VOTE_STEP).trunc()
    short = whole.square().sum(-1, keepdim=True) <= VOTE_STEP**-2
    return torch.where(short, whole, 0.0).long()
