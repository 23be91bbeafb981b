"""THE round. Data flow one way: cohort → clients → sum → noise → ledger → server step → report.

    population → sample a cohort → local training → sparsify → clip → sum + noise → ledger → server step → report
     data/        privacy/          learning/                     privacy/clipping, mechanisms, ledger       server.py

Everything up to the noisy sum stays inside the trusted boundary; only the noisy sum, divided by a constant, leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fedblur.core.config import LocalTraining
from fedblur.core.errors import PrivacyError, RoundAborted
from fedblur.core.rng import Rng
from fedblur.engines import CohortSum
from fedblur.engines import Task as RoundTask
from fedblur.engines.cohort_sum import Diagnostics
from fedblur.learning.client import ClientJob
from fedblur.learning.methods import Method
from fedblur.learning.module_function import Forward, Layout
from fedblur.learning.personal import Personal
from fedblur.learning.tasks import Classification, Task
from fedblur.privacy.accounting import PrivacyPlan
from fedblur.privacy.clipping import Bounding, Message
from fedblur.privacy.ledger import Payment, Spending
from fedblur.privacy.mechanisms import Mechanism
from fedblur.privacy.mechanisms.base import Release
from fedblur.privacy.participation import Attendance, Scheduled, cohort_of
from fedblur.privacy.sampling import each_once
from fedblur.training.adaptive_clipping import Adaptive
from fedblur.training.client_rows import ClientRows
from fedblur.training.denoise import Denoise
from fedblur.training.public_mask import Mask
from fedblur.training.server import Averaging, Server, ServerState


@dataclass(frozen=True)
class Protocol:
    """The protocol that all rounds of a run have in common."""

    plan: PrivacyPlan
    sums: CohortSum  # inside the trusted boundary
    mechanism: Mechanism
    server: Server
    averaging: Averaging | None
    ledger: Spending
    forward: Forward
    layout: Layout
    local: LocalTraining
    methods: tuple[Method, ...]
    clip_norm: float  # S, or where adaptive clipping starts
    bounding: Bounding = "clip"
    clipping: Adaptive | None = None
    mask: Mask | None = None
    denoise: Denoise | None = None
    task: Task = field(default_factory=Classification)
    personal: Personal | None = None  # what stays on clients
    rows: ClientRows | None = None  # where this process keeps it for them; None: they keep it themselves
    attendance: Attendance = field(default_factory=Attendance)  # who took part, where cohorts depend on it


@dataclass(frozen=True)
class RoundResult:
    """The server's new state, and what only a simulation may look at."""

    state: ServerState
    local_only: dict[str, Any]


def run_round(protocol: Protocol, state: ServerState, rng: Rng) -> RoundResult:
    """Run one round of user-level differentially private federated learning (Algorithm 1, Algorithm 2 at clients)."""
    round_ = state.round + 1
    plan, sampler = protocol.plan, protocol.plan.sampler
    event, expected_cohort = sampler.event(plan.release), sampler.expected_cohort
    protocol.ledger.demand_room(round_, event, replay=not rng.private)

    number = protocol.ledger.number(round_, event, replay=not rng.private)  # of the release among all of the run
    drawn = rng.child("cohort")  # P_t is private: it stays here
    scheduled = isinstance(sampler, Scheduled)  # whose cohorts depend on who took part before
    cohort = cohort_of(sampler, protocol.attendance, number, round_, drawn) if scheduled else sampler.cohort(drawn)
    if not each_once(cohort):
        raise PrivacyError(f"round {round_}: the sampler names a client twice; a cohort has rising client numbers")
    job = client_job(protocol, state)
    rows = None if protocol.rows is None else protocol.rows.fetch(cohort, round_)
    if job.personal is not None and rows is not None:
        job = replace(job, personal=replace(job.personal, rows=rows))
    width, bound = job.message.width(protocol.layout.total), job.message.l2_bound(job.clip_norm)
    release = Release(width, bound, plan.noise_multiplier, len(cohort), state.theta.device, round_, number=number)
    noise = protocol.mechanism.draw(release, rng)  # beside the clients' training: it depends on no data
    payment = Payment(protocol.ledger, round_, event, replay=not rng.private)
    try:
        total, seen = protocol.sums.total(RoundTask(job, protocol.mechanism, release, cohort, payment.settle), rng)
    except RoundAborted as reason:  # paid for as if it had been released, and not repeated: cohorts stay Poisson
        payment.settle()
        nothing = Diagnostics(job.message.vector_width(protocol.layout.total), job.clip_norm)
        figures = nothing.report(release.noise_std, expected_cohort)
        return RoundResult(replace(state, round=round_), figures | {"aborted": str(reason)})
    noisy = protocol.mechanism.release(total, release, noise())

    if protocol.rows is not None and rows is not None:
        protocol.rows.stage(round_, rows)  # no release: nobody but these clients sees them
    payment.settle()  # on disk before anything leaves (invariant 6)
    update, bits = job.message.decode(noisy, protocol.layout.total)
    mean = update / expected_cohort  # the constant pN, never len(cohort) (invariant 3)
    noise_std = release.noise_std / expected_cohort
    if protocol.denoise is not None:
        mean = protocol.denoise.clean(mean, noise_std, protocol.layout)
    state = protocol.server.step(state, mean, round_=state.round, rounds=plan.rounds, noise_std=noise_std)
    if protocol.averaging is not None:
        state = protocol.averaging.update(state, round_=state.round - 1, rounds=plan.rounds)
    if protocol.clipping is not None:
        state = protocol.clipping.update(state, bits, expected_cohort, protocol.clip_norm)
    return RoundResult(state, seen.report(release.noise_std, expected_cohort))


def client_job(protocol: Protocol, state: ServerState) -> ClientJob:
    """Return what clients are asked to do: the model, and this round's clip norm and support."""
    start, clip_norm = protocol.layout.unflatten(state.theta), protocol.clip_norm
    support, bit_weight = None, 0.0
    if protocol.mask is not None:
        support = protocol.mask.support(state)
    if protocol.clipping is not None:
        clip_norm = protocol.clipping.clip_norm(state, protocol.clip_norm)
        bit_weight = protocol.clipping.bit_weight(
            clip_norm, protocol.plan.noise_multiplier, protocol.plan.sampler.expected_cohort
        )
    message = Message(protocol.bounding, support, bit_weight)
    return ClientJob(
        protocol.forward, protocol.layout, start, protocol.local, protocol.methods, clip_norm, message, protocol.task,
        protocol.personal,
    )  # fmt: skip
