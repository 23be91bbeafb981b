"""The contract of a mechanism: clients' messages are summed, and the sum is released with noise.

`accumulate` is what clients and the secure sum do; `release` is what happens once to the total. They are two steps
so that several processes can each accumulate their part of a cohort and noise is still added once. Noise depends on no
data, so `draw` begins before clients train, and the noise is there when their sum is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fedblur.core.errors import PrivacyError
from fedblur.core.rng import Rng
from fedblur.privacy.events import Event

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedblur.core.config import Config
    from fedblur.privacy.clipping import Bounded
    from fedblur.privacy.sampling import Sampler

Noise = Callable[[], "Tensor"]  # waits for noise that is being drawn


class Once:
    """Noise that can be had once, by the process that began it: in two releases it would cancel out.

    a second call                        PrivacyError
    a call in a process that forked      PrivacyError
    """

    def __init__(self, wait: Noise) -> None:
        self._wait: Noise | None = wait
        self._process = os.getpid()

    def __call__(self) -> Tensor:
        wait, self._wait = self._wait, None
        if wait is None or os.getpid() != self._process:
            raise PrivacyError("this noise belongs to one release of one process; draw again for another")
        return wait()


@dataclass(frozen=True)
class Conditions:
    """The public facts before a run starts. A discrete mechanism's grid, and so its event, depends on them."""

    dimension: int  # values in a client's message
    clip_norm: float  # S
    expected_cohort: float  # pN
    clients: int  # N
    rounds: int = 1  # T: noise that is correlated over rounds depends on it
    separation: int = 1  # rounds from one participation of a client to its next, at least


@dataclass(frozen=True)
class Release:
    """A round as its noise sees it: public constants, and the size of the cohort inside the boundary."""

    dimension: int  # d
    clip_norm: float  # S
    noise_multiplier: float  # σ; the noise on the sum has standard deviation σ·S
    cohort: int  # realised |P_t|: private, it sizes noise shares and never leaves
    device: torch.device
    round_: int = 0  # seeds what all parties share in a round and anyone may know
    part: range | None = None  # which of the cohort's clients this process sums; None: all of them
    number: int = 1  # of the release among all of the run: correlated noise goes on from one to the next

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier * self.clip_norm if self.noise_multiplier else 0.0

    @property
    def numbers(self) -> range:
        """The numbers in the round of this process's clients, in the order in which they come: their streams' names."""
        return range(self.cohort) if self.part is None else self.part

    def next_numbers(self, sent: int, count: int) -> range:
        """Return numbers of the next `count` clients after `sent`. None is used twice, so no share of noise is."""
        if sent + count > len(self.numbers):
            raise PrivacyError(f"{sent + count} clients came of the {len(self.numbers)} that were announced")
        return self.numbers[sent : sent + count]


class MechanismPart(Protocol):
    """A registered mechanism: its settings. Bound to the conditions of a run it is a `Mechanism`."""

    @property
    def trust(self) -> str:
        """The parties that must be trusted for the guarantee to hold."""

    def bind(self, conditions: Conditions) -> Mechanism:
        """Return the mechanism under these conditions, or refuse conditions that do not suit its settings."""


class Mechanism(Protocol):
    """A mechanism turns bounded updates into a private sum."""

    @property
    def shows_cohort(self) -> bool:
        """Whether what is released tells how many clients came, by how much noise there is for instance."""

    @property
    def excess(self) -> float:
        """Variance of the noise that expected cohorts add to a sum over rounds, over what σ would add each time.

        Above 1 where shares are sized for fewer clients, below 1 where later noise takes off earlier noise.
        """

    def event(self, noise_multiplier: float) -> Event:
        """Return the event of one release, before sampling."""

    def notes(self, noise_multiplier: float) -> tuple[str, ...]:
        """Return what a planner should know about this noise; often nothing."""

    def accumulate(self, blocks: Iterable[Bounded], release: Release, rng: Rng) -> Tensor:
        """Sum the clients' messages. Partial sums of several processes add up; only `release` reads them."""

    def draw(self, release: Release, rng: Rng) -> Noise:
        """Begin to draw what `release` adds to the total. It may not depend on what clients send."""

    def release(self, total: Tensor, release: Release, noise: Tensor) -> Tensor:
        """Return the noisy sum, [d] float32."""


def demand_bound(block: Bounded, release: Release) -> Tensor:
    """Return the block's values, if the noise is made for its sensitivity and shape."""
    if block.l2_bound > release.clip_norm:
        raise PrivacyError(f"an update bounded by {block.l2_bound} met noise made for {release.clip_norm}")
    if block.value.shape[-1] != release.dimension:
        raise PrivacyError(f"an update of {block.value.shape[-1]} values met a model of {release.dimension}")
    return block.value


def mechanism_for(config: Config, sampler: Sampler, parameters: int) -> Mechanism:
    """Return the configuration's mechanism for messages as wide as clients send: the same on server and client."""
    part: MechanismPart = config.mechanism
    return part.bind(conditions_for(config, sampler, parameters))


def conditions_for(config: Config, sampler: Sampler, parameters: int) -> Conditions:
    """Return the public facts that a mechanism is bound to, with the width of clients' messages."""
    width = parameters if config.mask is None else config.mask.kept(parameters)
    width += config.clipping is not None  # the bit of adaptive clipping
    separation = getattr(sampler, "separation", 1)  # samplers that draw coins have none
    return Conditions(width, config.clip_norm, sampler.expected_cohort, sampler.clients, config.rounds, separation)
