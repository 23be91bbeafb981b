"""THE round. Data flow one way: cohort → clients → sum → noise → ledger → server step → report.

    population → sample a cohort → local training → sparsify → clip → sum + noise → server step → account → report
     data/        sampling.py       client.py + methods/    clipping.py  mechanisms/   server.py   ledger.py   train.py

Everything up to the noisy sum stays inside the trusted boundary; only the noisy sum, divided by a constant, leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fedblur.accounting import PrivacyPlan
from fedblur.adaptive import Adaptive
from fedblur.bounding import Bounding, Message
from fedblur.client import Block, ClientJob
from fedblur.clipping import Bounded
from fedblur.config import LocalTraining
from fedblur.denoising import Denoise
from fedblur.diagnostics import Diagnostics
from fedblur.engines import Alone, Engine, Processes, Task
from fedblur.errors import RoundAborted
from fedblur.functional import Forward, Layout
from fedblur.ledger import Ledger
from fedblur.masks import Mask
from fedblur.mechanisms import Mechanism
from fedblur.mechanisms.base import Release
from fedblur.methods import Method
from fedblur.rng import Rng
from fedblur.server import Averaging, Server, ServerState


@dataclass(frozen=True)
class Protocol:
    """What all rounds of a run have in common."""

    plan: PrivacyPlan
    engine: Engine
    mechanism: Mechanism
    server: Server
    averaging: Averaging | None
    ledger: Ledger
    forward: Forward
    layout: Layout
    local: LocalTraining
    methods: tuple[Method, ...]
    clip_norm: float  # S, or where adaptive clipping starts
    bounding: Bounding = "clip"
    clipping: Adaptive | None = None
    mask: Mask | None = None
    denoise: Denoise | None = None
    processes: Processes = field(default_factory=Alone)


@dataclass(frozen=True)
class RoundResult:
    """The server's new state, and what only a simulation may look at."""

    state: ServerState
    local_only: dict[str, Any]


def run_round(protocol: Protocol, state: ServerState, rng: Rng) -> RoundResult:
    """One round of user-level differentially private federated learning (Algorithm 1 with Algorithm 2 at clients)."""
    round_ = state.round + 1
    plan, event = protocol.plan, protocol.plan.event()
    protocol.ledger.demand_room(round_, event, replay=not rng.private)

    cohort = plan.sampler.cohort(rng.child("cohort"))  # P_t: private, it stays here
    job = client_job(protocol, state)
    width, bound = job.message.width(protocol.layout.total), job.message.l2_bound(job.clip_norm)
    release = Release(width, bound, plan.noise_multiplier, len(cohort), state.theta.device, round_)
    noise = protocol.mechanism.draw(release, rng)  # beside the clients' training: it depends on no data
    pay = cache(partial(protocol.ledger.spend, round_, event, replay=not rng.private))  # once, however often called
    try:
        part = protocol.processes.announce(Task(job, release, cohort, pay))
        total, diagnostics = protocol.processes.collect(*sum_clients(protocol, part, rng), part.release)
    except RoundAborted as reason:  # paid for as if it had been released, and not repeated: cohorts stay Poisson
        pay()
        nothing = Diagnostics(job.message.vector_width(protocol.layout.total), job.clip_norm)
        figures = nothing.report(release.noise_std, plan.expected_cohort)
        return RoundResult(replace(state, round=round_), figures | {"aborted": str(reason)})
    noisy = protocol.mechanism.release(total, release, noise())

    pay()  # on disk before anything leaves (invariant 6)
    update, bits = job.message.decode(noisy, protocol.layout.total)
    mean = update / plan.expected_cohort  # the constant pN, never len(cohort) (invariant 3)
    noise_std = release.noise_std / plan.expected_cohort
    if protocol.denoise is not None:
        mean = protocol.denoise.clean(mean, noise_std, protocol.layout)
    state = protocol.server.step(state, mean, round_=state.round, rounds=plan.rounds, noise_std=noise_std)
    if protocol.averaging is not None:
        state = protocol.averaging.update(state, round_=state.round - 1, rounds=plan.rounds)
    if protocol.clipping is not None:
        state = protocol.clipping.update(state, bits, plan.expected_cohort, protocol.clip_norm)
    return RoundResult(state, diagnostics.report(release.noise_std, plan.expected_cohort))


def sum_clients(protocol: Protocol, task: Task, rng: Rng) -> tuple[Tensor, Diagnostics]:
    """The sum of the messages of these clients, without noise of the server: it stays inside the boundary."""
    job = task.job
    diagnostics = Diagnostics(job.message.vector_width(protocol.layout.total), job.clip_norm)
    blocks = _observed(protocol.engine.map_clients(job, task.cohort, rng), diagnostics)
    return protocol.mechanism.accumulate(blocks, task.release, rng), diagnostics


def client_job(protocol: Protocol, state: ServerState) -> ClientJob:
    """What clients are asked to do: the model, and this round's clip norm and support."""
    start, clip_norm = protocol.layout.unflatten(state.theta), protocol.clip_norm
    support, bit_weight = None, 0.0
    if protocol.mask is not None:
        support = protocol.mask.support(state)
    if protocol.clipping is not None:
        clip_norm = protocol.clipping.clip_norm(state, protocol.clip_norm)
        bit_weight = protocol.clipping.bit_weight(
            clip_norm, protocol.plan.noise_multiplier, protocol.plan.expected_cohort
        )
    message = Message(protocol.bounding, support, bit_weight)
    return ClientJob(protocol.forward, protocol.layout, start, protocol.local, protocol.methods, clip_norm, message)


def _observed(blocks: Iterator[Block], diagnostics: Diagnostics) -> Iterator[Bounded]:
    for block in blocks:
        with torch.no_grad():
            diagnostics.observe(block)
        yield block.bounded
