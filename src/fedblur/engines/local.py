"""One device: a block of clients at once under `vmap`, or one client after another in the calling thread.

A block has one shape, known before any data are: so many clients, batches so wide. One that has too few clients is
filled up with empty ones. So no client can change what another one computes, not even in the last bit, and compiled
code meets one size only. When memory runs out, the block is halved and the work goes on, but never in the rounds of a
private run: on a GPU the last bits depend on the block's size, and what memory holds may depend on a client.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedblur.core.errors import ModelError
from fedblur.core.rng import Rng
from fedblur.data.population import Population, Shard
from fedblur.learning.batches import Work, plan_work
from fedblur.learning.client import (
    Block,
    ClientJob,
    LocalProgram,
    Steps,
    batched_score,
    batched_step,
    many_clients,
    run_steps,
    train_block,
)
from fedblur.learning.module_function import Params
from fedblur.privacy.clipping import Bounded

# Operator by operator; traced, the same bits with less between the operators; compiled, a few fused kernels, recorded
# as one CUDA graph.
How = Literal["plain", "traced", "compiled"]


@lru_cache(maxsize=8)
def steps_for(program: LocalProgram, how: How = "plain") -> Steps:
    """Return the steps of a block of clients, run in this way."""
    if how == "compiled":
        from fedblur.accel.compile import Compiled

        stepping = replace(program, methods=tuple(method for method in program.methods if method.steers_steps))
        shape = torch.func.vmap(program.shape, in_dims=(None, 0, 0, 0))
        return Steps(_compiled_steps(stepping), _compiled_score(replace(program, methods=())), Compiled(shape))
    steps = many_clients(program)
    if how == "plain":
        return steps
    from fedblur.accel.replay import Traced

    step = Traced(batched_step(program), given=(1, 2))  # Δ and velocity: `run_steps` alone holds them
    return Steps(partial(run_steps, numbered(step), program.local), Traced(steps.score), steps.shape)


def numbered(step: Callable[..., tuple[Params, Params]]) -> Callable[..., tuple[Params, Params]]:
    """Return the step with its number as a tensor: traced code would be made again for every plain number."""
    return partial(_with_tensor, step)


def _with_tensor(step: Callable[..., tuple[Params, Params]], *arguments: Any) -> tuple[Params, Params]:
    *others, seeds, number = arguments
    return step(*others, seeds, _counter(number, seeds.device))


@lru_cache(maxsize=4096)
def _counter(step: int, device: torch.device) -> Tensor:
    return torch.tensor(step, device=device)


@lru_cache(maxsize=8)
def _compiled_steps(program: LocalProgram) -> Callable[..., Params]:
    """Return the steps of all programs whose steps are the same: LUS, for one, does not touch them."""
    from fedblur.accel.compile import Compiled
    from fedblur.accel.cuda_graph import Captured, enabled

    step = Compiled(batched_step(program), state=(1, 2), invariant=(0, 3))  # Δ and velocity; w and S stay
    train = partial(run_steps, numbered(step), program.local)
    return Captured(train, resident=(2, 3)) if enabled() else train


@lru_cache(maxsize=8)
def _compiled_score(program: LocalProgram) -> Callable[..., Params]:
    from fedblur.accel.compile import Compiled

    return Compiled(batched_score(program))


EngineName = Literal["auto", "vectorised", "sequential"]
_SMALL = 50_000  # parameters


class LocalEngine:
    """Clients simulated on one device."""

    def __init__(
        self, population: Population, device: torch.device, vectorise: bool, block_size: int, how: How = "plain"
    ) -> None:
        self.population = population
        self.device = device
        self.vectorise = vectorise
        self.block_size = block_size
        self.how = how
        self.fixed = False  # whether the block's size may not change any more

    def __repr__(self) -> str:
        kind = "vectorised" if self.vectorise else "sequential"
        made = "" if self.how == "plain" else f", {self.how}"
        return f"{kind}{made}, blocks of up to {self.block_size} clients on {self.device}"

    def map_clients(self, job: ClientJob, ids: Tensor, rng: Rng) -> Iterator[Block]:
        if not len(ids):
            return
        shard = self.population.fetch(ids)
        waiting = torch.argsort(shard.sizes, stable=True)  # clients of like size share a block: less padding
        cramped = False
        while len(waiting):
            chosen = waiting[: self.block_size]
            try:
                block = self._train(job, shard, ids, chosen, rng)
            except torch.OutOfMemoryError as error:
                self.make_room(cramped, error)
                cramped = True
                continue
            yield block
            cramped = False
            waiting = waiting[len(chosen) :]

    def make_room(self, cramped: bool, error: torch.OutOfMemoryError) -> None:
        """Free memory after it ran out; raise a ModelError if a block of one client does not fit.

        Recorded steps are let go first; where that did not help or there are none, the block is halved. The same block
        records its steps again: to let those go again and again would never end.
        """
        if not forget_recordings() or cramped:
            if self.fixed:
                raise ModelError(
                    f"the memory of {self.device} ran out in a round; a private run keeps the size of its blocks "
                    f"({self.block_size} clients) within a round: fedblur resume goes on with smaller ones"
                ) from error
            if self.block_size == 1:
                raise ModelError(
                    f"one client's local training does not fit into the memory of {self.device}: "
                    "use a smaller local.batch_size, a smaller model, or --device cpu"
                ) from error
            self.block_size //= 2
        torch.cuda.empty_cache()

    def _train(self, job: ClientJob, shard: Shard, ids: Tensor, chosen: Tensor, rng: Rng) -> Block:
        fill = self.block_size - len(chosen) if self.vectorise else 0
        part = Shard(shard.x, shard.y, pad(shard.starts[chosen], (0, fill)), pad(shard.sizes[chosen], (0, fill)))
        names = pad(ids[chosen], (0, fill), value=-1)
        work = plan_work(part, names, job.local.steps, job.local.batch_size, rng, self.device)
        if job.personal is not None:
            own = job.personal.rows.read(ids[chosen].cpu())
            work = replace(work, personal=pad(own, (0, 0, 0, fill)).to(self.device))
        block = self.train(job, part, work)
        count, bounded = len(chosen), block.bounded
        if job.personal is not None and block.personal is not None:
            job.personal.rows.write(ids[chosen].cpu(), block.personal[:count])
        if not fill:
            return block
        kept = Bounded(bounded.value[:count], bounded.l2_bound)  # without the empty clients that filled the block up
        return replace(block, bounded=kept, trained_norms=block.trained_norms[:count], norms=block.norms[:count])

    def train(self, job: ClientJob, shard: Shard, work: Work) -> Block:
        """Train one block. On a CPU in one thread: several would cut tensors in the middle of a client."""
        before = torch.get_num_threads()
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        try:
            remembers = any(method.client_state(job.layout) for method in job.methods)  # which no faster way knows
            steps = steps_for(job.program, "plain" if remembers else self.how) if self.vectorise else None
            return train_block(job, shard, work, self.vectorise, steps)
        finally:
            if self.device.type == "cpu":
                torch.set_num_threads(before)


def forget_recordings() -> bool:
    """Give the memory of recorded steps back, of earlier runs in this process too. False where there was none."""
    recorder = sys.modules.get("fedblur.accel.cuda_graph")  # if nothing imported it, nothing was recorded
    return recorder is not None and bool(recorder.forget_recordings())


@contextmanager
def suitable_threads(device: torch.device, dimension: int) -> Iterator[None]:
    """Set one intra-op thread for small models on a CPU.

    Threads that wait for each other on tiny tensors collapse as soon as another process is busy: 10 times slower.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if device.type == "cpu" and dimension < _SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
