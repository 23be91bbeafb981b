"""How a configuration becomes an election: data, pool, plan, voters, student, ledger. All is checked beforehand.

`federation` and `module` replace what the configuration names, as in runs of rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from fedblur.accounting import PrivacyPlan
from fedblur.config import Config, config_hash
from fedblur.data.population import Federation, Samples
from fedblur.events import Votes
from fedblur.fitting import check_fit
from fedblur.functional import Forward, Layout, as_function, check_model, initial_vector
from fedblur.ledger import Budget, Ledger, randomness_of
from fedblur.models import make_model
from fedblur.rng import Rng, Seeded, make_rng
from fedblur.setup import Machine, held_out, load
from fedblur.voting.base import Booth, Electorate, Voting
from fedblur.voting.pool import Pool, reserve
from fedblur.voting.release import VoteNoise, plan_votes

_MEASURED = 1000  # held-out samples on which single voters are measured


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

    @property
    def event(self) -> Votes:
        """What is released, once."""
        return cast(Votes, self.plan.event())

    def measured(self) -> Samples:
        """Some held-out samples, for the voters' own accuracy (local_only)."""
        lots = Seeded.root(self.config.data_seed).child("voting", "measured").numpy()
        chosen = torch.from_numpy(lots.permutation(len(self.held_out))[:_MEASURED])
        return Samples(self.held_out.x[chosen], self.held_out.y[chosen])


def prepare(
    config: Config,
    ledger: Path,
    machine: Machine,
    federation: Federation | None = None,
    module: nn.Module | None = None,
) -> Election:
    """Check and build everything."""
    settings: Voting = config.voting
    device, rng = machine.torch_device(), make_rng(config.seed)
    data = federation or load(config, machine)
    shape, classes = data.train.shape, data.train.classes
    check_fit(config, data, module is None)
    if module is None:
        module = make_model(config.model, shape, classes, rng.child("init").seed())
    check_model(module, shape, classes)
    layout, initial = Layout.of(module), initial_vector(module).to(device)
    module = module.to(device).train()
    pool = reserve(data.train, settings, config.data_seed)
    plan = _plan(config, pool)
    return Election(
        config=config,
        settings=settings,
        federation=data,
        pool=pool,
        electorate=settings.electorate(Booth(data.train, module, device, machine.engine, rng)),
        plan=plan,
        ledger=Ledger(
            ledger,
            Budget(plan.epsilon_target, plan.delta, config.accountant, plan.rounds),
            config_hash(config),
            randomness_of(config.seed),
        ),
        rng=rng,
        device=device,
        module=module,
        forward=as_function(module),
        layout=layout,
        initial=initial,
        held_out=held_out(config, data),
    )


def _plan(config: Config, pool: Pool) -> PrivacyPlan:
    noise = VoteNoise(pool.queries, pool.checks, config.voting.check_noise)
    return plan_votes(
        len(pool.voters),
        noise,
        delta=config.delta,
        accountant=config.accountant,
        epsilon=config.epsilon,
        noise_multiplier=config.noise_multiplier,
    )
