"""Stages 2 to 4, the client: train → sparsify → clip. The only client code, simulated or deployed.

Written once on functional parameters, without `.item()` and without a branch on data, so that it runs for one client
(a Flower node) or under `vmap` for a block. In: the round's job and a client's index plan. Out: Bounded updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.batches import Work
from fedblur.clipping import Bounded, clip_l2
from fedblur.config import LocalTraining
from fedblur.data.population import Shard, as_input
from fedblur.dropout import SeededDropout
from fedblur.functional import Forward, Layout, Params
from fedblur.methods import Gradient, Method, global_norm


@dataclass(frozen=True)
class ClientJob:
    """What is the same for all clients of a round."""

    forward: Forward
    layout: Layout
    start: Params  # w^{t-1}, as received
    local: LocalTraining
    methods: tuple[Method, ...]
    clip_norm: float  # S


class Trained(NamedTuple):
    """One client's update before the clip."""

    update: Tensor  # [d], after the methods shaped it: Δ̂
    trained_norm: Tensor  # ‖Δ‖ before shaping, local_only


@dataclass(frozen=True)
class Block:
    """What a block of clients sends, and what only a simulation may look at."""

    bounded: Bounded
    trained_norms: Tensor  # [clients] ‖Δ‖, local_only
    norms: Tensor  # [clients] ‖Δ̂‖ before clipping, local_only


def clip_block(trained: Trained, clip_norm: float) -> Block:
    """The last thing that clients do (invariant 1). `trained` has a leading dimension of clients."""
    bounded, norms = clip_l2(trained.update, clip_norm)
    return Block(bounded, trained.trained_norm, norms)


def local_update(job: ClientJob, x: Tensor, y: Tensor, plan: Tensor, samples: Tensor, seed: Tensor) -> Trained:
    """Q local steps and the methods' shaping, for one client. Works under `vmap` over plan, samples and seed."""
    delta = {name: torch.zeros_like(tensor) for name, tensor in job.start.items()}
    velocity = delta if job.local.momentum else None
    for step in range(job.local.steps):  # q = 0 .. Q-1
        delta, velocity = _local_step(job, delta, velocity, x, y, plan[step], seed, step)
    trained_norm = global_norm(delta)
    for method in job.methods:
        if method.score_batch != "none":
            chunks = samples if method.score_batch == "full" else plan[-1:]
            delta = method.shape_update(delta, _score_gradient(job, delta, x, y, chunks), job.layout)
    return Trained(job.layout.flatten(delta), trained_norm)


def _local_step(
    job: ClientJob,
    delta: Params,
    velocity: Params | None,
    x: Tensor,
    y: Tensor,
    index: Tensor,
    seed: Tensor,
    step: int,
) -> tuple[Params, Params | None]:
    """Δ ← Δ − η·(g + the methods' terms); a step whose indices are all padding is the identity."""
    local = job.local
    theta = _add(job.start, delta)
    gradient_at: Gradient = partial(_gradient, job.forward, x, y, index, seed, step)
    for method in job.methods:
        gradient_at = method.wrap_gradient(gradient_at)
    gradient = gradient_at(theta)
    if local.weight_decay:
        gradient = _add(gradient, theta, local.weight_decay)
    for method in job.methods:
        term = method.gradient_term(delta, job.clip_norm)
        gradient = gradient if term is None else _add(gradient, term)
    if velocity is not None:
        velocity = gradient = _add(gradient, velocity, local.momentum)
    active = (index >= 0).any().to(gradient[job.layout.names[0]].dtype)
    delta = {name: delta[name] - local.learning_rate * active * gradient[name] for name in delta}
    for method in job.methods:
        delta = method.after_step(delta, job.clip_norm)
    return delta, velocity


def _score_gradient(job: ClientJob, delta: Params, x: Tensor, y: Tensor, chunks: Tensor) -> Params:
    """∇f at the end point, without dropout and without the methods' terms; chunk by chunk to save memory."""
    theta = _add(job.start, delta)
    total = {name: torch.zeros_like(tensor) for name, tensor in delta.items()}
    for index in chunks:
        total = _add(total, torch.func.grad(_sum_loss)(theta, job.forward, x, y, index, None, 0))
    count = (chunks >= 0).sum().clamp(min=1)
    return {name: tensor / count for name, tensor in total.items()}


def _sum_loss(
    theta: Params, forward: Forward, x: Tensor, y: Tensor, index: Tensor, seed: Tensor | None, step: int
) -> Tensor:
    """Cross-entropy summed over a batch. Padding is replaced by zeros: no other client's sample is read."""
    valid = index >= 0
    safe = index.clamp(min=0)
    inputs = as_input(x[safe])
    inputs = torch.where(valid.view(-1, *[1] * (inputs.dim() - 1)), inputs, 0.0)
    with SeededDropout(seed, step):
        logits = forward(theta, inputs)
    losses = F.cross_entropy(logits, torch.where(valid, y[safe], 0), reduction="none")
    return (losses * valid).sum()


def _gradient(forward: Forward, x: Tensor, y: Tensor, index: Tensor, seed: Tensor, step: int, theta: Params) -> Params:
    gradient: Params = torch.func.grad(_mean_loss)(theta, forward, x, y, index, seed, step)
    return gradient


def _mean_loss(
    theta: Params, forward: Forward, x: Tensor, y: Tensor, index: Tensor, seed: Tensor | None, step: int
) -> Tensor:
    return _sum_loss(theta, forward, x, y, index, seed, step) / (index >= 0).sum().clamp(min=1)


def _add(a: Params, b: Params, scale: float = 1.0) -> Params:
    return {name: torch.add(a[name], b[name], alpha=scale) for name in a}


def train_block(job: ClientJob, shard: Shard, work: Work, vectorise: bool) -> Block:
    """`local_update` for a block of clients, all at once or one after another, then the clip."""
    rows = (work.plan, work.samples, work.seeds)
    if vectorise:
        mapped = torch.func.vmap(lambda *row: local_update(job, shard.x, shard.y, *row))
        return clip_block(Trained(*mapped(*rows)), job.clip_norm)
    each = [local_update(job, shard.x, shard.y, *row) for row in zip(*rows, strict=True)]
    return clip_block(Trained(*map(torch.stack, zip(*each, strict=True))), job.clip_norm)
