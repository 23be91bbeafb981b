"""The loop: rounds, evaluation, checkpoints, resume. In: a configuration. Out: a run folder and a Run.

What is written after each round has been paid for in the ledger first. A run that is killed at any moment goes on from
its last checkpoint; with a seed it ends with the same bytes as one that was never killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import nn

from fedblur.arguments import check_arguments
from fedblur.cautions import note_divergence
from fedblur.checkpoint import Checkpoint, load_newest, save_checkpoint, write_atomically
from fedblur.config import Config, canonical, differences, from_dict, to_dict
from fedblur.data.population import Federation
from fedblur.engines import Processes, suitable_threads
from fedblur.engines.distributed import Ranks, demand_one_process, together
from fedblur.errors import DivergedError, LostRankError, PrivacyError, RoundAborted, RunError
from fedblur.functional import initial_vector, load_vector
from fedblur.ledger import demand_anchor
from fedblur.measuring import measure, measure_fairness
from fedblur.round import client_job, run_round, sum_clients
from fedblur.runfolder import RunFolder, default_folder
from fedblur.server import ServerState, published
from fedblur.setup import Machine, Setup, demand_same_roles, prepare
from fedblur.summary import summarise
from fedblur.watching import Row, Watcher, with_header

__all__ = ["Row", "Run", "Watcher", "resume", "train"]


@dataclass(frozen=True)
class Run:
    """A finished run."""

    path: Path
    summary: dict[str, Any]
    module: nn.Module  # with the trained weights
    rounds: list[Row]

    @property
    def accuracy(self) -> float:
        """Of the final round, never of the best one."""
        return float(self.summary["accuracy"])

    @property
    def loss(self) -> float:
        """Mean cross-entropy of the final round, in nats."""
        return float(self.summary["loss"])

    @property
    def epsilon(self) -> float:
        return float(self.summary["privacy"]["epsilon"])


def train(
    config: Config | None = None,
    *,
    out: str | Path | None = None,
    machine: Machine | None = None,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    watch: Watcher | None = None,
    tell: Callable[[str], None] | None = None,
    nodes: Processes | None = None,
) -> Run:
    """Run a configuration from the start. `federation` and `module` bring your own data and model; `tell` hears which
    engine computes it and why.

    Under torchrun, call it on every rank: rank 0's configuration and folder count, and all get the same Run. `nodes`
    are the clients of a real federation (`engines/flower`).
    """
    check_arguments(config, machine, federation, module)
    config, machine = config or Config(), machine or Machine()
    if nodes is not None:
        folder = RunFolder(Path(out or default_folder(config, federation)))
        with folder.held():
            return _begin(config, folder, machine, federation, module, watch, tell, nodes)
    with together(machine.torch_device, machine.rank_timeout) as ranks:
        if ranks is not None and ranks.rank:
            return _assist(ranks, machine, federation, module)
        folder = RunFolder(Path(out) if out is not None else default_folder(config, federation))
        with folder.held():
            return _begin(config, folder, machine, federation, module, watch, tell, ranks)


def _begin(
    config: Config,
    folder: RunFolder,
    machine: Machine,
    federation: Federation | None,
    module: nn.Module | None,
    watch: Watcher | None,
    tell: Callable[[str], None] | None,
    processes: Processes | None,
) -> Run:
    resolved = _resolved(config, federation, module)
    if config.voting is not None:
        demand_one_process(f"method {config.voting.part_name!r}")
    folder.begin(resolved)
    if config.voting is not None:
        from fedblur.voting.protocol import run_election  # which imports this file

        return run_election(config, folder, resolved, machine, federation, module, watch, new=True)
    try:
        _greet(processes, folder, resolved)
        setup = prepare(config, folder.ledger, machine, federation, module, processes, tell=tell)
        folder.record_engine(setup.choice.kind, setup.initial.device.type, setup.machine)
    except BaseException:
        folder.abandon()  # nothing was released: leave no half-made run behind
        raise
    if tell is not None:
        for line in (setup.header, *(f"caution: {caution}" for caution in setup.cautions)):
            tell(line)
    state = setup.protocol.server.init(setup.initial)
    if config.averaging is not None:
        state = config.averaging.init(state)
    _save(folder, setup, state, resolved)
    return _dismiss(processes, setup, _loop(folder, setup, state, resolved, [], watch))


def resume(
    path: str | Path,
    *,
    machine: Machine | None = None,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    watch: Watcher | None = None,
    tell: Callable[[str], None] = print,
    nodes: Processes | None = None,
) -> Run:
    """Go on with a run from its last whole checkpoint. `tell` hears what had to be mended."""
    check_arguments(None, machine, federation, module)
    machine = machine or Machine()
    folder = RunFolder(Path(path))
    if nodes is not None:
        with _held(folder):
            return _go_on(folder, machine, federation, module, watch, tell, nodes)
    with together(machine.torch_device, machine.rank_timeout) as ranks:
        if ranks is not None and ranks.rank:
            return _assist(ranks, machine, federation, module)
        with _held(folder):
            return _go_on(folder, machine, federation, module, watch, tell, ranks)


def _held(folder: RunFolder) -> AbstractContextManager[None]:
    folder.resolved()  # a folder of a run, or an error: none is made here
    return folder.held()


def _go_on(
    folder: RunFolder,
    machine: Machine,
    federation: Federation | None,
    module: nn.Module | None,
    watch: Watcher | None,
    tell: Callable[[str], None],
    processes: Processes | None,
) -> Run:
    path = folder.path
    resolved = folder.resolved()
    checkpoint, notes = load_newest(folder.checkpoints)
    changed = differences(checkpoint.state["config"], resolved)
    if changed:
        raise RunError(
            f"the configuration of {path} was changed ({'; '.join(changed)}); put it back or start a new run"
        )
    with folder.reading():
        config = _config_of(resolved, federation, module)
    demand_anchor(folder.ledger, checkpoint.state.get("ledger"), f"the checkpoint of round {checkpoint.round}")
    demand_same_roles(checkpoint.state, config, machine, federation)
    for note in notes:
        tell(note)
    if config.voting is not None:
        demand_one_process(f"method {config.voting.part_name!r}")
        from fedblur.voting.protocol import run_election  # which imports this file

        return run_election(config, folder, resolved, machine, federation, module, watch, new=False)
    _greet(processes, folder, resolved)
    setup = prepare(config, folder.ledger, machine.as_recorded(folder), federation, module, processes, tell=tell)
    tensors = {name: tensor.to(setup.initial.device) for name, tensor in checkpoint.tensors.items()}
    if tensors["theta"].shape != setup.initial.shape:
        raise RunError(
            f"the checkpoint of {path} has {tensors['theta'].numel()} parameters, the model {setup.initial.numel()}"
        )
    state = ServerState.from_tensors(tensors, checkpoint.round)
    rows = folder.truncate_rounds(checkpoint.round)
    folder.summary.unlink(missing_ok=True)  # of what was there when the run stopped; it would be wrong from now on
    return _dismiss(
        processes, setup, _loop(folder, setup, state, resolved, rows, with_header(setup.header, tell, watch))
    )


def _greet(processes: Processes | None, folder: RunFolder, resolved: dict[str, Any]) -> None:
    """Tell the other ranks what this run is."""
    if isinstance(processes, Ranks):
        processes.path = str(folder.path)
        processes.tell((processes.path, resolved))


def _dismiss(processes: Processes | None, setup: Setup, run: Run) -> Run:
    """Tell the other ranks that the run is complete, and its result."""
    if isinstance(processes, Ranks):
        processes.tell(None)
        processes.tell((run.summary, run.rounds, initial_vector(setup.module).cpu()))
    return run


def _assist(ranks: Ranks, machine: Machine, federation: Federation | None, module: nn.Module | None) -> Run:
    """What ranks above 0 do: sum their part of each cohort until rank 0 says that it is over. They decide nothing."""
    ranks.path, resolved = ranks.tell()
    config = _config_of(resolved, federation, module)
    setup = prepare(config, RunFolder(Path(ranks.path)).ledger, machine, federation, module, ranks)
    protocol = setup.protocol
    job = client_job(protocol, protocol.server.init(setup.initial))
    with suitable_threads(setup.initial.device, protocol.layout.total):
        while (task := ranks.hear(job)) is not None:
            rng = setup.rng.child("round", task.release.round_)
            with suppress(RoundAborted):  # as rank 0 does, which writes it down
                ranks.collect(*sum_clients(protocol, task, rng), task.release)
    summary, rows, vector = ranks.tell()
    load_vector(setup.module, vector.to(setup.initial.device))
    return Run(Path(ranks.path), summary, setup.module.eval(), rows)


def _config_of(resolved: dict[str, Any], federation: Federation | None, module: nn.Module | None) -> Config:
    _demand_own_parts(resolved, federation, module)
    return from_dict({key: value for key, value in resolved.items() if key != "own"})


def _loop(
    folder: RunFolder,
    setup: Setup,
    state: ServerState,
    resolved: dict[str, Any],
    rows: list[Row],
    watch: Watcher | None,
) -> Run:
    config, saved = setup.config, state.round
    try:
        with suitable_threads(state.theta.device, setup.protocol.layout.total):
            while state.round < config.rounds:
                began = time.perf_counter()
                result = run_round(setup.protocol, state, setup.rng.child("round", state.round + 1))
                state = result.state
                rows.append(_row(setup, state, result.local_only, began))
                diverged = note_divergence(rows[-1], config, setup.protects)
                folder.append_round(rows[-1])
                if state.round % config.checkpoint_every == 0 or state.round == config.rounds:
                    _save(folder, setup, state, resolved)
                    saved = state.round
                if watch is not None:
                    watch(rows[-1])
                if diverged and not setup.protects:
                    raise DivergedError(diverged)
    except (PrivacyError, DivergedError, LostRankError, KeyboardInterrupt):  # keep what has been paid for
        if state.round > saved:
            _save(folder, setup, state, resolved)
        _finish(folder, setup, state, rows)
        raise
    return _finish(folder, setup, state, rows)


def _row(setup: Setup, state: ServerState, local_only: dict[str, Any], began: float) -> Row:
    config = setup.config
    row: Row = {"round": state.round, "epsilon": None, "accuracy": None, "loss": None}
    if state.round % config.eval_rounds() == 0 or state.round in (1, config.rounds):
        row["epsilon"] = _paid(setup, state.round)
        row["accuracy"], row["loss"] = measure(setup, state)
    row["seconds"] = round(time.perf_counter() - began, 4)
    row["local_only"] = local_only
    if state.round == config.rounds:
        row["local_only"] |= measure_fairness(setup, state)
    return row


def _paid(setup: Setup, round_: int) -> float:
    """ε up to here. Rounds that a private run repeated were paid twice; a seeded one repeats the very same releases."""
    return setup.protocol.ledger.epsilon() if setup.rng.private else setup.protocol.plan.epsilon(round_)


def _finish(folder: RunFolder, setup: Setup, state: ServerState, rows: list[Row]) -> Run:
    vector = published(state, setup.config.averaging).cpu()
    tensors = {name: tensor.contiguous() for name, tensor in setup.protocol.layout.unflatten(vector).items()}
    write_atomically(folder.model, save({name: tensor.clone() for name, tensor in tensors.items()}))
    summary = summarise(setup, state, rows, *measure(setup, state))
    folder.write_summary(summary)
    load_vector(setup.module, vector.to(setup.initial.device))
    return Run(folder.path, summary, setup.module.eval(), rows)


def _save(folder: RunFolder, setup: Setup, state: ServerState, resolved: dict[str, Any]) -> None:
    about = {"config": resolved, **setup.remembered()}
    save_checkpoint(folder.checkpoints, Checkpoint(state.round, state.tensors(), about))


def _resolved(config: Config, federation: Federation | None, module: nn.Module | None) -> dict[str, Any]:
    """The configuration as JSON gives it back, with a word on what came from Python."""
    own = {"data": federation and federation.name, "model": module and type(module).__name__}
    table: dict[str, Any] = json.loads(canonical(to_dict(config)))
    return table | ({"own": own} if any(own.values()) else {})


def _demand_own_parts(resolved: dict[str, Any], federation: Federation | None, module: nn.Module | None) -> None:
    own = resolved.get("own", {})
    for what, given in (("data", federation), ("model", module)):
        if own.get(what) and given is None:
            raise RunError(
                f"this run was started from Python with its own {what} ({own[what]}); "
                "resume it from Python: fedblur.resume(path, federation=..., module=...)"
            )
