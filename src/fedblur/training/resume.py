"""Resume: continue a stopped or killed run from its last whole checkpoint.

In: a run folder. Out: the same Run as if it had never stopped, to the byte where it is seeded. Rounds that are repeated
are paid again unless they are seeded; a configuration, ledger or clients' roles that changed are an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from fedblur.core.callbacks import Examine, Watcher, with_header
from fedblur.core.config import differences
from fedblur.core.errors import PrivacyError, RunError
from fedblur.core.files import remove
from fedblur.data.population import Federation
from fedblur.engines.cohort_sum import Connect
from fedblur.engines.distributed import demand_one_process
from fedblur.learning.tasks import Loss
from fedblur.privacy.ledger_file import demand_anchor
from fedblur.training.checkpoint import load_newest
from fedblur.training.checks import check_arguments
from fedblur.training.loop import Run, assist, config_of, connected, dismiss, greet, run_loop, trainable_of
from fedblur.training.machine import Machine
from fedblur.training.participation_record import ParticipationRecord
from fedblur.training.run_folder import RunFolder
from fedblur.training.server import FIRST_ROW, ServerState
from fedblur.training.setup import Setup, demand_same_roles, prepare


def resume(
    path: str | Path,
    *,
    machine: Machine | None = None,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    watch: Watcher | None = None,
    tell: Callable[[str], None] = print,
    connect: Connect | None = None,
    loss: Loss | None = None,
    on_evaluate: Examine | None = None,
) -> Run:
    """Continue a run from its last whole checkpoint. `tell` hears what had to be repaired."""
    check_arguments(None, machine, federation, module, None, loss, on_evaluate)
    machine = machine or Machine()
    folder = RunFolder(path := Path(path))
    with connected(machine, connect) as ranks:
        if ranks.rank:
            return assist(ranks, machine, federation, module, loss)
        folder.demand_begun()  # or an error: no folder is made here
        with folder.held():
            resolved = folder.resolved()
            checkpoint, notes = load_newest(folder.checkpoints)
            changed = differences(checkpoint.state["config"], resolved)
            if changed:
                what = "; ".join(changed)
                raise RunError(f"the configuration of {path} was changed ({what}); put it back or start a new run")
            with folder.reading():
                config = config_of(resolved, federation, module, loss)
            demand_anchor(folder.ledger, checkpoint.state.get("ledger"), f"the checkpoint of round {checkpoint.round}")
            demand_same_roles(checkpoint.state, config, machine, federation)
            for note in notes:
                tell(note)
            if config.voting is not None:
                demand_one_process(f"method {config.voting.part_name!r}")
                run: Run = config.voting.run(config, folder, resolved, machine, federation, module, watch, new=False)
                return run
            greet(ranks, folder, resolved)
            machine, connect = machine.as_recorded(folder), connect or ranks.connect
            setup = prepare(
                config, folder.ledger, machine, federation, module, connect, tell=tell,
                trainable=trainable_of(resolved),
            )  # fmt: skip
            if checkpoint.state.get("constants", setup.constants) != setup.constants:
                raise RunError(
                    f"the frozen parameters and buffers of this model are not those that {path} was started with; give "
                    "the same weights (a frozen part that is drawn at random needs a seed of its own)"
                )
            tensors = {name: tensor.to(setup.initial.device) for name, tensor in checkpoint.tensors.items()}
            if tensors["theta"].shape != setup.initial.shape:
                found, wanted = tensors["theta"].numel(), setup.initial.numel()
                raise RunError(f"the checkpoint of {path} has {found} parameters, the model {wanted}")
            state = ServerState.from_tensors(tensors, checkpoint.round)
            _demand_budget(folder, setup, state)
            setup = setup.keeping_record(folder.participation)
            record = setup.protocol.attendance
            if isinstance(record, ParticipationRecord):
                record.demand_anchor(checkpoint.state.get("participation"), f"the checkpoint of round {state.round}")
                record.demand_agreement(folder.ledger)
            if folder.model_round() <= state.round and state.round < config.rounds:
                remove(folder.summary)  # of what was there when the run stopped; wrong from now on
            if setup.protocol.personal is not None and FIRST_ROW not in state.buffers:
                raise RunError(f"the checkpoint of {path} has no initial personal parameters; restore it from a copy")
            setup = setup.keeping_rows(folder.personal, state)
            if setup.rows is not None:
                setup.rows.restore(state.round)
            rows = folder.truncate_rounds(state.round)
            watch = with_header(setup.header, tell, watch)
            return dismiss(ranks, setup, run_loop(folder, setup, state, resolved, rows, watch, on_evaluate))


def _demand_budget(folder: RunFolder, setup: Setup, state: ServerState) -> None:
    """Refuse a run that has rounds left and no budget for them, before anything of it is written."""
    if state.round == setup.config.rounds:
        return
    plan, kept = setup.protocol.plan, folder.model_round()
    try:
        setup.protocol.ledger.demand_room(state.round + 1, plan.event(), replay=not setup.rng.private)
    except PrivacyError as error:
        later = f"; the model of round {kept} is kept" if kept > state.round else ""
        raise PrivacyError(f"the last whole checkpoint is of round {state.round}, but {error}{later}") from None
