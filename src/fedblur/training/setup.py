"""Set-up of a protocol from a configuration: data, model, plan, engine, ledger. All is checked before it is spent."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedblur.core.config import Config, config_digest, config_hash
from fedblur.core.errors import ConfigError, DataError, PrivacyError, RunError
from fedblur.core.rng import Rng, make_rng
from fedblur.data.federation import load_federation
from fedblur.data.population import Federation, Inputs, Packed, Samples, as_input, each_input
from fedblur.data.roles import ROLES
from fedblur.engines import Engine
from fedblur.engines.cohort_sum import Connect, Source, Wanted
from fedblur.engines.distributed import ForeignLedger
from fedblur.engines.simulate import simulate
from fedblur.engines.timing import Work
from fedblur.learning.client import ClientJob
from fedblur.learning.metrics import Metric, metrics_of
from fedblur.learning.model_checks import check_model, constants, constants_digest, for_training, runs
from fedblur.learning.models import make_model
from fedblur.learning.models.fixed_features import Fronted, computed_ahead
from fedblur.learning.module_function import (
    Layout,
    ModuleFunction,
    as_function,
    choose_trainable,
    copied,
    initial_vector,
)
from fedblur.learning.personal import FirstRows, Personal, shared_layout
from fedblur.learning.tasks import Task
from fedblur.privacy import events
from fedblur.privacy.accounting import PrivacyPlan, make_plan
from fedblur.privacy.claim import UNIT, OwnPart, unclaimed
from fedblur.privacy.clipping import Message
from fedblur.privacy.ledger import Budget, Ledger, Spending, Subject, randomness_of
from fedblur.privacy.ledger_file import read_stream
from fedblur.privacy.mechanisms import Mechanism
from fedblur.privacy.mechanisms.base import mechanism_for
from fedblur.privacy.mechanisms.correlated import CorrelatedNoise, SeededNoise
from fedblur.privacy.noise_key import NoiseKey
from fedblur.privacy.participation import Attendance, Scheduled
from fedblur.privacy.population_account import account_of, covers
from fedblur.training.checks import cautions, check_fit, check_targets, check_task
from fedblur.training.client_rows import RowsInMemory, RowsOnDisk
from fedblur.training.machine import Machine
from fedblur.training.own_parts import audited, own_parts
from fedblur.training.participation_record import ParticipationRecord
from fedblur.training.round import Protocol
from fedblur.training.server import FIRST_ROW, ServerState


@dataclass(frozen=True)
class Setup:
    """A run that is ready to start."""

    config: Config
    federation: Federation
    module: nn.Module
    initial: Tensor  # w^0, [d]
    protocol: Protocol
    rng: Rng
    held_out: Samples  # what metrics are measured on: validation clients or test data, never both
    source: Source  # of the cohorts' sums
    constants: str  # a hash of what is not trained; "" where all is
    own_parts: tuple[OwnPart, ...] = ()  # that are not FedBlur's, with what their audits found

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Return what is measured, the headline first."""
        return metrics_of(self.protocol.task, self.config.metrics)

    @property
    def header(self) -> str:
        """Return what a run says first."""
        return f"engine: {self.source.machine}; --engine names another"

    @property
    def engine(self) -> Engine:
        """Return where this process simulates clients."""
        if self.source.engine is None:
            raise PrivacyError("no client is simulated here: a federation's data stay on its nodes")
        return self.source.engine

    @property
    def rows(self) -> RowsOnDisk | None:
        """Return where a run keeps what stays on clients; None where nothing does, or where they keep it themselves."""
        rows = self.protocol.rows
        return rows if isinstance(rows, RowsOnDisk) else None

    def keeping_record(self, path: Path, new: bool = False) -> Setup:
        """Return the same run with the record of who took part kept in this file, if its cohorts depend on it."""
        plan = self.protocol.plan
        if not isinstance(plan.sampler, Scheduled) or not plan.sampler.recorded:
            return self
        record = ParticipationRecord(path, plan.sampler.clients, plan.sampler.stream, new)
        return replace(self, protocol=replace(self.protocol, attendance=record))

    def keeping_rows(self, folder: Path, state: ServerState) -> Setup:
        """Return the same run with what stays on its clients kept in this folder.

        The state says with which row clients begin: a model that is made again may have other initial values.
        """
        personal = self.protocol.personal
        if personal is None:
            return self
        first = state.buffers[FIRST_ROW].cpu()
        personal = replace(personal, initial=first, rows=FirstRows(first))
        here = self.protocol.rows is not None
        rows = RowsOnDisk(folder, personal, self.protocol.plan.sampler.clients) if here else None
        return replace(self, protocol=replace(self.protocol, personal=personal, rows=rows))

    @property
    def protects(self) -> bool:
        """Whether this run's releases are private: noise, and nobody can repeat it."""
        return self.rng.private and self.protocol.plan.noise_multiplier > 0

    def remembered(self) -> dict[str, Any]:
        """Return what checkpoints remember, to refuse another ledger, training clients or frozen parameters."""
        remembered = {"ledger": self.protocol.ledger.anchor(), "roles": ROLES}
        if isinstance(self.protocol.attendance, ParticipationRecord):
            remembered["participation"] = self.protocol.attendance.anchor()
        return remembered | ({"constants": self.constants} if self.constants else {})

    @property
    def cautions(self) -> list[str]:
        """Return warnings for valid but suspicious configurations."""
        return cautions(self.protocol.plan, self.federation.train.clients, self.protocol.layout.total)


def prepare(
    config: Config,
    ledger: Path | None,
    machine: Machine,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    connect: Connect = simulate,
    canaries: int = 0,
    tell: Callable[[str], None] | None = None,
    trainable: Sequence[str] | None = None,
) -> Setup:
    """Check and build everything. `federation` and `module` replace what the configuration names.

    `ledger`: None for a process that releases nothing. `connect`: who sums the cohorts. `canaries`: clients that an
    audit adds to the population; they count like any other. `tell` hears of work that takes long. `trainable`: patterns
    of what is trained; None: what requires gradients.
    """
    device, rng = machine.torch_device(), make_rng(config.seed)
    named, half = module is None, machine.half(device)
    data, module, layout, initial = data_and_model(config, machine, federation, module, rng, trainable)
    if half and constants(module) and not isinstance(module, Fronted):  # which computes its constants in their own type
        if machine.precision == "bf16":
            raise ConfigError("precision='bf16' needs a model without frozen parameters and buffers; use fp32")
        half = False
    trained, data = computed_ahead(module, data, config.method, device, tell)
    shape, classes = data.train.shape, data.train.classes
    plan = plan_for(config, data.train.clients + canaries, layout.total)
    plan = plan if ledger is None else plan.in_stream(read_stream(ledger))
    if config.clipping is not None:
        config.clipping.vector_multiplier(plan.noise_multiplier, plan.expected_cohort)  # refuses before a round
    personal = Personal.of(module, layout, config.method)
    if personal is not None and not getattr(plan.sampler, "independent", False):  # which other people's samplers lack
        raise PrivacyError(
            f"sampling={config.sampling.part_name!r} does not go with what clients keep between rounds: what others "
            'remember would hint at who took part (docs/personal.md); use sampling = "poisson"'
        )
    forward = as_function(trained, half)
    if named and not constants(module):  # which differ with the seed
        forward = _forward(config.model, shape, width_of(config.task, data), half, device)
    start, message = layout.unflatten(initial), Message(config.bounding)
    job = ClientJob(
        forward, layout, start, config.local, config.method, config.clip_norm, message, config.task, personal
    )
    work = Work(job, trained, data.test, classes, plan.expected_cohort, config.rounds)
    private = rng.private and plan.noise_multiplier > 0
    own = own_parts(config, None if named else module)
    if ledger is not None:  # before anything is spent
        own = audited(own, config, plan, layout.total, rng.child("audit of own parts"))
    source = connect(Wanted(work, data, plan, device, "bf16" if half else "fp32", private, machine.engine))
    books = ForeignLedger() if ledger is None else ledger_of(config, plan, ledger, data, machine, canaries > 0, own)
    mechanism = begin_noise(mechanism_for(config, plan.sampler, layout.total), plan, rng, books)
    protocol = Protocol(
        plan=plan,
        sums=source.sums,
        mechanism=mechanism,
        server=config.server,
        averaging=config.averaging,
        ledger=books,
        forward=forward,
        layout=layout,
        local=config.local,
        methods=config.method,
        clip_norm=config.clip_norm,
        bounding=config.bounding,
        clipping=config.clipping,
        mask=config.mask,
        denoise=config.denoise,
        task=config.task,
        personal=personal,
        rows=RowsInMemory(personal.initial) if personal is not None and not data.remote else None,
        attendance=Attendance(plan.sampler.clients if isinstance(plan.sampler, Scheduled) else 0),
    )
    held, fixed = held_out(config, data), constants_digest(module)
    return Setup(config, data, module, initial, protocol, rng, held, source, fixed, own)


def data_and_model(
    config: Config,
    machine: Machine,
    federation: Federation | None,
    module: nn.Module | None,
    rng: Rng,
    trainable: Sequence[str] | None = None,
) -> tuple[Federation, nn.Module, Layout, Tensor]:
    """Return the data, and the model on its device with its layout and weights; refuse a model that does not fit.

    A `module` of the caller's is copied.
    """
    data, device = federation or load(config, machine), machine.torch_device()
    shape = data.train.shape
    check_fit(config, data, module is None)
    check_targets(config, data)
    width = width_of(config.task, data)
    named = functools.partial(make_model, config.model, shape, width, rng.child("init").seed())
    module = named() if module is None else copied(module)  # the caller's own stays: a second run starts there too
    if trainable:
        choose_trainable(module, trainable)
    data = as_read_by(module, data)
    check_task(config, data, check_reading(module, config.task, data))
    layout = shared_layout(module, config.personal)
    return data, for_training(module.to(device)), layout, initial_vector(module, layout).to(device)


def width_of(task: Task, data: Federation) -> int:
    """Return the number of outputs of a built-in model."""
    return task.width(tuple(data.test.y.shape[1:]), data.train.classes)


def check_reading(module: nn.Module, task: Task, data: Federation) -> Tensor:
    """Refuse a model that cannot be trained privately, or does not fit samples and targets; return what it outputs."""
    classes, zeros = data.train.classes, _zeros(data)
    outputs = check_model(module, data.train.shape, classes, zeros, task.shapes(tuple(data.test.y.shape[1:]), classes))
    for name, largest in _largest_tokens(data).items():
        tried = {**zeros, name: zeros[name] + largest} if isinstance(zeros, dict) else zeros + largest
        if not runs(module, tried):
            raise DataError(f"samples hold token {largest}{f' in {name}' if name else ''}, which the model cannot read")
    return outputs


def _zeros(data: Federation) -> Inputs:
    return as_input(each_input(data.test.x, lambda x: x.new_zeros(2, *x.shape[1:])))


def _largest_tokens(data: Federation) -> dict[str, int]:
    """Return the largest token of each input of whole numbers. A model that cannot read it is refused at the start."""
    found: dict[str, int] = {}
    for samples in (data.test, data.train):
        if isinstance(samples, Samples | Packed):
            inputs = samples.x if isinstance(samples.x, dict) else {"": samples.x}
            tokens = {name: x for name, x in inputs.items() if x.dtype in (torch.int64, torch.int32) and x.numel()}
            negative = next((name for name, x in tokens.items() if int(x.min()) < 0), None)
            if negative is not None:
                raise DataError(
                    f"samples hold whole numbers below 0{f' in {negative}' if negative else ''}: give floats"
                )
            found |= {name: max(found.get(name, 0), int(x.max())) for name, x in tokens.items()}
    return found


def as_read_by(module: nn.Module, data: Federation) -> Federation:
    """Return the data with whole numbers as floats where the model reads numbers; tokens stay for one that does not."""
    if isinstance(data.test.x, dict) or data.test.x.dtype not in (torch.int64, torch.int32):
        return data
    if not runs(module, torch.zeros(2, *data.train.shape)):
        return data
    floats = replace(data, test=replace(data.test, x=data.test.x.float()))
    if isinstance(data.train, Packed):
        floats = replace(floats, train=replace(data.train, x=each_input(data.train.x, Tensor.float)))
    if data.validation is not None:
        floats = replace(floats, validation=replace(data.validation, x=each_input(data.validation.x, Tensor.float)))
    return floats


def ledger_of(
    config: Config,
    plan: PrivacyPlan,
    path: Path,
    data: Federation,
    machine: Machine,
    audit: bool = False,
    own: tuple[OwnPart, ...] = (),
) -> Ledger:
    """Open a run's ledger for the budget of its plan. Its population must have room for all of it.

    `own`: parts that are not FedBlur's. A run with one that failed its audit counts as ε = ∞ wherever runs add up.
    """
    budget = Budget(plan.epsilon_target, plan.delta, config.accountant, plan.rounds)
    kind = "audit" if audit else "deployment" if data.remote else "voting" if config.voting is not None else "run"
    kind = "table cell" if kind == "run" and path.parent.name == config_hash(config) else kind
    paid = machine.paid_by is not None and covers(machine.paid_by, plan.event(), plan.rounds)
    reason = unclaimed(own)
    if reason is not None and machine.paid_by is not None:
        raise PrivacyError(f"a search cannot try settings that claim no ε: {reason}")
    randomness = randomness_of(config.seed, unaudited=reason is not None)
    account = None if paid else account_of(config.population, data, plan.event(), budget, kind, randomness)
    if account is not None and account.budgeted and config.evaluate == "validation":
        raise PrivacyError(
            f"evaluate='validation' measures people of population {account.population.name} without noise, and it "
            "has a budget; evaluate on test data, or choose settings with fedblur tune"
        )
    subject = Subject(
        config_digest(config), UNIT, plan.sampler.clients, plan.noise_multiplier, events.to_json(plan.event())
    )
    return Ledger(path, budget, config_hash(config), randomness, subject, account)


def begin_noise(mechanism: Mechanism, plan: PrivacyPlan, rng: Rng, ledger: Spending) -> Mechanism:
    """Return the mechanism of a run that begins or goes on: correlated noise has keys, and goes on where it was.

    A private run has them where its ledger is written: no other process adds noise. A step that was served before a
    kill, and not paid, is paid now.
    """
    if not isinstance(mechanism, CorrelatedNoise):
        return mechanism
    if not rng.private:
        return mechanism.started(SeededNoise(rng))
    if not isinstance(ledger, Ledger) or not plan.stream:
        return mechanism
    ledger.count_torn(plan.event())  # or it would be paid for twice, and be two releases
    paid = ledger.spends()
    if len(paid) >= plan.rounds:
        return mechanism  # it makes no release any more, and its keys may be gone
    key = NoiseKey.of(plan.stream, len(paid))
    for _ in range(len(paid), key.served):
        ledger.spend(max(round_ for round_, _ in paid) + 1 if paid else 1, plan.event(), replay=False)
    return mechanism.started(key)


@functools.lru_cache(maxsize=4)
def _forward(model: Any, shape: tuple[int, ...], classes: int, half: bool, device: torch.device) -> ModuleFunction:
    """Return a named model as a function, the same object in all runs of a process: they share compiled code.

    Its own weights are never read: a run's come as an argument.
    """
    return as_function(make_model(model, shape, classes, seed=0).to(device).train(), half)


def load(config: Config, machine: Machine) -> Federation:
    """Load the configuration's data set, divided into training clients, validation clients and test data."""
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
    """Refuse other roles than before: a run must not change whom it trains on. (Version 0.1 drew them at random.)"""
    if state.get("roles") != ROLES and (federation or load(config, machine)).by_id:
        raise RunError(
            "this run was begun by fedblur 0.1, which chose its training clients in another way; start a new run "
            "(on these clients it adds to the total)"
        )


def plan_for(config: Config, clients: int, parameters: int) -> PrivacyPlan:
    """Return the privacy plan over N clients and d parameters, with σ calibrated if ε is given."""
    sampler = config.sampling.sampler(clients, config.sample_rate)
    mechanism = mechanism_for(config, sampler, parameters)
    if config.clipping is not None and isinstance(mechanism.event(1.0), events.Correlated):
        raise ConfigError(
            f"clipping={config.clipping.part_name!r} does not go with mechanism={config.mechanism.part_name!r}: the "
            "noise of several rounds is tied together at one scale, so S must stay the same; drop clipping"
        )
    if config.mask is not None and isinstance(mechanism.event(1.0), events.Correlated):
        raise ConfigError(
            f"mask={config.mask.part_name!r} does not go with mechanism={config.mechanism.part_name!r}: a round sends "
            "other coordinates than the last one, and noise is taken off only where it was added; drop mask"
        )
    return make_plan(
        sampler,
        mechanism,
        rounds=config.rounds,
        delta=config.delta,
        accountant=config.accountant,
        epsilon=config.epsilon,
        noise_multiplier=config.noise_multiplier,
    )


def held_out(config: Config, data: Federation) -> Samples:
    """Return what accuracy is measured on: test data or validation clients, never both."""
    if config.evaluate == "test":
        return data.test
    if data.validation is None:
        share = config.validation_share
        raise ConfigError(
            f"evaluate='validation' but these data have no validation clients; raise validation_share={share:g}: each "
            "natural client is drawn on its own (data of your own: federation_from_arrays(…, validation_share=0.1))"
        )
    return data.validation
