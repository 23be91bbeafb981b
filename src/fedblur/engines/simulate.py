"""The simulation of a run's clients in this process: an engine, chosen, made, and checked for private runs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedblur.core.errors import ModelError, PrivacyError
from fedblur.engines.choice import Choice, activation_bytes, choose_engine
from fedblur.engines.cohort_sum import Simulated, Source, Wanted
from fedblur.engines.isolation_check import cannot_map, clients_interfere
from fedblur.engines.local import LocalEngine
from fedblur.engines.timing import timed_choice

if TYPE_CHECKING:
    from fedblur.engines.workers import WorkerEngine


def simulate(wanted: Wanted) -> Source:
    """Return the sums of one process that simulates all clients."""
    return simulate_part(wanted, choose(wanted))


def choose(wanted: Wanted) -> Choice:
    """Return the engine that was asked for, or the one that suits; one by one where `vmap` refuses the model."""
    work = wanted.work
    choice = timed_choice(work, wanted.device) if wanted.engine == "auto" else Choice(wanted.engine)
    why = cannot_map(work.job, work.like, work.classes, wanted.device) if choice.kind == "vectorised" else ""
    if why and wanted.engine != "auto":
        raise ModelError(f"engine={wanted.engine!r} cannot run this model ({why}); use --engine sequential")
    return Choice("sequential", f"vectorised cannot run this model: {why}") if why else choice


def simulate_part(wanted: Wanted, choice: Choice, world: int = 1) -> Source:
    """Return the sums of one of `world` processes. In a private run no client can touch another one's update."""
    engine = _made(wanted, choice, world)
    if wanted.private and _interfere(engine, wanted):
        if wanted.engine != "auto":
            raise PrivacyError(
                f"engine={wanted.engine!r} is not private here: on this machine one client's update of this model "
                "changes others in their last bits; use --engine sequential"
            )
        choice = Choice("sequential", "vectorised lets clients of this model change each other's last bits")
        engine = _made(wanted, choice, world)
    why = f" ({choice.why})" if choice.why else ""
    return Source(Simulated(engine), choice, f"{engine}{why}, {wanted.precision}", engine)


def _made(wanted: Wanted, choice: Choice, world: int) -> LocalEngine | WorkerEngine:
    """Make the engine of this choice, its blocks as large as one process's part of a cohort wants them."""
    work, plan = wanted.work, wanted.plan
    cohort, spread = plan.expected_cohort / world, plan.sampler.cohort_spread / math.sqrt(world)
    steps = work.rounds * work.job.local.steps
    activations = activation_bytes(work.job, work.module, work.like, work.classes)
    return choose_engine(
        wanted.data.train, work.module, work.job.layout.total, wanted.device, choice.kind,
        steps=steps, cohort=cohort, spread=spread, activations=activations,
    )  # fmt: skip


def _interfere(engine: LocalEngine | WorkerEngine, wanted: Wanted) -> bool:
    """Return whether one client's message changes with who shares its block; a worker trains each client alone.

    The check also finds a block that fits into memory. From then on its size is fixed.
    """
    if not isinstance(engine, LocalEngine):
        return False
    touched = clients_interfere(engine, wanted.work.job, wanted.data.test, wanted.work.classes)
    engine.fixed = True
    return touched
