"""How a configuration becomes a protocol: data, model, plan, engine, ledger. All is checked before it is spent."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from fedblur.accounting import PrivacyPlan, make_plan
from fedblur.binding import mechanism_for
from fedblur.bounding import Message
from fedblur.cautions import cautions
from fedblur.client import ClientJob
from fedblur.config import Config, config_hash
from fedblur.data.federation import load_federation
from fedblur.data.population import Federation, Samples
from fedblur.data.roles import ROLES
from fedblur.engines import Alone, Choice, Engine, LocalEngine, Processes, WorkerEngine, choose_engine
from fedblur.engines.distributed import Ranks, own_device
from fedblur.engines.isolation import clients_interfere
from fedblur.engines.local import EngineName
from fedblur.engines.timing import Work, timed_choice
from fedblur.errors import ConfigError, PrivacyError, RunError
from fedblur.fitting import check_fit
from fedblur.functional import Layout, ModuleFunction, as_function, check_model, initial_vector
from fedblur.ledger import Budget, ForeignLedger, Ledger, randomness_of
from fedblur.models import make_model
from fedblur.models.fronted import computed_ahead
from fedblur.rng import Rng, make_rng
from fedblur.round import Protocol
from fedblur.runfolder import RunFolder

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

    def as_recorded(self, folder: RunFolder) -> Machine:
        """With the engine that a run was started with, unless the user names one: another one gives other bits."""
        recorded = folder.recorded_engine(self.torch_device().type)
        if self.engine != "auto" or recorded not in get_args(EngineName):
            return self
        return replace(self, engine=cast(EngineName, recorded))

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
    choice: Choice  # of the engine

    @property
    def header(self) -> str:
        """What a run says first."""
        return f"engine: {self.machine}; --engine names another"

    @property
    def protects(self) -> bool:
        """Whether this run's releases are private: noise, and nobody can repeat it."""
        return self.rng.private and self.protocol.plan.noise_multiplier > 0

    def remembered(self) -> dict[str, Any]:
        """What checkpoints remember, to refuse another ledger and another choice of training clients."""
        return {"ledger": self.protocol.ledger.anchor(), "roles": ROLES}

    @property
    def cautions(self) -> list[str]:
        """What is allowed and probably not meant."""
        return cautions(self.protocol.plan, self.federation.train.clients, self.protocol.layout.total)


def prepare(
    config: Config,
    ledger: Path,
    machine: Machine,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    processes: Processes | None = None,
    canaries: int = 0,
    tell: Callable[[str], None] | None = None,
) -> Setup:
    """Check and build everything. `federation` and `module` replace what the configuration names; `tell` hears of work
    that takes long.

    `canaries`: clients that an audit adds to the population; they count like any other.
    """
    processes = processes or Alone()
    device, rng = machine.torch_device(), make_rng(config.seed)
    data = federation or load(config, machine)
    shape, classes, named = data.train.shape, data.train.classes, module is None
    check_fit(config, data, named)
    if module is None:
        module = make_model(config.model, shape, classes, rng.child("init").seed())
    check_model(module, shape, classes)
    layout, initial = Layout.of(module), initial_vector(module)
    module, half = module.to(device).train(), machine.half(device)
    trained, data = computed_ahead(module, data, config.method, device, tell)
    shape = data.train.shape
    plan = plan_for(config, data.train.clients + canaries, layout.total)
    if config.clipping is not None:
        config.clipping.vector_multiplier(plan.noise_multiplier, plan.expected_cohort)  # refuses before a round
    forward = as_function(trained, half)
    if named and all(tensor.requires_grad for tensor in module.parameters()):  # frozen ones differ with the seed
        forward = _forward(config.model, shape, classes, half, device)
    keeper = ForeignLedger if processes.rank else Ledger
    budget = Budget(plan.epsilon_target, plan.delta, config.accountant, config.rounds)
    job = ClientJob(
        forward, layout, layout.unflatten(initial.to(device)), config.local, config.method, config.clip_norm,
        Message(config.bounding),
    )  # fmt: skip
    work = Work(job, trained, shape, classes, plan.expected_cohort, config.rounds)
    engine, choice = _engine(work, data, plan, machine, device, processes, rng.private and plan.noise_multiplier > 0)
    protocol = Protocol(
        plan=plan,
        engine=engine,
        mechanism=mechanism_for(config, plan.sampler, layout.total),
        server=config.server,
        averaging=config.averaging,
        ledger=keeper(ledger, budget, config_hash(config), randomness_of(config.seed)),
        forward=forward,
        layout=layout,
        local=config.local,
        methods=config.method,
        clip_norm=config.clip_norm,
        bounding=config.bounding,
        clipping=config.clipping,
        mask=config.mask,
        denoise=config.denoise,
        processes=processes,
    )
    processes.ready(data.train, layout.total)
    words = processes.describe(f"{protocol.engine}{choice.why and f' ({choice.why})'}, {'bf16' if half else 'fp32'}")
    return Setup(config, data, module, initial.to(device), protocol, rng, held_out(config, data), words, choice)


def _engine(
    work: Work, data: Federation, plan: PrivacyPlan, machine: Machine, device: torch.device, processes: Processes,
    private: bool,
) -> tuple[Engine, Choice]:  # fmt: skip
    """Return the engine of a run, in which clients of a private run cannot touch each other, and why it was chosen."""
    choice = _choice(work, machine, device, processes)
    if processes.engine is not None:
        return processes.engine, choice
    engine = _made(work, data, plan, device, choice, processes.world)
    if not (private and _interfere(engine, work, data)):
        return engine, choice
    if machine.engine != "auto":
        raise PrivacyError(
            f"engine={machine.engine!r} is not private here: on this machine one client's update of this model "
            "changes others in their last bits; use --engine sequential"
        )
    choice = Choice("sequential", "vectorised lets clients of this model change each other's last bits")
    return _made(work, data, plan, device, choice, processes.world), choice


def _made(
    work: Work, data: Federation, plan: PrivacyPlan, device: torch.device, choice: Choice, world: int
) -> LocalEngine | WorkerEngine:
    """Make the engine of this choice, its blocks as large as one process's part of a cohort wants them."""
    cohort, spread = plan.expected_cohort / world, plan.sampler.cohort_spread / math.sqrt(world)
    steps = work.rounds * work.job.local.steps
    return choose_engine(
        data.train, work.module, work.job.layout.total, device, choice.kind, steps=steps, cohort=cohort, spread=spread
    )


def _interfere(engine: LocalEngine | WorkerEngine, work: Work, data: Federation) -> bool:
    """Whether one client's message changes with who shares its block; a worker trains each client alone.

    The check also finds a block that fits into memory. From then on its size is fixed.
    """
    if not isinstance(engine, LocalEngine):
        return False
    touched = clients_interfere(engine, work.job, data.test.x[:0], work.classes)
    engine.fixed = True
    return touched


def _choice(work: Work, machine: Machine, device: torch.device, processes: Processes) -> Choice:
    """The engine that was asked for, or the one that suits; under torchrun rank 0 chooses for all."""
    if processes.engine is not None:
        return Choice("sequential")  # a node of a federation trains one client
    choice = None
    if not processes.rank:
        choice = timed_choice(work, device) if machine.engine == "auto" else Choice(machine.engine)
    told = processes.tell(choice) if isinstance(processes, Ranks) else choice
    assert isinstance(told, Choice)
    return told


@functools.lru_cache(maxsize=4)
def _forward(model: Any, shape: tuple[int, ...], classes: int, half: bool, device: torch.device) -> ModuleFunction:
    """A named model as a function of its weights, the same object in all runs of a process: they share compiled code.

    Its own weights are never read: a run's come as an argument.
    """
    return as_function(make_model(model, shape, classes, seed=0).to(device).train(), half)


def load(config: Config, machine: Machine) -> Federation:
    """The configuration's data set, divided into training clients, validation clients and test data."""
    folder = machine.data_dir or os.environ.get("FEDBLUR_DATA")
    return _load(
        config.dataset,
        config.partition,
        config.clients,
        config.validation_share,
        config.data_seed,
        Path(folder) if folder else None,
    )


@functools.lru_cache(maxsize=1)  # cells of a table share their data, and dividing them takes seconds
def _load(
    dataset: Any, partition: Any, clients: int | None, share: float, seed: int, data_dir: Path | None
) -> Federation:
    return load_federation(dataset, partition, clients, share, seed, data_dir)


def demand_same_roles(state: dict[str, Any], config: Config, machine: Machine, federation: Federation | None) -> None:
    """Version 0.1 chose validation clients by lot; a run must not change in the middle whom it trains on."""
    if state.get("roles") != ROLES and (federation or load(config, machine)).by_id:
        raise RunError(
            "this run was begun by fedblur 0.1, which chose its training clients in another way; start a new run "
            "(on these clients it adds to the total)"
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
        share = config.validation_share
        raise ConfigError(
            f"evaluate='validation' but these data have no validation clients; raise validation_share={share:g}: each "
            "natural client is drawn on its own (data of your own: federation_from_arrays(…, validation_share=0.1))"
        )
    return data.validation
