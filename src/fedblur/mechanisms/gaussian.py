"""The Gaussian mechanism on the sum: N(0, σ²S²) on every coordinate, whatever clients sent (invariant 2).

`placement = "clients"` is the paper's form: each of the n clients adds a share N(0, σ²S²/n), so that the sum carries
the same noise. A single message is then protected by σ/√n only: it needs a server that sees nothing but the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedblur import events
from fedblur.clipping import Bounded
from fedblur.errors import PrivacyError
from fedblur.mechanisms.base import Conditions, Release, demand_bound
from fedblur.registry import register
from fedblur.rng import Rng

_CACHED = 2**15  # coordinates that are summed at once


@register("mechanism", "gaussian")
@dataclass(frozen=True)
class Gaussian:
    """Gaussian noise on the sum, from the server or in clients' shares."""

    placement: Literal["server", "clients"] = "server"

    @property
    def trust(self) -> str:
        """Who must be trusted for the guarantee to hold."""
        server = "a server that sees each clipped update and adds the noise"
        ideal = "an ideal secure sum of clients' messages, each with its share of the noise (simulated)"
        return server if self.placement == "server" else ideal

    @property
    def shows_cohort(self) -> bool:
        return False  # the noise on the sum is the same for every cohort

    @property
    def excess(self) -> float:
        return 1.0

    def bind(self, conditions: Conditions) -> Gaussian:
        return self

    def event(self, noise_multiplier: float) -> events.Event:
        return events.Gaussian(noise_multiplier)

    def notes(self, noise_multiplier: float) -> tuple[str, ...]:
        return ()

    def accumulate(self, blocks: Iterable[Bounded], release: Release, rng: Rng) -> Tensor:
        total = torch.zeros(release.dimension, dtype=torch.float64, device=release.device)
        sent = 0
        for block in blocks:
            values = demand_bound(block, release)
            if self.placement == "clients":
                values = values + self._shares(release.next_numbers(sent, len(values)), release, rng)
            _add_rows(total, values)
            sent += len(values)
        if self.placement == "clients" and sent < len(
            release.numbers
        ):  # invariant 8: too few shares is too little noise
            raise PrivacyError(
                f"{sent} noise shares arrived of the {len(release.numbers)} that they were sized for; round aborted"
            )
        return total

    def _shares(self, numbers: range, release: Release, rng: Rng) -> Tensor:
        std = release.noise_std / math.sqrt(release.cohort)
        draws = [rng.child("share", i).normal(release.dimension, release.device) for i in numbers]
        return std * torch.stack(draws)

    def release(self, total: Tensor, release: Release, rng: Rng) -> Tensor:
        noisy = total
        if release.noise_std > 0 and (
            self.placement == "server" or release.cohort == 0
        ):  # an empty cohort is noisy too
            noise = rng.child("noise").normal(release.dimension, release.device)
            noisy = total + release.noise_std * noise.double()
        return noisy.float()


def _add_rows(total: Tensor, values: Tensor) -> None:
    """Add all rows in float64, where the order of clients does not matter."""
    # torch first makes a float64 copy of what it sums: on a CPU one that fits into a cache.
    width = _CACHED if total.device.type == "cpu" else len(total)
    for part, rows in zip(torch.split(total, width), torch.split(values, width, dim=1), strict=True):
        part += rows.sum(0, dtype=torch.float64)
