"""Stages 2 to 4, the client: train → sparsify → clip. The only client code, simulated or deployed.

Written once on functional parameters, without `.item()` and without a branch on data, so that it runs for one client
(a Flower node) or under `vmap` for a block. In: the round's job and a client's index plan. Out: Bounded updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.batches import Work
from fedblur.bounding import Message
from fedblur.clipping import Bounded
from fedblur.compiling import Compiled
from fedblur.config import LocalTraining
from fedblur.data.population import Shard, as_input
from fedblur.dropout import SeededDropout
from fedblur.functional import Forward, Layout, Params
from fedblur.methods import Gradient, Method


@dataclass(frozen=True)
class ClientJob:
    """What is the same for all clients of a round."""

    forward: Forward
    layout: Layout
    start: Params  # w^{t-1}, as received
    local: LocalTraining
    methods: tuple[Method, ...]
    clip_norm: float  # S
    message: Message = field(default_factory=Message)  # what of an update is sent


class Trained(NamedTuple):
    """One client's update before the clip."""

    update: Tensor  # [d], after the methods shaped it: Δ̂
    trained_norm: Tensor  # ‖Δ‖ before shaping, local_only


@dataclass(frozen=True)
class Block:
    """What a block of clients sends, and what only a simulation may look at."""

    bounded: Bounded
    trained_norms: Tensor  # [clients] ‖Δ‖, local_only
    norms: Tensor  # [clients] of what is sent of Δ̂, before clipping, local_only


def clip_block(trained: Trained, job: ClientJob) -> Block:
    """The last thing that clients do (invariant 1). `trained` has a leading dimension of clients."""
    bounded, norms = job.message.encode(trained.update, job.clip_norm)
    return Block(bounded, trained.trained_norm, norms)


class Batch(NamedTuple):
    """What one step's loss reads."""

    inputs: Tensor  # [rows, *shape]; padding is zeros: no other client's sample is read
    labels: Tensor  # [rows]
    valid: Tensor  # [rows], bool


@dataclass(frozen=True)
class LocalProgram:
    """What of a job does not change from round to round: pure functions on one client's tensors."""

    forward: Forward
    layout: Layout
    local: LocalTraining
    methods: tuple[Method, ...]
    plain: bool = False  # gradients by ordinary autograd: faster for one client, impossible under vmap

    def step(
        self, start: Params, delta: Params, velocity: Params, clip_norm: Tensor | float,
        x: Tensor, y: Tensor, index: Tensor, seed: Tensor, step: Tensor | int,
    ) -> tuple[Params, Params]:  # fmt: skip
        """Δ ← Δ − η·(g + the methods' terms); a step whose indices are all padding is the identity."""
        local = self.local
        theta = _add(start, delta)
        gradient_at: Gradient = partial(self._gradient, self._batch(x, y, index, seed, step), seed, step)
        for method in self.methods:
            gradient_at = method.wrap_gradient(gradient_at)
        gradient = gradient_at(theta)
        if local.weight_decay:
            gradient = _add(gradient, theta, local.weight_decay)
        for method in self.methods:
            term = method.gradient_term(delta, clip_norm)
            gradient = gradient if term is None else _add(gradient, term)
        if local.momentum:
            velocity = gradient = _add(gradient, velocity, local.momentum)
        rate = local.learning_rate * (index >= 0).any()
        delta = {name: delta[name] - rate * gradient[name] for name in delta}
        for method in self.methods:
            delta = method.after_step(delta, clip_norm)
        return delta, velocity

    def score(self, start: Params, delta: Params, x: Tensor, y: Tensor, index: Tensor) -> Params:
        """Σ ∇f over these samples at the end point, without dropout and without what the methods add."""
        return self._grad(_sum_loss)(_add(start, delta), self.forward, _gather(x, y, index), (), None, 0)

    def shape(self, which: int, delta: Params, gradient: Params) -> Params:
        """What method number `which` makes of the update."""
        return self.methods[which].shape_update(delta, gradient, self.layout)

    def _batch(self, x: Tensor, y: Tensor, index: Tensor, seed: Tensor, step: Tensor | int) -> Batch:
        """A step's samples; copies of a sample lie side by side, so that padding stays at the end."""
        views = math.prod(method.views for method in self.methods)
        batch = _gather(x, y, index if views == 1 else index[:, None].expand(-1, views).flatten())
        for method in self.methods:
            batch = batch._replace(inputs=method.view(batch.inputs, seed, step))
        return batch

    def _gradient(self, batch: Batch, seed: Tensor, step: Tensor | int, theta: Params) -> Params:
        return self._grad(_mean_loss)(theta, self.forward, batch, self.methods, seed, step)

    def _grad(self, loss: Callable[..., Tensor]) -> Callable[..., Params]:
        return partial(_autograd, loss) if self.plain else torch.func.grad(loss)


class Steps(NamedTuple):
    """A program's functions as an engine runs them: for one client, or for a block of clients at once."""

    step: Callable[..., tuple[Params, Params]]
    score: Callable[..., Params]
    shape: Callable[..., Params]


def one_client(program: LocalProgram) -> Steps:
    """Plain calls and ordinary autograd, without a dimension of clients."""
    program = replace(program, plain=True)
    return Steps(program.step, program.score, program.shape)


@lru_cache(maxsize=8)
def many_clients(program: LocalProgram, compiled: bool = False) -> Steps:
    """The same under `vmap`; compiled, a step becomes a few fused kernels (worth it for long runs on a GPU)."""
    vmap = torch.func.vmap
    steps = Steps(
        vmap(program.step, in_dims=(None, 0, 0, None, None, None, 0, 0, None)),
        vmap(program.score, in_dims=(None, 0, None, None, 0)),
        vmap(program.shape, in_dims=(None, 0, 0)),
    )
    if not compiled:
        return steps
    stepping = replace(program, methods=tuple(method for method in program.methods if method.steers_steps))
    return Steps(_compiled_step(stepping), _compiled_score(replace(program, methods=())), steps.shape)


@lru_cache(maxsize=8)
def _compiled_step(program: LocalProgram) -> Compiled:
    """Of all programs whose steps are the same: LUS, for one, does not touch them."""
    step = torch.func.vmap(program.step, in_dims=(None, 0, 0, None, None, None, 0, 0, None))
    return Compiled(step, state=(1, 2), invariant=(0, 3, 4, 5))  # Δ and velocity; w, S and the data stay


@lru_cache(maxsize=8)
def _compiled_score(program: LocalProgram) -> Compiled:
    return Compiled(torch.func.vmap(program.score, in_dims=(None, 0, None, None, 0)))


def local_update(job: ClientJob, steps: Steps, shard: Shard, work: Work) -> Trained:
    """Q local steps and the methods' shaping. `work` has a leading dimension of clients, or none for one client."""
    lead, x, y = work.seeds.shape, shard.x, shard.y
    delta = {name: _zeros(tensor, lead) for name, tensor in job.start.items()}
    velocity = delta if job.local.momentum else {}
    clip_norm = job.clip_norm if x.device.type == "cpu" else torch.tensor(job.clip_norm, device=x.device)
    for q in range(job.local.steps):
        index, count = work.plan[..., q, :], _counter(q, work.seeds.device)
        delta, velocity = steps.step(job.start, delta, velocity, clip_norm, x, y, index, work.seeds, count)
    trained_norm = _norm(delta, len(lead))
    for which, method in enumerate(job.methods):
        if method.score_batch != "none":
            chunks = work.samples if method.score_batch == "full" else work.plan[..., -1:, :]
            delta = steps.shape(which, delta, _score_gradient(job, steps, delta, shard, chunks))
    return Trained(job.layout.flatten(delta), trained_norm)


def _score_gradient(job: ClientJob, steps: Steps, delta: Params, shard: Shard, chunks: Tensor) -> Params:
    """∇f at the end point; chunk by chunk to save memory."""
    total: Params | None = None
    for chunk in chunks.unbind(-2):
        part = steps.score(job.start, delta, shard.x, shard.y, chunk)
        total = part if total is None else _add(total, part)
    assert total is not None
    count = (chunks >= 0).sum((-1, -2)).clamp(min=1)
    return {name: t / count.view(*count.shape, *[1] * (t.dim() - count.dim())) for name, t in total.items()}


def train_block(job: ClientJob, shard: Shard, work: Work, vectorise: bool, compiled: bool = False) -> Block:
    """`local_update` for a block of clients, all at once or one after another, then the clip."""
    program = LocalProgram(job.forward, job.layout, job.local, job.methods)
    if vectorise:
        return clip_block(local_update(job, many_clients(program, compiled), shard, work), job)
    rows = zip(work.plan, work.samples, work.seeds, strict=True)
    each = [local_update(job, one_client(program), shard, Work(*row)) for row in rows]
    return clip_block(Trained(*map(torch.stack, zip(*each, strict=True))), job)


def _autograd(loss: Callable[..., Tensor], theta: Params, *rest: object) -> Params:
    """The loss's gradient by the parameters, as `torch.func.grad` gives it: zeros where a tensor has no part."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in theta.items()}
    with torch.enable_grad():
        value = loss(leaves, *rest)
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def _gather(x: Tensor, y: Tensor, index: Tensor) -> Batch:
    """The samples of these indices. Padding is replaced by zeros: no other client's sample is read."""
    valid = index >= 0
    safe = index.clamp(min=0)
    inputs = as_input(x[safe])
    inputs = torch.where(valid.view(-1, *[1] * (inputs.dim() - 1)), inputs, 0.0)
    return Batch(inputs, torch.where(valid, y[safe], 0), valid)


def _mean_loss(
    theta: Params, forward: Forward, batch: Batch, methods: tuple[Method, ...], seed: Tensor, step: Tensor | int
) -> Tensor:
    return _sum_loss(theta, forward, batch, methods, seed, step) / batch.valid.sum().clamp(min=1)


def _sum_loss(
    theta: Params, forward: Forward, batch: Batch, methods: tuple[Method, ...], seed: Tensor | None, step: Tensor | int
) -> Tensor:
    """Cross-entropy summed over a batch."""
    with SeededDropout(seed, step):
        logits = forward(theta, batch.inputs)
    for method in methods:
        logits = method.adjust(logits, batch.labels, batch.valid)
    losses = F.cross_entropy(logits, batch.labels, reduction="none")
    return (losses * batch.valid).sum()


def _add(a: Params, b: Params, scale: float = 1.0) -> Params:
    return {name: torch.add(a[name], b[name], alpha=scale) for name in a}


def _zeros(tensor: Tensor, lead: torch.Size) -> Tensor:
    """Zeros for each client; for one client in the tensor's own memory format."""
    return tensor.new_zeros(*lead, *tensor.shape) if lead else torch.zeros_like(tensor)


def _norm(delta: Params, lead: int) -> Tensor:
    """One l2 norm per client, over all tensors."""
    squares = [tensor.flatten(lead).square().sum(-1) for tensor in delta.values()]
    return torch.stack(squares).sum(0).sqrt()


@lru_cache(maxsize=4096)
def _counter(step: int, device: torch.device) -> Tensor | int:
    """The step's number: on a GPU a tensor, or compiled code would be made anew for every step (and clip norm)."""
    return step if device.type == "cpu" else torch.tensor(step, device=device)
