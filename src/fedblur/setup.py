"""How a configuration becomes a protocol: data, model, plan, engine, ledger. All is checked before it is spent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from fedblur.accounting import PrivacyPlan, make_plan
from fedblur.binding import mechanism_for
from fedblur.config import Config
from fedblur.data.federation import load_federation
from fedblur.data.population import Federation, Samples
from fedblur.engines import Alone, Processes, choose_engine
from fedblur.engines.distributed import own_device
from fedblur.engines.local import EngineName
from fedblur.errors import ConfigError
from fedblur.functional import Layout, as_function, check_model, initial_vector
from fedblur.ledger import Budget, ForeignLedger, Ledger
from fedblur.models import make_model
from fedblur.rng import Rng, make_rng
from fedblur.round import Protocol

Precision = Literal["auto", "bf16", "fp32"]


@dataclass(frozen=True)
class Machine:
    """Where a run computes. It is kept apart from the configuration: it must not change the result's meaning."""

    device: str = "auto"
    engine: EngineName = "auto"
    data_dir: Path | None = None
    precision: Precision = "auto"
    rank_timeout: float = 600.0  # seconds that processes under torchrun wait for each other

    def half(self, device: torch.device) -> bool:
        """Whether to compute in bfloat16 (weights, updates and sums stay float32): on GPUs that have it."""
        able = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return self.precision == "bf16" or (self.precision == "auto" and able)

    def torch_device(self) -> torch.device:
        name = own_device(self.device)
        if name == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(name)
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
    machine: str  # where and how it computes, in words


def prepare(
    config: Config,
    ledger: Path,
    machine: Machine,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    processes: Processes | None = None,
) -> Setup:
    """Check and build everything. `federation` and `module` replace what the configuration names."""
    processes = processes or Alone()
    device, rng = machine.torch_device(), make_rng(config.seed)
    data = federation or load(config, machine)
    shape, classes = data.train.shape, data.train.classes
    if module is None:
        module = make_model(config.model, shape, classes, rng.child("init").seed())
    check_model(module, shape, classes)
    layout, initial = Layout.of(module), initial_vector(module)
    module = module.to(device).train()
    plan = plan_for(config, data.train.clients, layout.total)
    if config.clipping is not None:
        config.clipping.vector_multiplier(plan.noise_multiplier, plan.expected_cohort)  # refuses before a round
    keeper = ForeignLedger if processes.rank else Ledger
    protocol = Protocol(
        plan=plan,
        engine=processes.engine
        or choose_engine(data.train, module, layout.total, device, machine.engine, config.rounds * config.local.steps),
        mechanism=mechanism_for(config, plan.sampler, layout.total),
        server=config.server,
        averaging=config.averaging,
        ledger=keeper(ledger, Budget(plan.epsilon_target, plan.delta, config.accountant, config.rounds)),
        forward=as_function(module, machine.half(device)),
        layout=layout,
        local=config.local,
        methods=config.method,
        clip_norm=config.clip_norm,
        bounding=config.bounding,
        clipping=config.clipping,
        mask=config.mask,
        processes=processes,
    )
    processes.ready(data.train, layout.total)
    words = processes.describe(f"{protocol.engine}, {'bf16' if machine.half(device) else 'fp32'}")
    return Setup(config, data, module, initial.to(device), protocol, rng, held_out(config, data), words)


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


def plan_for(config: Config, clients: int, parameters: int) -> PrivacyPlan:
    """The privacy plan of a configuration over N clients and d parameters, with σ calibrated where ε is given."""
    sampler = config.sampling.sampler(clients, config.sample_rate)
    return make_plan(
        sampler,
        mechanism_for(config, sampler, parameters),
        rounds=config.rounds,
        delta=config.delta,
        accountant=config.accountant,
        epsilon=config.epsilon,
        noise_multiplier=config.noise_multiplier,
    )


def held_out(config: Config, data: Federation) -> Samples:
    """What accuracy is measured on: test data or validation clients, never both."""
    if config.evaluate == "test":
        return data.test
    if data.validation is None:
        raise ConfigError("evaluate='validation' but these data have no validation clients; set validation_share=0.1")
    return data.validation
