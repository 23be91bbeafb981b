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
from fedblur.learning.module_function import Forward, Layout, Params, add, add_to, add_where, evaluating, zeros_for
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

    @property
    def program(self) -> LocalProgram:
        """Return the part of it that does not change from round to round."""
        return LocalProgram(self.forward, self.layout, self.local, self.methods, task=self.task)


class Trained(NamedTuple):
    """One client's update before the clip."""

    update: Tensor  # [d], after the methods shaped it: Δ̂
    trained_norm: Tensor  # ‖Δ‖ before shaping, local_only


@dataclass(frozen=True)
class Block:
    """The messages of a block of clients, and what only a simulation may look at."""

    bounded: Bounded
    trained_norms: Tensor  # [clients] ‖Δ‖, local_only
    norms: Tensor  # [clients] of what is sent of Δ̂, before clipping, local_only


def clip_block(trained: Trained, job: ClientJob) -> Block:
    """Clip, the last thing that clients do (invariant 1). `trained` has a leading dimension of clients."""
    bounded, norms = job.message.encode(trained.update, job.clip_norm)
    return Block(bounded, trained.trained_norm, norms)


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
        """Step: Δ ← Δ − η·(g + the methods' terms). A step whose indices are all padding is the identity."""
        local = self.local
        theta = add(start, delta)
        batch = self._viewed(batch, seed, step)
        weights = batch.descent if self._linear else batch.weights
        gradient_at: Gradient = partial(self._gradient, batch, weights, self.methods, seed, step)
        for method in self.methods:
            gradient_at = method.wrap_gradient(gradient_at)
        gradient = gradient_at(theta)
        terms = [term for method in self.methods if (term := method.gradient_term(delta, clip_norm)) is not None]
        if local.weight_decay:
            terms.append({name: local.weight_decay * tensor for name, tensor in theta.items()})
        if self._linear:
            delta = add_to(delta, gradient) if self.plain else add(delta, gradient)
        else:
            terms.append(gradient)
        if terms:
            gradient = reduce(add, terms)
            if local.optimizer == "adam":
                gradient, velocity = self._adam(gradient, velocity, torch.as_tensor(step, device=batch.rate.device))
            elif local.momentum:
                velocity = gradient = add(gradient, velocity, local.momentum)
            delta = {name: torch.addcmul(delta[name], batch.rate, gradient[name], value=-1) for name in delta}
        for method in self.methods:
            delta = method.after_step(delta, clip_norm)
        return delta, velocity

    @property
    def _linear(self) -> bool:
        """Whether the loss's gradient is only ever multiplied by −η: then its chain starts with that factor."""
        plain = self.local.optimizer == "sgd" and not self.local.momentum
        return plain and not any(method.bends_gradient for method in self.methods)

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

    def score(self, start: Params, delta: Params, batch: Batch) -> Params:
        """Return Σ ∇f over these samples at the end point, in evaluation mode and without what the methods add."""
        batch = batch._replace(inputs=as_input(batch.inputs))
        return self._gradient(batch, batch.weights, (), None, 0, add(start, delta))

    def shape(self, which: int, delta: Params, total: Params, count: Tensor) -> Params:
        """Let method number `which` shape the update, given the sum of `count` samples' gradients."""
        gradient = {name: tensor / count for name, tensor in total.items()}
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
    start: Params, clip_norm: Tensor, x: Inputs, y: Tensor, plan: Tensor, seeds: Tensor,
) -> Params:  # fmt: skip
    """Run Q local steps from Δ = 0."""
    delta = {name: zeros_for(tensor, seeds.shape) for name, tensor in start.items()}
    # Not the same tensors as Δ: a tracer would take the two for one.
    marks = [_MEAN, _SQUARE] if local.optimizer == "adam" else [""] if local.momentum else []
    velocity = {mark + name: torch.zeros_like(tensor) for mark in marks for name, tensor in delta.items()}
    for q, batch in enumerate(read_batches(x, y, plan, local.learning_rate)):
        delta, velocity = step(start, delta, velocity, clip_norm, batch, seeds, q)
    return delta


def local_update(job: ClientJob, steps: Steps, shard: Shard, work: Work) -> Trained:
    """Run Q local steps and the methods' shaping. `work` has a leading dimension of clients, or none for one client."""
    clip_norm = torch.tensor(job.clip_norm, device=work.seeds.device)
    delta = steps.train(job.start, clip_norm, shard.x, shard.y, work.plan, work.seeds)
    if all(method.score_batch == "none" for method in job.methods):
        update = job.layout.flatten(delta)
        return Trained(update, _norm({"all": update}, work.seeds.dim()))
    trained_norm = _norm(delta, work.seeds.dim())
    for which, method in enumerate(job.methods):
        if method.score_batch != "none":
            chunks = work.samples if method.score_batch == "full" else work.plan[..., -1:, :]
            delta = steps.shape(which, delta, *_score_gradient(job, steps, delta, shard, chunks))
    return Trained(job.layout.flatten(delta), trained_norm)


def _score_gradient(job: ClientJob, steps: Steps, delta: Params, shard: Shard, chunks: Tensor) -> tuple[Params, Tensor]:
    """Return Σ ∇f at the end point and over how many samples; chunk by chunk to save memory.

    How many chunks there are depends on the block's largest client. A chunk in which a client has no samples leaves
    that client's sum as it is, to the bit.
    """
    total: Params | None = None
    present = (chunks >= 0).any(-1)  # [*clients, chunks]
    for which, batch in enumerate(read_batches(shard.x, shard.y, chunks)):
        part = steps.score(job.start, delta, batch)
        total = part if total is None else add_where(present[..., which], total, part)
    assert total is not None
    return total, (chunks >= 0).sum((-1, -2)).clamp(min=1)


def train_block(job: ClientJob, shard: Shard, work: Work, vectorise: bool, steps: Steps | None = None) -> Block:
    """Run `local_update` for a block of clients, all at once or one after another, then clip.

    `steps`: a faster way to run all at once (`engines/local.py`).
    """
    if vectorise:
        return clip_block(local_update(job, steps or many_clients(job.program), shard, work), job)
    rows = zip(work.plan, work.samples, work.seeds, strict=True)
    return join_blocks([train_alone(job, one_client(job.program), shard, Work(*row)) for row in rows])


def train_alone(job: ClientJob, steps: Steps, shard: Shard, work: Work) -> Block:
    """Train one client from the first step to the clip: a block of one."""
    trained = local_update(job, steps, shard, work)
    return clip_block(Trained(trained.update[None], trained.trained_norm[None]), job)


def join_blocks(blocks: list[Block]) -> Block:
    """Put blocks together, in their order."""
    bounded = Bounded(torch.cat([block.bounded.value for block in blocks]), blocks[0].bounded.l2_bound)
    norms = [torch.cat([getattr(block, name) for block in blocks]) for name in ("trained_norms", "norms")]
    return Block(bounded, *norms)


def _norm(delta: Params, lead: int) -> Tensor:
    """Return one l2 norm per client, over all tensors."""
    rows = [tensor.flatten(lead) for tensor in delta.values()]
    return torch.stack([values.square().sum(-1) for values in rows]).sum(0).sqrt()
