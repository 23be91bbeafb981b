"""Stage 3, count. In: clients' votes. Out: their sum per query, and how good each voter is (local_only).

Formal guarantee: one client changes each query's counts by a vector of l2 norm at most 1, whatever it sent: a vote
that is not finite or longer than 1 counts as zero. Over Q queries the counts change by at most √Q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tally:
    """Votes counted so far. Everything here is local_only: nothing was blurred yet."""

    counts: Tensor  # [asked, classes], float64
    accuracies: Tensor  # [clients so far], float64: of each voter, on held-out samples

    @classmethod
    def empty(cls, asked: int, classes: int, device: torch.device) -> Tally:
        counts = torch.zeros(asked, classes, dtype=torch.float64, device=device)
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
    """The votes [..., classes] in float64, those that are not finite or longer than 1 replaced by zero."""
    votes = votes.double()
    allowed = torch.linalg.vector_norm(votes, dim=-1, keepdim=True) <= 1  # false for nan
    return torch.where(allowed, votes, 0.0)
