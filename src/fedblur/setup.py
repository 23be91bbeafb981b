"""How a configuration becomes a protocol: data, model, plan, engine, ledger. All is checked before it is spent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedblur.accounting import PrivacyPlan, make_plan
from fedblur.config import Config
from fedblur.data.federation import load_federation
from fedblur.data.population import Federation, Samples
from fedblur.engines import choose_engine
from fedblur.engines.local import EngineName
from fedblur.errors import ConfigError
from fedblur.functional import Layout, as_function, check_model, initial_vector
from fedblur.ledger import Budget, Ledger
from fedblur.models import make_model
from fedblur.rng import Rng, make_rng
from fedblur.round import Protocol


@dataclass(frozen=True)
class Machine:
    """Where a run computes. It is kept apart from the configuration: it must not change the result's meaning."""

    device: str = "auto"
    engine: EngineName = "auto"
    data_dir: Path | None = None

    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"device={self.device!r} cannot be used: {reason}; try --device cpu") from None
        return device


@dataclass(frozen=True)
class Setup:
    """A run that is ready to start."""

    config: Config
    federation: Federation
    module: nn.Module
    initial: Tensor  # w^0, [d]
    protocol: Protocol
    rng: Rng
    held_out: Samples  # what accuracy is measured on: validation clients or test data, never both


def prepare(
    config: Config,
    ledger: Path,
    machine: Machine,
    federation: Federation | None = None,
    module: nn.Module | None = None,
) -> Setup:
    """Check and build everything. `federation` and `module` replace what the configuration names."""
    device, rng = machine.torch_device(), make_rng(config.seed)
    data = federation or load(config, machine)
    shape, classes = data.train.shape, data.train.classes
    if module is None:
        module = make_model(config.model, shape, classes, rng.child("init").seed())
    check_model(module, shape, classes)
    layout, initial = Layout.of(module), initial_vector(module)
    module = module.to(device).train()
    plan = plan_for(config, data.train.clients)
    protocol = Protocol(
        plan=plan,
        engine=choose_engine(data.train, module, layout.total, device, machine.engine),
        mechanism=config.mechanism,
        server=config.server,
        averaging=config.averaging,
        ledger=Ledger(ledger, Budget(plan.epsilon_target, plan.delta, config.accountant, config.rounds)),
        forward=as_function(module),
        layout=layout,
        local=config.local,
        methods=config.method,
        clip_norm=config.clip_norm,
    )
    return Setup(config, data, module, initial.to(device), protocol, rng, _held_out(config, data))


def load(config: Config, machine: Machine) -> Federation:
    """The configuration's data set, divided into training clients, validation clients and test data."""
    return load_federation(
        config.dataset,
        partition=config.partition,
        clients=config.clients,
        validation_share=config.validation_share,
        seed=config.data_seed,
        data_dir=machine.data_dir,
    )


def plan_for(config: Config, clients: int) -> PrivacyPlan:
    """The privacy plan of a configuration over N clients, with σ calibrated where ε is given."""
    return make_plan(
        config.sampling.sampler(clients, config.sample_rate),
        config.mechanism,
        rounds=config.rounds,
        delta=config.delta,
        accountant=config.accountant,
        epsilon=config.epsilon,
        noise_multiplier=config.noise_multiplier,
    )


def _held_out(config: Config, data: Federation) -> Samples:
    if config.evaluate == "test":
        return data.test
    if data.validation is None:
        raise ConfigError("evaluate='validation' but these data have no validation clients; set validation_share=0.1")
    return data.validation
