"""The sum of a cohort: one method, whoever computes it. In: a round's task. Out: the sum, without noise.

    Simulated     this process trains the cohort on its own engine
    Ranks         several processes under torchrun train a part each (`distributed.py`)
    CentralNodes  real clients send their clipped updates, which the server adds (`flower/nodes.py`)
    SecureNodes   real clients add theirs under masks; the server sees the sum alone (`flower/nodes.py`)

Everything here lies inside the trusted boundary: noise is added to what comes back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedblur.core.rng import Rng
from fedblur.data.population import Federation
from fedblur.engines.choice import Choice
from fedblur.engines.local import EngineName
from fedblur.engines.timing import Work
from fedblur.learning.client import Block, ClientJob
from fedblur.privacy.accounting import PrivacyPlan
from fedblur.privacy.clipping import Bounded, row_norms
from fedblur.privacy.mechanisms import Mechanism
from fedblur.privacy.mechanisms.base import Release

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass
class Diagnostics:
    """Gathers blocks as they pass by on their way to the mechanism."""

    coordinates: int  # k, how many are sent: d without a mask
    clip_norm: float  # S of this round
    norms: list[Tensor] = field(default_factory=list)
    kept_norms: list[Tensor] = field(default_factory=list)  # after the clip
    trained_norms: list[Tensor] = field(default_factory=list)
    clipped_sum: Tensor | None = None
    bias_sum: Tensor | None = None

    def observe(self, block: Block) -> None:
        """Look at a block; the sums before clipping are recovered from the clipped rows and their norms."""
        value = block.bounded.value[:, : self.coordinates]  # without the bit of adaptive clipping
        kept = row_norms(value)
        excess = torch.where(kept > 0, block.norms / kept - 1, 0.0)  # negative where normalising lengthens
        clipped = value.sum(0)
        bias = excess.to(value.dtype) @ value  # Σ (Δ̂ − clip(Δ̂)) = Σ (‖Δ̂‖/‖clip(Δ̂)‖ − 1)·clip(Δ̂)
        self.clipped_sum = clipped if self.clipped_sum is None else self.clipped_sum + clipped
        self.bias_sum = bias if self.bias_sum is None else self.bias_sum + bias
        self.norms.append(block.norms)
        self.kept_norms.append(kept)
        self.trained_norms.append(block.trained_norms.double())

    def report(self, noise_std: float, expected_cohort: float) -> dict[str, float | list[float] | None]:
        """Return one round's figures; None where an empty cohort leaves nothing to measure."""
        norms = torch.cat(self.norms).cpu() if self.norms else torch.empty(0, dtype=torch.float64)
        trained = torch.cat(self.trained_norms).cpu() if self.norms else norms
        kept = torch.cat(self.kept_norms).cpu() if self.norms else norms
        finite = torch.isfinite(norms)
        known, known_trained, known_kept = norms[finite], trained[finite], kept[finite]
        figures: dict[str, float | list[float] | None] = {
            "cohort": len(norms),
            "refused": len(norms) - len(known),  # non-finite, counted as zero
            "clip_norm": self.clip_norm if math.isfinite(self.clip_norm) else None,  # public
            "coordinates": self.coordinates,  # public
            "noise_norm": noise_std * math.sqrt(self.coordinates) / expected_cohort,
            "noise_error": self.coordinates * (noise_std / expected_cohort) ** 2,  # dσ²S²/P̄²
            "noise_error_message": noise_std**2 / max(len(norms), 1),  # σ²S²/|P_t|, Eq. 3
        }
        if not len(known):
            return figures | dict.fromkeys((*_MEASURED, "norm_quantiles", "trained_norm_quantiles"))
        assert self.clipped_sum is not None
        assert self.bias_sum is not None
        measured = (
            float((known > self.clip_norm).double().mean()),
            float((known - known_kept).square().mean()) / self.coordinates,  # max(0, ‖Δ‖ − S)²/d, Eq. 3
            float((self.bias_sum.double() / len(known)).square().sum()),
            float((known_kept / known).nan_to_num(1.0).mean()),  # ᾱ of the convergence theorem
            float((known / known_trained).nan_to_num(1.0).mean()),  # β: what sparsification leaves of the norm
            float(self.clipped_sum.double().norm()) / len(known) / self.clip_norm,  # κ
        )
        figures |= dict(zip(_MEASURED, measured, strict=True))
        quantiles = torch.tensor(QUANTILES, dtype=torch.float64)
        figures["norm_quantiles"] = torch.quantile(known, quantiles).tolist()
        figures["trained_norm_quantiles"] = torch.quantile(known_trained, quantiles).tolist()
        return figures


_MEASURED = ("clipped_share", "clip_error_message", "clip_error", "alpha_bar", "beta", "kappa")


@dataclass(frozen=True)
class Task:
    """The task of a round: the sum of these clients' messages. Private, it stays inside the boundary."""

    job: ClientJob
    mechanism: Mechanism
    release: Release
    cohort: Tensor  # ids, int64
    # writes the ledger's row: call it before anyone untrusted sees a sum (a simulation's sum is seen by nobody)
    pay: Callable[[], None] = lambda: None


class CohortSum(Protocol):
    """The one interface for where a cohort's sum comes from."""

    def total(self, task: Task, rng: Rng) -> tuple[Tensor, Diagnostics]:
        """Return the sum of the cohort's messages, and what was seen on the way. `rng` is the round's stream."""


class Engine(Protocol):
    """Simulates clients, on one device or on several cores."""

    @property
    def device(self) -> torch.device: ...

    def map_clients(self, job: ClientJob, ids: Tensor, rng: Rng) -> Iterator[Block]:
        """Yield these clients' updates, in blocks. `rng` is the round's stream; each client takes its own child."""


@dataclass(frozen=True)
class Simulated:
    """This process trains all clients of the task, on one engine."""

    engine: Engine

    def total(self, task: Task, rng: Rng) -> tuple[Tensor, Diagnostics]:
        job = task.job
        seen = Diagnostics(job.message.vector_width(job.layout.total), job.clip_norm)

        def observed() -> Iterator[Bounded]:
            for block in self.engine.map_clients(job, task.cohort, rng):
                with torch.no_grad():
                    seen.observe(block)
                yield block.bounded

        return task.mechanism.accumulate(observed(), task.release, rng), seen


@dataclass(frozen=True)
class Wanted:
    """The facts of a run that are known before it is decided who sums its cohorts."""

    work: Work
    data: Federation
    plan: PrivacyPlan
    device: torch.device
    precision: str
    private: bool  # neither seeded nor without noise
    engine: EngineName = "auto"


@dataclass(frozen=True)
class Source:
    """The source of a run's sums, and what its folder and its privacy statement must say about it."""

    sums: CohortSum
    choice: Choice
    machine: str  # where and how it computes, in words
    engine: Engine | None = None  # of this process's clients; None: no client is simulated here
    claims: dict[str, Any] = field(default_factory=dict)


Connect = Callable[[Wanted], Source]
