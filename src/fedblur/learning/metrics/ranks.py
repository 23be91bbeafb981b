"""Ranks of the right item or token: hit rate and NDCG at k. One item of each sample is right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.metrics.base import Metric
from fedblur.learning.metrics.shares import demand_ranks, ranks_of


@dataclass(frozen=True)
class AtK(Metric):
    """A mean over samples of what the rank of the right item is worth."""

    k: int = 10  # the last rank that counts

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"metric.{self.part_name}.k={self.k} must be at least 1")

    @property
    def key(self) -> str:
        return f"{self.part_name}@{self.k}"

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        demand_ranks(self, outputs, targets)

    def worth(self, ranks: Tensor) -> Tensor:
        """Return what a rank up to k is worth, 1 for the first."""
        raise NotImplementedError

    def count(self, outputs: Tensor, targets: Tensor) -> Tensor:
        ranks = ranks_of(outputs, targets).double()
        gains = torch.where(ranks <= self.k, self.worth(ranks), 0)
        return torch.stack([gains.sum(), gains.new_tensor(len(ranks))])


@register("metric", "hit_rate")
@dataclass(frozen=True)
class HitRate(AtK):
    """The share of samples whose item is among the first k."""

    def worth(self, ranks: Tensor) -> Tensor:
        return torch.ones_like(ranks)


@register("metric", "ndcg")
@dataclass(frozen=True)
class Ndcg(AtK):
    """The normalised discounted cumulative gain of the first k: 1 / log2(1 + rank) of the one item that is right."""

    def worth(self, ranks: Tensor) -> Tensor:
        return 1 / torch.log2(1 + ranks)
