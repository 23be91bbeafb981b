"""Stages 2 to 4, the client: train → sparsify → clip. The only client code, simulated or deployed.

Written once on functional parameters, without `.item()` and without a branch on data, so that it runs for one client
(a Flower node) or under `vmap` for a block. In: the round's job and a client's index plan. Out: Bounded updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fedblur.core.config import LocalTraining
from fedblur.data.population import Inputs, Shard, as_input, each_input
from fedblur.learning.batches import Batch, Work, read_batches
from fedblur.learning.methods import Gradient, Method
from fedblur.learning.module_function import (
    Forward,
    Layout,
    Params,
    add,
    add_to,
    add_where,
    evaluating,
    join,
    zeros_for,
)
from fedblur.learning.personal import Personal, memory_name, remembered
from fedblur.learning.randomness import SeededRandomness
from fedblur.learning.tasks import Classification, Task
from fedblur.privacy.clipping import Bounded, Message

_MEAN, _SQUARE = "mean of ", "square of "  # Adam's state, beside the names of tensors


@dataclass(frozen=True)
class ClientJob:
    """The job of a round, the same for all its clients."""

    forward: Forward
    layout: Layout
    start: Params  # w^{t-1}, as received
    local: LocalTraining
    methods: tuple[Method, ...]
    clip_norm: float  # S
    message: Message = field(default_factory=Message)  # what of an update is sent
    task: Task = field(default_factory=Classification)  # whose loss is learned
    personal: Personal | None = None  # what stays on each client and is never sent

    @property
    def program(self) -> LocalProgram:
        """Return the part of it that does not change from round to round."""
        return LocalProgram(self.forward, self.layout, self.local, self.methods, task=self.task)


class Trained(NamedTuple):
    """One client's update before the clip."""

    update: Tensor  # [d], after the methods shaped it: Δ̂
    trained_norm: Tensor  # ‖Δ‖ before shaping, local_only
    personal: Tensor | None = None  # [k], what stays on the client


@dataclass(frozen=True)
class Block:
    """The messages of a block of clients, and what only a simulation may look at."""

    bounded: Bounded
    trained_norms: Tensor  # [clients] ‖Δ‖, local_only
    norms: Tensor  # [clients] of what is sent of Δ̂, before clipping, local_only
    personal: Tensor | None = None  # [clients, k], what stays on each client: for its row and nothing else


def clip_block(trained: Trained, job: ClientJob) -> Block:
    """Clip, the last thing that clients do (invariant 1). `trained` has a leading dimension of clients."""
    bounded, norms = job.message.encode(trained.update, job.clip_norm)
    return Block(bounded, trained.trained_norm, norms, trained.personal)


@dataclass(frozen=True)
class LocalProgram:
    """The part of a job that does not change from round to round: pure functions on one client's tensors."""

    forward: Forward
    layout: Layout
    local: LocalTraining
    methods: tuple[Method, ...]
    plain: bool = False  # gradients by ordinary autograd: faster for one client, impossible under vmap
    task: Task = field(default_factory=Classification)

    def step(
        self, start: Params, delta: Params, velocity: Params, clip_norm: Tensor | float,
        batch: Batch, seed: Tensor, step: Tensor | int,
    ) -> tuple[Params, Params]:  # fmt: skip
        """Step: Δ ← Δ − η·(g + the methods' terms). A step whose indices are all padding is the identity.

        A personal parameter starts at zero, so that its Δ is its value; methods see the shared part alone.
        """
        local = self.local
        memory = {name: tensor for name, tensor in delta.items() if name not in start}  # of methods; steps leave it
        delta = {name: delta[name] for name in start}
        before, shared = (delta, velocity), {name: delta[name] for name in self.layout.names}
        theta = add(start, delta)
        batch = self._viewed(batch, seed, step)
        weights = batch.descent if self._linear else batch.weights
        gradient_at: Gradient = partial(self._gradient, batch, weights, self.methods, seed, step)
        for method in self.methods:
            gradient_at = method.wrap_gradient(gradient_at)
        gradient = gradient_at(theta)
        terms = [term for method in self.methods if (term := method.gradient_term(shared, clip_norm)) is not None]
        terms += self._memory_terms(memory, shared, clip_norm) if memory else []
        if local.weight_decay:
            terms.append({name: local.weight_decay * tensor for name, tensor in theta.items()})
        if self._linear:
            delta = add_to(delta, gradient) if self.plain else add(delta, gradient)
        else:
            terms.append(gradient)
        if terms:
            gradient = reduce(join, terms)
            if local.optimizer == "adam":
                gradient, velocity = self._adam(gradient, velocity, torch.as_tensor(step, device=batch.rate.device))
            elif local.momentum:
                velocity = gradient = add(gradient, velocity, local.momentum)
            moved = {name: torch.addcmul(delta[name], batch.rate, gradient[name], value=-1) for name in gradient}
            delta = delta | moved
        for method in self.methods:
            delta = delta | method.after_step({name: delta[name] for name in self.layout.names}, clip_norm)
        if self._alternates:
            delta, velocity = (self._moved(step, *pair) for pair in zip(before, (delta, velocity), strict=True))
        return delta | memory, velocity

    @property
    def _linear(self) -> bool:
        """Whether the loss's gradient is only ever multiplied by −η: then its chain starts with that factor."""
        plain = self.local.optimizer == "sgd" and not self.local.momentum
        return plain and not self._alternates and not any(method.bends_gradient for method in self.methods)

    def _adam(self, gradient: Params, moments: Params, step: Tensor) -> tuple[Params, Params]:
        """Return the direction of Adam (Kingma and Ba 2015) and its means; the first step is number 0."""
        (first, second), tiny, done = self.local.betas, self.local.adam_epsilon, (step + 1).double()
        share, square = 1 - first**done, 1 - second**done  # what the means have of a whole one so far
        direction: Params = {}
        means, squares = ({name: moments[mark + name] for name in gradient} for mark in (_MEAN, _SQUARE))
        for name, slope in gradient.items():
            means[name] = torch.lerp(means[name], slope, 1 - first)
            squares[name] = second * squares[name] + (1 - second) * slope.square()
            root = (squares[name] / square.to(slope.dtype)).sqrt() + tiny
            direction[name] = means[name] / share.to(slope.dtype) / root
        kept = {mark + name: each[name] for mark, each in ((_MEAN, means), (_SQUARE, squares)) for name in gradient}
        return direction, kept

    @property
    def _alternates(self) -> bool:
        """Whether some steps leave the shared or the personal part as it is."""
        return any(type(method).moves is not Method.moves for method in self.methods)

    def _moved(self, step: Tensor | int, before: Params, after: Params) -> Params:
        """Return the tensors after a step, and as they were before it for the part that it does not move."""
        for method in self.methods:
            for moves, own in zip(method.moves(step), (False, True), strict=True):
                for name in after:
                    if (name not in self.layout.names) == own:
                        after = after | {name: torch.where(torch.as_tensor(moves), after[name], before[name])}
        return after

    def _memory_terms(self, memory: Params, shared: Params, clip_norm: Tensor | float) -> list[Params]:
        """Return what methods add to the gradient, given what they remember on this client."""
        terms = (
            method.state_term(remembered(method, self.layout, memory), shared, clip_norm)
            for method in self.methods
            if method.client_state(self.layout)
        )
        return [term for term in terms if term is not None]

    def score(self, start: Params, delta: Params, batch: Batch) -> Params:
        """Return Σ ∇f over these samples at the end point, in evaluation mode and without what the methods add."""
        batch = batch._replace(inputs=as_input(batch.inputs))
        return self._gradient(batch, batch.weights, (), None, 0, add(start, delta))

    def shape(self, which: int, delta: Params, total: Params, count: Tensor) -> Params:
        """Let method number `which` shape the update, given the sum of `count` samples' gradients."""
        gradient = {name: total[name] / count for name in delta}
        return self.methods[which].shape_update(delta, gradient, self.layout)

    def _viewed(self, batch: Batch, seed: Tensor, step: Tensor | int) -> Batch:
        """Return the samples as the step sees them; copies lie side by side, so that padding stays at the end."""
        views = math.prod(method.views for method in self.methods)
        if views > 1:

            def copies(tensor: Tensor) -> Tensor:
                return tensor[:, None].expand(-1, views, *tensor.shape[1:]).flatten(0, 1)

            labels, weights, descent = map(copies, (batch.labels, batch.weights, batch.descent))
            batch = Batch(each_input(batch.inputs, copies), labels, weights / views, batch.rate, descent / views)
        inputs = as_input(batch.inputs)
        for method in self.methods:
            inputs = method.view(inputs, seed, step)
        return batch._replace(inputs=inputs)

    def _gradient(
        self, batch: Batch, weights: Tensor, methods: tuple[Method, ...], seed: Tensor | None, step: Tensor | int,
        theta: Params,
    ) -> Params:  # fmt: skip
        """Return the gradient of the weighted sum of losses, by the chain rule from the outputs' slope.

        Without a seed the model is in evaluation mode.
        """
        forward = self.forward if seed is not None else evaluating(self.forward)

        def outputs_of(theta: Params) -> Tensor:
            with SeededRandomness(seed, step):
                outputs = forward(theta, batch.inputs)
            for method in methods:
                outputs = method.adjust(outputs, batch.labels, batch.weights > 0)
            return outputs

        def slope_at(outputs: Tensor) -> Tensor:
            """Return ∂(Σ weight·loss)/∂outputs, in the shape of outputs; 0 at padding."""
            counting = reduce(lambda w, method: method.weigh(outputs, batch.labels, w), methods, weights)
            return self.task.slope(outputs, batch.labels, counting)

        if self.plain:  # as `torch.func.vjp` does: zeros where a tensor has no part in the outputs
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in theta.items()}
            with torch.enable_grad():
                outputs = outputs_of(leaves)
            slope = slope_at(outputs.detach())
            found = torch.autograd.grad(
                outputs, list(leaves.values()), slope, allow_unused=True, materialize_grads=True
            )
            return dict(zip(leaves, found, strict=True))
        outputs, pull_back, *_ = torch.func.vjp(outputs_of, theta)
        (gradient,) = pull_back(slope_at(outputs))
        return cast(Params, gradient)


class Steps(NamedTuple):
    """A program's functions as an engine runs them: for one client, or for a block of clients at once."""

    train: Callable[..., Params]  # all local steps: `run_steps` of some step
    score: Callable[..., Params]
    shape: Callable[..., Params]


def one_client(program: LocalProgram) -> Steps:
    """Return steps of plain calls and ordinary autograd, without a dimension of clients."""
    program = replace(program, plain=True)
    return Steps(partial(run_steps, program.step, program.local), program.score, program.shape)


def many_clients(program: LocalProgram) -> Steps:
    """Return the program's functions for a block of clients, under `vmap`."""
    shape = torch.func.vmap(program.shape, in_dims=(None, 0, 0, 0))
    return Steps(partial(run_steps, batched_step(program), program.local), batched_score(program), shape)


def batched_step(program: LocalProgram) -> Callable[..., tuple[Params, Params]]:
    return torch.func.vmap(program.step, in_dims=(None, 0, 0, None, 0, 0, None))


def batched_score(program: LocalProgram) -> Callable[..., Params]:
    return torch.func.vmap(program.score, in_dims=(None, 0, 0))


def run_steps(
    step: Callable[..., tuple[Params, Params]], local: LocalTraining,
    start: Params, clip_norm: Tensor, x: Inputs, y: Tensor, plan: Tensor, seeds: Tensor, own: Params | None = None,
) -> Params:  # fmt: skip
    """Run Q local steps from Δ = 0; `own`: what stays on the client, which does not begin at zero."""
    delta = {name: zeros_for(tensor, seeds.shape) for name, tensor in start.items()}
    # Not the same tensors as Δ: a tracer would take the two for one.
    marks = [_MEAN, _SQUARE] if local.optimizer == "adam" else [""] if local.momentum else []
    velocity = {mark + name: torch.zeros_like(tensor) for mark in marks for name, tensor in delta.items()}
    for name, tensor in (own or {}).items():
        delta[name] = delta[name].copy_(tensor) if name in delta else tensor
    for q, batch in enumerate(read_batches(x, y, plan, local.learning_rate)):
        delta, velocity = step(start, delta, velocity, clip_norm, batch, seeds, q)
    return delta


def local_update(job: ClientJob, steps: Steps, shard: Shard, work: Work) -> Trained:
    """Run Q local steps and the methods' shaping. `work` has a leading dimension of clients, or none for one client."""
    clip_norm = torch.tensor(job.clip_norm, device=work.seeds.device)
    start, row = job.start, None
    if job.personal is None:
        delta = whole = steps.train(start, clip_norm, shard.x, shard.y, work.plan, work.seeds)
    else:
        assert work.personal is not None
        start, own = job.personal.begin(start, work.personal)
        whole = steps.train(start, clip_norm, shard.x, shard.y, work.plan, work.seeds, own)
        delta = {name: whole[name] for name in job.layout.names}  # all that anybody else will ever see
        row = job.personal.end(_remember(job, whole, delta, clip_norm, work.seeds.dim()), work.personal)
    if all(method.score_batch == "none" for method in job.methods):
        update = job.layout.flatten(delta)
        return Trained(update, _norm({"all": update}, work.seeds.dim()), row)
    trained_norm = _norm(delta, work.seeds.dim())
    for which, method in enumerate(job.methods):
        if method.score_batch != "none":
            chunks = work.samples if method.score_batch == "full" else work.plan[..., -1:, :]
            score = _score_gradient(start, steps, whole | delta, shard, chunks)
            delta = steps.shape(which, delta, *score)
    return Trained(job.layout.flatten(delta), trained_norm, row)


def _remember(job: ClientJob, whole: Params, delta: Params, clip_norm: Tensor, lead: int) -> Params:
    """Return all tensors after local steps, with what the methods remember of them."""
    for method in job.methods:
        if method.client_state(job.layout):
            next_state = torch.func.vmap(method.next_state, in_dims=(0, 0, None)) if lead else method.next_state
            state = next_state(remembered(method, job.layout, whole), delta, clip_norm)
            whole = whole | {memory_name(method, key): tensor for key, tensor in state.items()}
    return whole


def _score_gradient(start: Params, steps: Steps, delta: Params, shard: Shard, chunks: Tensor) -> tuple[Params, Tensor]:
    """Return Σ ∇f at the end point and over how many samples; chunk by chunk to save memory.

    How many chunks there are depends on the block's largest client. A chunk in which a client has no samples leaves
    that client's sum as it is, to the bit.
    """
    total: Params | None = None
    present = (chunks >= 0).any(-1)  # [*clients, chunks]
    for which, batch in enumerate(read_batches(shard.x, shard.y, chunks)):
        part = steps.score(start, delta, batch)
        total = part if total is None else add_where(present[..., which], total, part)
    assert total is not None
    return total, (chunks >= 0).sum((-1, -2)).clamp(min=1)


def train_block(job: ClientJob, shard: Shard, work: Work, vectorise: bool, steps: Steps | None = None) -> Block:
    """Run `local_update` for a block of clients, all at once or one after another, then clip.

    `steps`: a faster way to run all at once (`engines/local.py`).
    """
    if vectorise:
        return clip_block(local_update(job, steps or many_clients(job.program), shard, work), job)
    own = [None] * len(work) if work.personal is None else work.personal
    rows = zip(work.plan, work.samples, work.seeds, own, strict=True)
    return join_blocks([train_alone(job, one_client(job.program), shard, Work(*row)) for row in rows])


def train_alone(job: ClientJob, steps: Steps, shard: Shard, work: Work) -> Block:
    """Train one client from the first step to the clip: a block of one."""
    trained = local_update(job, steps, shard, work)
    own = None if trained.personal is None else trained.personal[None]
    return clip_block(Trained(trained.update[None], trained.trained_norm[None], own), job)


def join_blocks(blocks: list[Block]) -> Block:
    """Put blocks together, in their order."""
    bounded = Bounded(torch.cat([block.bounded.value for block in blocks]), blocks[0].bounded.l2_bound)
    trained, norms = (torch.cat([getattr(block, name) for block in blocks]) for name in ("trained_norms", "norms"))
    own = [block.personal for block in blocks if block.personal is not None]
    return Block(bounded, trained, norms, torch.cat(own) if own else None)


def _norm(delta: Params, lead: int) -> Tensor:
    """Return one l2 norm per client, over all tensors."""
    rows = [tensor.flatten(lead) for tensor in delta.values()]
    return torch.stack([values.square().sum(-1) for values in rows]).sum(0).sqrt()
