"""Public-mask sparsity (Fed-SMP's idea): in each round only k of d coordinates are sent, clipped and noised.

In: the server's state. Out: the round's support, [k] sorted coordinates. A support is computed from a public seed and
from what earlier rounds released, never from clients' data, so it is public and noise outside of it would protect
nothing (the exception in invariant 2). Noise then has the length σS√k/(pN) in place of σS√d/(pN).

The server's optimiser sees an update of 0 at coordinates that were not sent. Its momentum there fades and goes on
moving them: a released value moves the model by the same total, η_g/(1 − β) times itself, as it does without a mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.core.rng import Seeded
from fedblur.learning.methods.lus import keep_largest, kept_count
from fedblur.training.server import Server, ServerState

_MOMENTUM = "server.momentum"


@dataclass(frozen=True)
class Mask(ABC):
    """The coordinates that a round is about. Its seed is public; noise and cohorts have their own streams."""

    share: float = 0.25  # k/d: the share of coordinates that a round sends
    block: int = 16  # coordinates are drawn in runs of this length
    seed: int = 0  # of the mask: public, and independent of noise and cohorts

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"mask.share={self.share} must be in (0, 1]")
        if self.block < 1:
            raise ConfigError(f"mask.block={self.block} must be at least 1")
        if self.seed < 0:
            raise ConfigError(f"mask.seed={self.seed} must be 0 or more (it is public)")

    def check(self, server: Server) -> None:
        """Refuse a server that the mask does not fit."""
        if "server.second" in server.memory(torch.zeros(1)):
            raise ConfigError(
                'mask and server = "adam" do not go together: Adam takes every coordinate to be noisy in every round; '
                'use server = "momentum" or "sgd"'
            )

    def kept(self, dimension: int) -> int:
        """Return k: the same in every round, so that it may appear in a plan."""
        return kept_count(dimension, 1 - self.share)

    @abstractmethod
    def support(self, state: ServerState) -> Tensor:
        """Return the coordinates of the round that this state is about to do: [k], sorted, on the state's device."""

    def shuffled(self, state: ServerState) -> Tensor:
        """Return all coordinates in this round's public random order, block by block."""
        dimension = state.theta.numel()
        generator = Seeded.root(self.seed).child("public mask", state.round).numpy()
        blocks = generator.permutation(-(-dimension // self.block)).astype(np.int64)
        order = (blocks[:, None] * self.block + np.arange(self.block)).ravel()
        return torch.from_numpy(order[order < dimension]).to(state.theta.device)


@register("mask", "random")
@dataclass(frozen=True)
class RandomMask(Mask):
    """Random blocks of coordinates, new ones in every round."""

    def support(self, state: ServerState) -> Tensor:
        return self.shuffled(state)[: self.kept(state.theta.numel())].sort().values


@register("mask", "momentum")
@dataclass(frozen=True)
class MomentumMask(Mask):
    """The largest entries of the server's momentum, and some random ones: else the first support would be the last.

    A coordinate that was never sent has momentum 0, so the largest alone would be those that were sent before.
    """

    explore: float = 0.5  # share of the k that is random

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.explore <= 1:
            raise ConfigError(f"mask.explore={self.explore} must be in (0, 1]")

    def check(self, server: Server) -> None:
        super().check(server)
        if _MOMENTUM not in server.memory(torch.zeros(1)):
            raise ConfigError('mask = "momentum" needs server = "momentum": it sends where the momentum is largest')

    def support(self, state: ServerState) -> Tensor:
        moving, count = state.buffers[_MOMENTUM].abs(), self.kept(state.theta.numel())
        random = kept_count(count, 1 - self.explore) if state.round else count  # round 0 has no momentum yet
        chosen = torch.zeros_like(moving, dtype=torch.bool)
        if count > random:
            chosen = keep_largest(moving, count - random)
        order = self.shuffled(state)
        chosen[order[~chosen[order]][:random]] = True
        return chosen.nonzero().flatten()
