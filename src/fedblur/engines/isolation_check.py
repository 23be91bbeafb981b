"""A check at the start of a private run: does anything that one client sends depend on who shares its block?

In: an engine and a round's job. Out: whether any bit differs. Made-up clients are trained, nobody's data.

A block has a constant shape, so the sum's sensitivity holds as long as every kernel computes a client's row from that
row alone. No library promises this for all shapes and machines. Tests show it for the models and methods that we ship
(tests/engines/test_isolation_check.py); this check looks at the model, the methods and the machine at hand.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedblur.core.rng import Seeded
from fedblur.data.population import Samples, Shard, each_input, made_up, tensors_of
from fedblur.engines.local import LocalEngine
from fedblur.learning.batches import plan_work
from fedblur.learning.client import ClientJob, train_block

_STEPS = 2  # local steps of the check
_LOUD = 1e4  # inputs of neighbours that an adversary might choose


def clients_interfere(engine: LocalEngine, job: ClientJob, like: Samples, classes: int) -> bool:
    """Train two made-up clients among different neighbours and in different places; True where any bit differs.

    `like`: held-out samples, whose shapes and types those of the clients have.
    """
    cramped = False
    while True:
        try:
            return _differ(engine, job, like, classes)
        except torch.OutOfMemoryError as error:
            engine.make_room(cramped, error)
            cramped = True


def cannot_map(job: ClientJob, like: Samples, classes: int, device: torch.device) -> str:
    """Return why `vmap` refuses a job's model, "" if it does not: one step of two made-up clients shows it.

    Methods take no part: their hooks are safe under `vmap` by contract, and one that is not is an error at its line.
    A model that fails without `vmap` too raises its own error here.
    """
    local = replace(job.local, steps=1, batch_size=min(2, job.local.batch_size))
    alone = replace(job, local=local, methods=())
    own, two = made_up(like, 4, classes, torch.Generator().manual_seed(0)), torch.arange(2)
    x, y = each_input(own.x, lambda x: x.to(device)), own.y.to(device)
    shard = Shard(x, y, 2 * two, torch.full((2,), 2))
    work = plan_work(shard, two, local.steps, local.batch_size, Seeded.root(0), device)
    if job.personal is not None:
        work = replace(work, personal=job.personal.initial.repeat(2, 1).to(device))
    try:
        train_block(alone, shard, work, vectorise=True)
    except torch.OutOfMemoryError:
        return ""  # whoever makes the engine deals with that
    except Exception as error:  # whatever a foreign model raises
        train_block(alone, shard, work, vectorise=False)
        reason = str(error)
        if ".item()" in reason or "data-dependent" in reason:  # torch's own sentence is long, and about functions
            return "it branches on a tensor's values, or calls .item()"
        return (reason.splitlines() or [type(error).__name__])[0][:120]
    return ""


def _differ(engine: LocalEngine, job: ClientJob, like: Samples, classes: int) -> bool:
    block = engine.block_size
    if not engine.vectorise or block == 1:
        return False  # one client at a time: nothing is shared
    shard, probes = _made_up(job.local.batch_size, block, like, classes)
    quiet, loud, empty = (torch.arange(block - 1) + first for first in (2, 1 + block, 2 * block))
    orders = [(p, neighbours) for p in probes for neighbours in (empty, quiet, loud)]
    seen: dict[int, Tensor] = {}
    for which, (probe, neighbours) in enumerate(orders):
        place = (0, block // 2, block - 1)[which % 3]
        order = torch.cat([neighbours[:place], torch.tensor([probe]), neighbours[place:]])
        x, y = each_input(shard.x, lambda x: x.to(engine.device)), shard.y.to(engine.device)
        part = Shard(x, y, shard.starts[order], shard.sizes[order])
        work = plan_work(part, order, _STEPS, job.local.batch_size, Seeded.root(0), engine.device)
        if job.personal is not None:
            own = job.personal.initial.repeat(block, 1)
            own[torch.isin(order, loud)] += _LOUD
            work = replace(work, personal=own.to(engine.device))
        trained = engine.train(job, part, work)
        message = trained.bounded.value.clone()[place]
        if trained.personal is not None:
            message = torch.cat([message, trained.personal[place]])
        if not torch.equal(seen.setdefault(probe, message).view(torch.int32), message.view(torch.int32)):
            return True
    return False


def _made_up(batch: int, block: int, like: Samples, classes: int) -> tuple[Shard, tuple[int, int]]:
    """Make up two probes, a block of quiet neighbours of all sizes, a block of loud and a block of empty ones."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 2 * batch + 2, (2 * block,), generator=generator)
    sizes[0], sizes[1] = max(1, batch - 1), batch + 1
    own = made_up(like, int(sizes.sum()), classes, generator)
    sizes = torch.cat([sizes, torch.zeros(block, dtype=torch.int64)])
    starts = torch.cumsum(sizes, 0) - sizes
    for values in (*tensors_of(own.x), own.y):
        if values.is_floating_point():  # not tokens, classes or the pixels of images
            values[int(starts[1 + block]) :] *= _LOUD
    return Shard(own.x, own.y, starts, sizes), (0, 1)
