"""The loop: rounds, evaluation, checkpoints. In: a configuration. Out: a run folder and a Run. See also `resume.py`.

What is written after each round has been paid for in the ledger first. A run that is killed at any moment goes on from
its last checkpoint; with a seed it ends with the same bytes as one that was never killed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedblur.core.callbacks import SAVED, Examine, Row, Watcher, examined, figures_of
from fedblur.core.config import Config, canonical, from_dict, to_dict
from fedblur.core.errors import (
    ConfigError,
    DivergedError,
    LostRankError,
    OwnFunctionError,
    PrivacyError,
    RoundAborted,
    RunError,
    TimeIsUp,
)
from fedblur.data.population import Federation
from fedblur.engines import suitable_threads
from fedblur.engines.cohort_sum import Connect
from fedblur.engines.distributed import Ranks, demand_one_process, together
from fedblur.learning.evaluation import Measured, fairness, measure
from fedblur.learning.module_function import Layout, Params, copied, initial_vector, load_vector
from fedblur.learning.personal_evaluation import measure_personal
from fedblur.learning.tasks import Classification, Loss, Own, OwnLoss
from fedblur.privacy.claim import to_json, unclaimed
from fedblur.privacy.mechanisms.correlated import CorrelatedNoise
from fedblur.training.checkpoint import Checkpoint, rounds_kept, save_checkpoint
from fedblur.training.checks import check_arguments, note_divergence
from fedblur.training.client_rows import read_personal
from fedblur.training.machine import Machine
from fedblur.training.noise_planning import settled
from fedblur.training.round import client_job, run_round
from fedblur.training.run_folder import RunFolder, RunSummary, default_folder
from fedblur.training.server import FIRST_ROW, ServerState, published
from fedblur.training.setup import Setup, prepare
from fedblur.training.summary import summarise

__all__ = ["Row", "Run", "Watcher", "train"]


@dataclass(frozen=True, repr=False)
class Run:
    """A run that ended."""

    path: Path  # its folder
    record: RunSummary  # its summary: metrics, the privacy claim
    module: nn.Module  # with the trained weights
    rounds: list[Row]  # what each round reported

    def __repr__(self) -> str:
        """Return one line for notebooks: what was measured and what is claimed, nothing that is local only."""
        figures = "".join(f", {name}={value:.4g}" for name, value in self.metrics.items())
        warning = self.record.privacy.warning
        return f"Run({str(self.path)!r}{figures}, epsilon={self.epsilon:.4g}{f', {warning}' if warning else ''})"

    @property
    def accuracy(self) -> float:
        """The accuracy of the final round, never of the best one. Other metrics are in `metrics`."""
        if self.record.accuracy is None:
            raise RunError(f"this run measured {', '.join(self.metrics)}, not accuracy: read run.metrics")
        return self.record.accuracy

    @property
    def metrics(self) -> dict[str, float]:
        """Every metric of the final round, the headline first."""
        return self.record.metrics

    @property
    def loss(self) -> float:
        """The mean loss of the final round; of a classifier its cross-entropy in nats."""
        return self.record.loss

    @property
    def personal_figures(self) -> dict[str, float | None]:
        """The metrics and loss of clients' own models on their own held-out samples. Local only: no ε covers them."""
        found = self.record.local_only.items()
        return {name.removeprefix("personal_"): value for name, value in found if name.startswith("personal_")}

    @property
    def epsilon(self) -> float:
        """The ε that the run spent, under its accountant."""
        return self.record.privacy.epsilon

    def personal(self, client: int) -> nn.Module:
        """Return a client's own model: the trained weights, and its personal parameters as this run kept them.

        It is for that client alone (docs/personal.md). A client that never trained has the initial ones, as `module`.
        """
        kept = RunFolder(self.path).personal
        if not kept.exists():
            raise RunError(f"{self.path} keeps no personal parameters: its configuration has none, or its clients do")
        module = copied(self.module)
        own = read_personal(kept, client)
        if own is not None:
            layout, tensors = Layout.of(module), dict(module.named_parameters())
            load_vector(module, layout.flatten({**tensors, **own}))
        return module

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json; `record` is the same with types."""
        return to_json(self.record)


def train(
    config: Config | None = None,
    *,
    out: str | Path | None = None,
    machine: Machine | None = None,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    trainable: Sequence[str] | None = None,
    watch: Watcher | None = None,
    tell: Callable[[str], None] | None = None,
    connect: Connect | None = None,
    loss: Loss | None = None,
    on_evaluate: Examine | None = None,
) -> Run:
    """Run a configuration from the start. `federation` and `module` bring your own data and model. The run trains a
    copy of the module, `Run.module`. `trainable`: patterns of parameters' names (`["*.lora_*", "head.*"]`); all others
    are frozen. `tell` hears which engine computes it and why.

    `loss`: (outputs, targets) -> [samples], a task of your own. `on_evaluate` gets the model whenever it is evaluated
    and returns figures that join the metrics, {"name": number}; what it reads must be as public as the metrics.

    Under torchrun, call it on every rank: rank 0's configuration and folder count, and all get the same Run. `connect`
    names who sums the cohorts instead of this process (`flower/nodes.py`).
    """
    check_arguments(config, machine, federation, module, trainable, loss, on_evaluate)
    config, machine = settled(with_loss(config or Config(), loss)), machine or Machine()
    with connected(machine, connect) as ranks:
        if ranks.rank:
            return assist(ranks, machine, federation, module, loss)
        folder = RunFolder(Path(out) if out is not None else default_folder(config, federation))
        with folder.held():
            own: dict[str, Any] = {  # from Python
                "data": federation and federation.name,
                "model": module and type(module).__name__,
            }
            own |= {"trainable": list(trainable)} if trainable else {}
            if federation is not None and federation.population:
                own["population"] = federation.population
            resolved: dict[str, Any] = json.loads(canonical(to_dict(config)))
            resolved |= {"own": own} if any(own.values()) else {}
            if config.voting is not None:
                demand_one_process(f"method {config.voting.part_name!r}")
            folder.begin(resolved)
            if config.voting is not None:
                run: Run = config.voting.run(config, folder, resolved, machine, federation, module, watch, new=True)
                return run
            try:
                greet(ranks, folder, resolved)
                setup = prepare(
                    config, folder.ledger, machine, federation, module, connect or ranks.connect, tell=tell,
                    trainable=trainable,
                )  # fmt: skip
                folder.record_engine(setup.source.choice.kind, setup.initial.device.type, setup.source.machine)
            except BaseException:
                folder.abandon()  # nothing was released: leave no half-made run behind
                raise
            if tell is not None:
                foreign = (f"not FedBlur's: {part.told}" for part in setup.own_parts)
                for line in (setup.header, *(f"caution: {caution}" for caution in setup.cautions), *foreign):
                    tell(line)
            state = setup.protocol.server.init(setup.initial)
            if config.averaging is not None:
                state = config.averaging.init(state)
            if setup.protocol.personal is not None:
                state = replace(state, buffers={**state.buffers, FIRST_ROW: setup.protocol.personal.initial})
            setup = setup.keeping_rows(folder.personal, state)
            if setup.rows is not None:
                setup.rows.begin()
            setup = setup.keeping_record(folder.participation, new=True)
            _save(folder, setup, state, resolved)
            return dismiss(ranks, setup, run_loop(folder, setup, state, resolved, [], watch, on_evaluate))


def connected(machine: Machine, connect: Connect | None) -> AbstractContextManager[Ranks]:
    """Connect what torchrun started, unless others sum the cohorts: then this process leads alone."""
    return nullcontext(Ranks.alone()) if connect else together(machine.torch_device, machine.rank_timeout)


def greet(ranks: Ranks, folder: RunFolder, resolved: dict[str, Any]) -> None:
    """Tell the other ranks what this run is."""
    ranks.path = str(folder.path)
    ranks.tell((ranks.path, resolved))


def dismiss(ranks: Ranks, setup: Setup, run: Run) -> Run:
    """Tell the other ranks that the run is complete, and its result."""
    ranks.tell(None)
    ranks.tell((run.record, run.rounds, initial_vector(setup.module).cpu()))
    return run


def assist(
    ranks: Ranks,
    machine: Machine,
    federation: Federation | None,
    module: nn.Module | None,
    loss: Loss | None = None,
) -> Run:
    """Sum a rank's part of each cohort until rank 0 says that the run is over. Ranks above 0 decide nothing."""
    ranks.path, resolved = ranks.tell()
    config = config_of(resolved, federation, module, loss)
    setup = prepare(config, None, machine, federation, module, ranks.connect, trainable=trainable_of(resolved))
    protocol = setup.protocol
    job = client_job(protocol, protocol.server.init(setup.initial))
    with suitable_threads(setup.initial.device, protocol.layout.total):
        while (task := ranks.hear(job, protocol.mechanism)) is not None:
            rng = setup.rng.child("round", task.release.round_)
            with suppress(RoundAborted):  # as rank 0 does, which writes it down
                ranks.add_up(task, rng)
    record, rows, vector = ranks.tell()
    load_vector(setup.module, vector.to(setup.initial.device))
    return Run(Path(ranks.path), record, setup.module.eval(), rows)


def trainable_of(resolved: dict[str, Any]) -> list[str] | None:
    """Return the patterns of what a run trains; None: what requires gradients."""
    patterns: list[str] | None = resolved.get("own", {}).get("trainable")
    return patterns


def config_of(
    resolved: dict[str, Any], federation: Federation | None, module: nn.Module | None, loss: Loss | None = None
) -> Config:
    """Read a run's configuration back; what came from Python must be given again."""
    own = dict(resolved.get("own", {}))
    task = resolved.get("task") or {}
    own["loss"] = task.get("function") if task.get("name") == Own.part_name else None
    for what, given in (("data", federation), ("model", module), ("loss", loss)):
        if own.get(what) and given is None:
            raise RunError(
                f"this run was started from Python with its own {what} ({own[what]}); "
                "resume it from Python: fedblur.resume(path, federation=..., module=..., loss=...)"
            )
    people = federation.population if federation is not None else None
    if own.get("population", people) != people:
        raise RunError(
            f"this run is charged to population {own['population']!r}, and these data are of {people!r}; give the data "
            "with which it was started"
        )
    config = from_dict({key: value for key, value in resolved.items() if key != "own"})
    return with_loss(config, loss)


def with_loss(config: Config, loss: Loss | None) -> Config:
    """Return the configuration with a loss from Python as its task."""
    if loss is None:
        return config
    task, found = OwnLoss(loss), config.task
    if found not in (Classification(), Own(), Own(task.function)) and found != task:
        name = found.function if isinstance(found, Own) else found.part_name
        raise ConfigError(f"loss={task.function} is given, but the task is {name!r}; keep one of them")
    return replace(config, task=task)


def run_loop(
    folder: RunFolder,
    setup: Setup,
    state: ServerState,
    resolved: dict[str, Any],
    rows: list[Row],
    watch: Watcher | None,
    on_evaluate: Examine | None = None,
) -> Run:
    config, saved, began_at = setup.config, state.round, state.round
    try:
        with suitable_threads(state.theta.device, setup.protocol.layout.total):
            while state.round < config.rounds:
                began = time.perf_counter()
                result = run_round(setup.protocol, state, setup.rng.child("round", state.round + 1))
                state = result.state
                try:
                    rows.append(_row(setup, state, result.local_only, began, on_evaluate))
                except OwnFunctionError:
                    folder.append_round(_row(setup, state, result.local_only, began, None))
                    raise
                diverged = note_divergence(rows[-1], config, setup.protects)
                folder.append_round(rows[-1])
                if state.round % config.checkpoint_every == 0 or state.round == config.rounds:
                    _save(folder, setup, state, resolved)
                    saved = state.round
                if watch is not None:
                    watch(rows[-1])
                if diverged and not setup.protects:
                    raise DivergedError(diverged)
    except (PrivacyError, DivergedError, LostRankError, OwnFunctionError, TimeIsUp, KeyboardInterrupt) as reason:
        if state.round > saved:  # keep what has been paid for
            _save(folder, setup, state, resolved)
        if state.round > began_at or not folder.summary.exists():
            _finish(folder, setup, state, rows)
        reason.add_note(f"{SAVED} in {folder.path}")
        raise
    return _finish(folder, setup, state, rows)


def _row(
    setup: Setup, state: ServerState, local_only: dict[str, Any], began: float, on_evaluate: Examine | None
) -> Row:
    config = setup.config
    epsilon = measured = None
    if state.round % config.eval_rounds() == 0 or state.round in (1, config.rounds):
        # A private run paid twice for repeated rounds; a seeded one repeats the same releases.
        ledger, plan = setup.protocol.ledger, setup.protocol.plan
        epsilon = ledger.epsilon() if setup.rng.private else plan.epsilon(state.round)
        epsilon = epsilon if unclaimed(setup.own_parts) is None else math.inf
        measured = held_out_figures(setup, published(state, config.averaging), on_evaluate)
        local_only = local_only | personal_figures(setup, state)
    figures: dict[str, Any] = {}
    names = [metric.key for metric in setup.metrics]
    if "accuracy" in names:
        figures["accuracy"] = measured and measured.figures["accuracy"]
    if names != ["accuracy"] or on_evaluate is not None:
        figures["figures"] = measured and measured.figures
    row: Row = {
        "round": state.round, "epsilon": epsilon, **figures, "loss": measured and measured.loss,  # type: ignore[typeddict-item]
        "seconds": round(time.perf_counter() - began, 4), "local_only": local_only,
    }  # fmt: skip
    if state.round == config.rounds and not setup.federation.remote:  # whose clients' data stay on their own machines
        model = whole_model(setup, published(state, config.averaging))
        row["local_only"] |= fairness(
            setup.protocol.forward, model, setup.federation, setup.held_out, config.method, config.test_views,
            setup.protocol.task, setup.metrics[0],
        )  # fmt: skip
    return row


def whole_model(setup: Setup, vector: Tensor) -> Params:
    """Return the released vector as tensors; personal parameters are those of a client that never trained."""
    personal = setup.protocol.personal
    first = {} if personal is None else personal.first()
    return setup.protocol.layout.unflatten(vector) | {name: tensor.to(vector.device) for name, tensor in first.items()}


def held_out_figures(setup: Setup, vector: Tensor, on_evaluate: Examine | None = None) -> Measured:
    """Measure metrics and loss of a model on held-out data, and what a function of the user's finds."""
    config, protocol = setup.config, setup.protocol
    measured = measure(
        protocol.forward, whole_model(setup, vector), setup.held_out, protocol.task, setup.metrics, config.method,
        config.test_views,
    )  # fmt: skip
    if on_evaluate is None:
        return measured
    model = copied(setup.module)  # the user may change it as they like
    load_vector(model, Layout.of(model).flatten(whole_model(setup, vector)))
    with torch.no_grad():
        found = examined(on_evaluate, model.eval(), measured.figures)
    return measured._replace(figures=measured.figures | found)


def personal_figures(setup: Setup, state: ServerState) -> dict[str, float | None]:
    """Measure clients' own models on their own held-out samples; nothing where there are none. No noise covers it."""
    config, rows = setup.config, setup.rows
    if rows is None or config.evaluate != "test":
        return {}
    job = client_job(setup.protocol, state)
    job = replace(job, start=setup.protocol.layout.unflatten(published(state, config.averaging)))
    rows.settle(state.round)
    vectorise = setup.source.choice.kind == "vectorised"
    rng = setup.rng.child("personal evaluation", state.round)
    found = measure_personal(job, rows.read, setup.federation, setup.metrics, config.personal_steps, rng, vectorise)
    figures = {} if found is None else {**found.figures, "loss": found.loss}
    return {f"personal_{name}": value if math.isfinite(value) else None for name, value in figures.items()}


def _finish(folder: RunFolder, setup: Setup, state: ServerState, rows: list[Row]) -> Run:
    """Write the model and the summary.

    A run that fell back to an older checkpoint and stopped on its way keeps the later model, and its figures: only what
    was spent is written again.
    """
    layout, vector, round_ = setup.protocol.layout, published(state, setup.config.averaging), state.round
    personal = () if setup.protocol.personal is None else setup.protocol.personal.parameters
    if not folder.write_model(layout.unflatten(vector.cpu()), round_, personal):
        round_, vector = folder.model_round(), layout.flatten(folder.read_model()).to(vector.device)
    if state.round == setup.config.rounds:
        setup.protocol.ledger.settle()
    measured = held_out_figures(setup, vector)
    if rows and rows[-1]["round"] == round_:  # with what the user's function found
        measured = measured._replace(figures=figures_of(rows[-1]) | measured.figures)
    record = summarise(setup, state, round_, rows, measured)
    if round_ == state.round:
        record = replace(record, local_only=record.local_only | personal_figures(setup, state))
    folder.write_summary(record)
    if state.round == setup.config.rounds and isinstance(setup.protocol.mechanism, CorrelatedNoise):
        setup.protocol.mechanism.ended()
    load_vector(setup.module, Layout.of(setup.module).flatten(whole_model(setup, vector.to(setup.initial.device))))
    return Run(folder.path, record, setup.module.eval(), rows)


def _save(folder: RunFolder, setup: Setup, state: ServerState, resolved: dict[str, Any]) -> None:
    about = {"config": resolved, **setup.remembered()}
    if setup.rows is not None:
        setup.rows.settle(state.round)
    save_checkpoint(folder.checkpoints, Checkpoint(state.round, state.tensors(), about))
    if setup.rows is not None:
        setup.rows.checkpointed(state.round, rounds_kept(folder.checkpoints)[-1])
