"""What an auditor writes down of a real round: what was released, what was in the sum, and who took part.

In: a run's mechanism and engine. Out: the same, with ears. Everything is passed on unchanged, so the audited
code is the code that trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedblur.client import Block, ClientJob
from fedblur.clipping import Bounded
from fedblur.engines import Engine
from fedblur.events import Event
from fedblur.mechanisms import Mechanism
from fedblur.mechanisms.base import Noise, Release
from fedblur.mechanisms.fixed_point import FixedPoint
from fedblur.mechanisms.gaussian import Gaussian
from fedblur.rng import Rng
from fedblur.round import Protocol
from fedblur.server import ServerState


def first_state(protocol: Protocol, initial: Tensor) -> ServerState:
    """The server's state before the first round, with the average in it where there is one."""
    state = protocol.server.init(initial)
    return state if protocol.averaging is None else protocol.averaging.init(state)


@dataclass(frozen=True)
class Observation:
    """One release. Only `heard` ever leaves; the rest is the auditor's knowledge of the inside."""

    release: Release
    heard: Tensor  # [width] float32: the noisy sum
    known: Tensor  # [width] float64: the sum of the messages, without noise

    @property
    def residual(self) -> Tensor:
        """The noise, [width] float64, in units of the standard deviation that is claimed for it."""
        return (self.heard.double() - self.known) / self.release.noise_std


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
        self._known = torch.zeros(release.dimension, dtype=torch.float64, device=release.device)
        return self.inner.accumulate(self._watched(blocks, release), release, rng)

    def draw(self, release: Release, rng: Rng) -> Noise:
        self.heard = self.seen = None  # a round begins
        return self.inner.draw(release, rng)

    def release(self, total: Tensor, release: Release, noise: Tensor) -> Tensor:
        self.heard = self.inner.release(total, release, noise)
        if self._known is not None:
            self.seen = Observation(release, self.heard, self._known)
        return self.heard

    def _watched(self, blocks: Iterable[Bounded], release: Release) -> Iterator[Bounded]:
        assert self._known is not None
        whole = isinstance(self.inner, Gaussian)
        for block in blocks:
            rows = block.value.double()
            if len(rows):
                norm = float(torch.linalg.vector_norm(rows, dim=1).max())
                self.longest = max(self.longest, norm / release.clip_norm)
            if whole:  # exactly what is summed: rounded towards zero onto the public grid
                step = FixedPoint.of(release).step
                rows = (rows / step).trunc() * step
            self._known += rows.sum(0)
            yield block


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
