"""One client at a time on each core of a CPU: what convolutional models want there.

Each worker is a thread with one intra-op thread (torch releases the GIL while it computes) and a module of its own,
and everything is kept channels_last. A client is trained by one thread from the first step to the clip, and blocks are
made in the cohort's order: the result is the same, bit for bit, for any number of workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from queue import SimpleQueue

import torch
from torch import Tensor

from fedblur.accel.cpu import return_freed_memory, single_threads, usable_cores
from fedblur.accel.kernels.cpu_layers import SingleClientLayers
from fedblur.core.rng import Rng
from fedblur.data.population import Inputs, Population, Shard, each_input
from fedblur.learning.batches import Work, plan_work
from fedblur.learning.client import Block, ClientJob, join_blocks, one_client, train_alone
from fedblur.learning.module_function import Forward, ModuleFunction, Params, evaluating

_PLANNED = 256  # clients whose index plans are made together


class WorkerEngine:
    """Clients simulated on a CPU, one after another in each of a few threads."""

    vectorise = False

    def __init__(self, population: Population, block_size: int, workers: int | None = None) -> None:
        self.population = population
        self.device = torch.device("cpu")
        self.block_size = block_size
        self.workers = workers or usable_cores()

    def __repr__(self) -> str:
        return f"sequential, {self.workers} {'worker' if self.workers == 1 else 'workers'} on {self.device}"

    def map_clients(self, job: ClientJob, ids: Tensor, rng: Rng) -> Iterator[Block]:
        if not len(ids):
            return
        shard = self.population.fetch(ids)
        order = torch.argsort(shard.sizes, stable=True)  # as all engines: a client's number in the round is the same
        ids, shard = ids[order], Shard(shard.x, shard.y, shard.starts[order], shard.sizes[order])
        job, forwards = _replicas(job, shard, self.workers)

        def train(work: Work) -> Block:
            forward = forwards.get()
            try:
                return train_client(replace(job, forward=forward), shard, work)
            finally:
                forwards.put(forward)

        with single_threads(self.workers) as pool:
            done = _in_order(
                pool, train, self._works(job, shard, ids, rng), ahead=max(self.block_size, 2 * self.workers)
            )
            first = 0
            while blocks := list(islice(done, self.block_size)):
                block, part = join_blocks(blocks), ids[first : first + len(blocks)]
                if job.personal is not None and block.personal is not None:
                    job.personal.rows.write(part, block.personal)
                yield block
                first += len(blocks)

    def _works(self, job: ClientJob, shard: Shard, ids: Tensor, rng: Rng) -> Iterator[Work]:
        """Yield each client's work, without padding."""
        for first in range(0, len(ids), _PLANNED):
            if first:
                return_freed_memory()
            part = slice(first, first + _PLANNED)
            some = Shard(shard.x, shard.y, shard.starts[part], shard.sizes[part])
            work = plan_work(some, ids[part], job.local.steps, job.local.batch_size, rng, self.device)
            if job.personal is not None:
                work = replace(work, personal=job.personal.rows.read(ids[part]))
            for client, size in enumerate(some.sizes.tolist()):
                yield work.alone(client, size)


def train_client(job: ClientJob, shard: Shard, work: Work) -> Block:
    """Train one client; `job` and what it yields are channels_last inside."""
    return train_alone(job, one_client(job.program), shard, work)


def channels_last(tensor: Tensor) -> Tensor:
    """Return a batch of images or a convolution's weight with its channels innermost in memory.

    `contiguous(memory_format=channels_last)` leaves a tensor of one channel as it is, and all that follows stays NCHW.
    """
    if tensor.dim() != 4:
        return tensor
    return tensor.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)


def _replicas(job: ClientJob, shard: Shard, count: int) -> tuple[ClientJob, SimpleQueue[Forward]]:
    """Return the job and a forward function for each worker: channels_last if the model can read it."""
    forwards: SimpleQueue[Forward] = SimpleQueue()
    last = isinstance(shard.x, Tensor) and shard.x.dim() == 4 and _reads_channels_last(job, shard.x)
    for _ in range(count):
        own = job.forward.replica() if isinstance(job.forward, ModuleFunction) else job.forward
        forwards.put(_ChannelsLast(own) if last else own)
    start = {name: channels_last(tensor) if last else tensor for name, tensor in job.start.items()}
    return replace(job, start=start), forwards


class _ChannelsLast:
    """A forward function whose inputs are laid out anew, and whose layers are those for one core."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def __call__(self, theta: Params, x: Inputs) -> Tensor:
        with SingleClientLayers():
            return self.forward(theta, each_input(x, channels_last))

    @property
    def evaluating(self) -> Forward:
        return _ChannelsLast(evaluating(self.forward))


def _reads_channels_last(job: ClientJob, x: Tensor) -> bool:
    """Return whether the model runs channels last: one that calls `.view` on a feature map does not."""
    start = {name: channels_last(tensor) for name, tensor in job.start.items()}
    if all(tensor.dim() != 4 for tensor in start.values()):
        return False
    try:
        with torch.no_grad():
            evaluating(job.forward)(start, channels_last(torch.zeros(1, *x.shape[1:])))
    except RuntimeError:
        return False
    return True


def _in_order(
    pool: ThreadPoolExecutor, train: Callable[[Work], Block], works: Iterator[Work], ahead: int
) -> Iterator[Block]:
    """Yield results in the order of their work; only a few wait, so memory does not grow with the cohort."""
    waiting: deque[Future[Block]] = deque(pool.submit(train, work) for work in islice(works, ahead))
    while waiting:
        block = waiting.popleft().result()
        waiting.extend(pool.submit(train, work) for work in islice(works, 1))
        yield block
