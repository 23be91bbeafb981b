"""An auditor's record of a real round: what was released, what was in the sum, and who took part.

In: a run's mechanism and engine. Out: the same, with ears. Everything is passed on unchanged, so the audited
code is the code that trains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fedblur.core.config import Config
from fedblur.core.errors import ConfigError
from fedblur.core.rng import Rng
from fedblur.engines import Engine
from fedblur.learning.client import Block, ClientJob
from fedblur.privacy.clipping import Bounded
from fedblur.privacy.events import Event
from fedblur.privacy.laws import Observation
from fedblur.privacy.mechanisms import Mechanism
from fedblur.privacy.mechanisms.base import Noise, Release
from fedblur.privacy.mechanisms.gaussian import FixedPoint, Gaussian
from fedblur.training.round import Protocol
from fedblur.training.server import ServerState


def demand_private_updates(config: Config) -> None:
    """Refuse what has no updates to audit, or claims no privacy."""
    if config.voting is not None:
        raise ConfigError(f"method {config.voting.part_name!r} sends votes, not updates; audit a method of rounds")
    if math.isinf(config.clip_norm):
        raise ConfigError("clip_norm=inf claims no privacy, so there is nothing to audit; set clip_norm=0.1")
    if getattr(config.sampling, "scheduled", False):
        raise ConfigError(
            f"sampling={config.sampling.part_name!r} has cohorts that follow from earlier ones, which no audit tests; "
            'audit the rest with sampling = "poisson"'
        )


def first_state(protocol: Protocol, initial: Tensor) -> ServerState:
    """Return the server's state before the first round, with its average if there is one."""
    state = protocol.server.init(initial)
    return state if protocol.averaging is None else protocol.averaging.init(state)


class Overheard:
    """A mechanism that passes everything on, and keeps what it releases; with `inside`, what went in as well."""

    def __init__(self, inner: Mechanism, inside: bool = False) -> None:
        self.inner, self.inside = inner, inside
        self.heard: Tensor | None = None  # of the last round; None: it was aborted
        self.seen: Observation | None = None
        self.longest = 0.0  # message of all rounds, in units of what noise is made for
        self._known: Tensor | None = None

    @property
    def shows_cohort(self) -> bool:
        return self.inner.shows_cohort

    @property
    def excess(self) -> float:
        return self.inner.excess

    def event(self, noise_multiplier: float) -> Event:
        return self.inner.event(noise_multiplier)

    def notes(self, noise_multiplier: float) -> tuple[str, ...]:
        return self.inner.notes(noise_multiplier)

    def accumulate(self, blocks: Iterable[Bounded], release: Release, rng: Rng) -> Tensor:
        if not self.inside:
            return self.inner.accumulate(blocks, release, rng)
        known = self._known = torch.zeros(release.dimension, dtype=torch.float64, device=release.device)

        def watched() -> Iterator[Bounded]:
            for block in blocks:
                rows = block.value.double()
                if len(rows):
                    norm = float(torch.linalg.vector_norm(rows, dim=1).max())
                    self.longest = max(self.longest, norm / release.clip_norm)
                if isinstance(
                    self.inner, Gaussian
                ):  # exactly what is summed: rounded towards zero onto the public grid
                    step = FixedPoint.of(release).step
                    rows = (rows / step).trunc() * step
                known.add_(rows.sum(0))
                yield block

        return self.inner.accumulate(watched(), release, rng)

    def draw(self, release: Release, rng: Rng) -> Noise:
        self.heard = self.seen = None  # a round begins
        return self.inner.draw(release, rng)

    def release(self, total: Tensor, release: Release, noise: Tensor) -> Tensor:
        self.heard = self.inner.release(total, release, noise)
        if self._known is not None:
            self.seen = Observation(release, self.heard, self._known)
        return self.heard


class Attended:
    """An engine that notes who was asked to train, round by round."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.last = torch.empty(0, dtype=torch.int64)

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def map_clients(self, job: ClientJob, ids: Tensor, rng: Rng) -> Iterator[Block]:
        self.last = ids.cpu()
        return self.inner.map_clients(job, ids, rng)
