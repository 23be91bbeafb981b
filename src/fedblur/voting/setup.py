"""Stage 1, set-up. In: a configuration. Out: an Election: data, pool, plan, voters, student, ledger, all checked.

Who is reserved for the pool and which samples are asked about follow from the data seed alone: public, and the same for
every run on these data. The reserved clients' labels are dropped here; no later stage can see them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from fedblur.core.config import Config
from fedblur.core.errors import ConfigError
from fedblur.core.rng import Rng, Seeded, make_rng
from fedblur.data.population import Federation, Population, Samples, one_input
from fedblur.learning.module_function import Forward, Layout, as_function
from fedblur.privacy.accounting import PrivacyPlan
from fedblur.privacy.claim import OwnPart
from fedblur.privacy.events import Votes
from fedblur.privacy.ledger import Ledger
from fedblur.training.machine import Machine
from fedblur.training.own_parts import own_parts
from fedblur.training.setup import data_and_model, held_out, ledger_of
from fedblur.voting.base import Booth, Electorate, Voting
from fedblur.voting.release import VoteNoise, plan_votes

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
        """The number of samples, from the first, that clients vote on."""
        return max(self.queries, self.checks)


@dataclass(frozen=True)
class Election:
    """A run that is ready to start."""

    config: Config
    settings: Voting
    federation: Federation
    pool: Pool
    electorate: Electorate
    plan: PrivacyPlan
    ledger: Ledger
    rng: Rng
    device: torch.device
    module: nn.Module  # the student
    forward: Forward
    layout: Layout
    initial: Tensor  # [d]
    held_out: Samples  # what accuracy is measured on; nobody learns from it
    own_parts: tuple[OwnPart, ...]  # that are not FedBlur's

    @property
    def event(self) -> Votes:
        """The one release."""
        return cast(Votes, self.plan.event())


def prepare(
    config: Config,
    ledger: Path,
    machine: Machine,
    federation: Federation | None = None,
    module: nn.Module | None = None,
) -> Election:
    """Check and build everything. `federation` and `module` replace what the configuration names."""
    settings: Voting = config.voting
    device, rng = machine.torch_device(), make_rng(config.seed)
    own = own_parts(config, module)
    data, module, layout, initial = data_and_model(config, machine, federation, module, rng)
    pool = reserve(data.train, settings, config.data_seed)
    plan = plan_votes(config, len(pool.voters), VoteNoise(pool.queries, pool.checks, settings.check_noise))
    return Election(
        config=config,
        settings=settings,
        federation=data,
        pool=pool,
        electorate=settings.electorate(Booth(data.train, module, device, machine.engine, rng)),
        plan=plan,
        ledger=ledger_of(config, plan, ledger, data, machine, own=own),
        rng=rng,
        device=device,
        module=module,
        forward=as_function(module),
        layout=layout,
        initial=initial,
        held_out=held_out(config, data),
        own_parts=own,
    )


def reserve(population: Population, settings: Voting, seed: int) -> Pool:
    """Divide the training clients into voters and a pool at random."""
    lots, name = Seeded.root(seed).child("voting"), f"method.{settings.part_name}"
    total = population.clients
    count = reserved_clients(total, settings)
    if count >= total:
        raise ConfigError(f"{name}.pool_share={settings.pool_share} of {total} clients leaves none to vote")
    order = torch.from_numpy(lots.child("reserved").numpy().permutation(total))
    shard = population.fetch(torch.sort(order[:count]).values)
    ends = torch.cumsum(shard.sizes, 0)
    within = torch.arange(int(shard.sizes.sum())) - torch.repeat_interleave(ends - shard.sizes, shard.sizes)
    index = torch.repeat_interleave(shard.starts, shard.sizes) + within
    stored = one_input(shard.x, "a voting protocol")
    x = stored[index.to(stored.device)]  # without their labels
    x = x[torch.from_numpy(lots.child("queries").numpy().permutation(len(x))).to(x.device)]
    voters = torch.sort(order[count:]).values
    by_size = torch.argsort(population.fetch(voters).sizes, stable=True)

    queries = settings.queries or max(1, min(_QUERIES, len(x) // 2))
    checks = (settings.checks or min(2 * queries, len(x))) if settings.threshold > 0 else 0
    for key, value in (("queries", queries), ("checks", checks)):
        if value > len(x):
            raise ConfigError(
                f"{name}.{key}={value} but the public pool has {len(x)} samples; "
                f"lower it or raise pool_share={settings.pool_share}"
            )
    if 0 < checks < queries:
        raise ConfigError(f"{name}.checks={checks} must be at least queries={queries}")
    return Pool(x, count, voters[by_size], queries, checks)


def reserved_clients(clients: int, settings: Voting) -> int:
    """Return how many clients do not vote."""
    return max(1, round(settings.pool_share * clients))
