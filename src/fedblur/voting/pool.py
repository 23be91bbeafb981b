"""Stage 1, reserve a pool. In: the training clients. Out: those who vote, and the samples of those who do not.

Who is reserved and which samples are asked about follow from the data seed alone: public, and the same for every run
on these data. The reserved clients' labels are dropped here; no later stage can see them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedblur.data.population import Population, Shard
from fedblur.errors import ConfigError
from fedblur.rng import Seeded
from fedblur.voting.base import Voting

_QUERIES = 500  # by default


@dataclass(frozen=True)
class Pool:
    """A public pool without labels, and the private clients that are left."""

    x: Tensor  # [samples, *shape], as stored; in an order that says nothing
    reserved: int  # clients whose samples these are; they are not counted in N
    voters: Tensor  # [N] client ids, from the smallest client to the largest: like sizes make less padding
    queries: int  # Q_v, the most labels that are released
    checks: int  # how many samples are checked for agreement first; 0: none, all queries are answered

    def __len__(self) -> int:
        return len(self.x)

    @property
    def asked(self) -> int:
        """Clients vote on the first so many samples."""
        return max(self.queries, self.checks)


def reserve(population: Population, settings: Voting, seed: int) -> Pool:
    """Divide the training clients into voters and a pool, by lot."""
    lots = Seeded.root(seed).child("voting")
    total = population.clients
    count = reserved_clients(total, settings)
    if count >= total:
        raise ConfigError(
            f"method.{settings.part_name}.pool_share={settings.pool_share} of {total} clients leaves none to vote"
        )
    order = torch.from_numpy(lots.child("reserved").numpy().permutation(total))
    x = _unlabelled(population.fetch(torch.sort(order[:count]).values))
    x = x[torch.from_numpy(lots.child("queries").numpy().permutation(len(x))).to(x.device)]
    voters = torch.sort(order[count:]).values
    by_size = torch.argsort(population.fetch(voters).sizes, stable=True)
    return Pool(x, count, voters[by_size], *_counts(settings, len(x)))


def reserved_clients(clients: int, settings: Voting) -> int:
    """How many clients do not vote."""
    return max(1, round(settings.pool_share * clients))


def _unlabelled(shard: Shard) -> Tensor:
    """All samples of a shard's clients, without their labels."""
    ends = torch.cumsum(shard.sizes, 0)
    within = torch.arange(int(shard.sizes.sum())) - torch.repeat_interleave(ends - shard.sizes, shard.sizes)
    index = torch.repeat_interleave(shard.starts, shard.sizes) + within
    return shard.x[index.to(shard.x.device)]


def _counts(settings: Voting, samples: int) -> tuple[int, int]:
    """(queries, checks) for a pool of this size."""
    queries = settings.queries or max(1, min(_QUERIES, samples // 2))
    checks = (settings.checks or min(2 * queries, samples)) if settings.threshold > 0 else 0
    for name, value in (("queries", queries), ("checks", checks)):
        if value > samples:
            raise ConfigError(
                f"method.{settings.part_name}.{name}={value} but the public pool has {samples} samples; "
                f"lower it or raise pool_share={settings.pool_share}"
            )
    if 0 < checks < queries:
        raise ConfigError(f"method.{settings.part_name}.checks={checks} must be at least queries={queries}")
    return queries, checks
