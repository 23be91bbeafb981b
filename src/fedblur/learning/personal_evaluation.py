"""Figures of clients' own models on their own held-out samples: what personal parts are for (docs/personal.md).

Each client is measured with its own row and nobody else's. Rows were trained without noise, so these figures are
`local_only`: no ε covers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fedblur.core.rng import Rng
from fedblur.data.population import Federation, Inputs, as_input, each_input
from fedblur.learning.batches import plan_work
from fedblur.learning.client import ClientJob, train_block
from fedblur.learning.evaluation import Measured, added_up
from fedblur.learning.methods import Method
from fedblur.learning.metrics import Metric
from fedblur.learning.module_function import Params, evaluating
from fedblur.learning.personal import Personal
from fedblur.learning.randomness import SeededRandomness

RowsOf = Callable[[Tensor], Tensor]  # clients -> what each keeps, [clients, k]
_AT_ONCE = 64  # clients


@dataclass(frozen=True)
class Alone(Method):
    """Train the personal part with the shared one fixed."""

    def moves(self, step: Tensor | int) -> tuple[Tensor | bool, Tensor | bool]:
        return False, True


def measure_personal(
    job: ClientJob,
    rows_of: RowsOf,
    federation: Federation,
    metrics: Sequence[Metric],
    steps: int,
    rng: Rng,
    vectorise: bool,
) -> Measured | None:
    """Return metrics and mean loss over all held-out samples that belong to a training client; None if none does.

    `job`: of the model that is measured. `steps`: local steps of the personal part alone, on a client's own training
    samples, before it is measured; what they change is not kept.
    """
    owners = federation.test_owners
    if job.personal is None or owners is None or not bool((owners >= 0).any()):
        return None
    return added_up(
        _predictions(job, job.personal, rows_of, federation, owners, steps, rng, vectorise), job.task, metrics
    )


def _predictions(
    job: ClientJob, personal: Personal, rows_of: RowsOf, federation: Federation, owners: Tensor, steps: int, rng: Rng,
    vectorise: bool,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Yield (outputs, targets) of clients' own samples, a block of clients at a time."""
    device, test = next(iter(job.start.values())).device, federation.test
    order = torch.argsort(owners, stable=True)
    order = order[owners[order] >= 0]  # client by client
    clients, sizes = torch.unique_consecutive(owners[order], return_counts=True)
    starts = torch.cumsum(sizes, 0) - sizes
    for block in torch.split(torch.argsort(sizes, stable=True), _AT_ONCE):  # of like size: less padding
        ids = clients[block]
        own = rows_of(ids)
        if steps:
            own = adapted(job, federation, ids, own, steps, rng, vectorise)
        place = torch.arange(int(sizes[block].max()))
        valid = place < sizes[block][:, None]  # [clients, width]
        samples = order[torch.where(valid, starts[block][:, None] + place, starts[block][:, None])]

        def read(x: Tensor, samples: Tensor = samples) -> Tensor:
            return x[samples.to(x.device)].to(device)

        inputs, theta = as_input(each_input(test.x, read)), personal.parameters_of(own.to(device))
        with torch.no_grad():
            outputs = _outputs(job, theta, inputs, vectorise)[valid.to(device)]
            yield job.task.merge(outputs[None]), test.y[samples[valid].to(test.y.device)].to(device)


def _outputs(job: ClientJob, theta: Params, inputs: Inputs, vectorise: bool) -> Tensor:
    """Return what each client's own model makes of its own samples: [clients, width, ...]."""
    forward = evaluating(job.forward)

    def outputs_of(own: Params, x: Inputs) -> Tensor:
        with SeededRandomness(None):
            return forward(job.start | own, x)

    if vectorise:
        outputs: Tensor = torch.func.vmap(outputs_of)(theta, inputs)
        return outputs
    count = len(next(iter(theta.values())))
    alone = [({n: t[i] for n, t in theta.items()}, each_input(inputs, partial(_row, i))) for i in range(count)]
    return torch.stack([outputs_of(*each) for each in alone])


def _row(i: int, x: Tensor) -> Tensor:
    return x[i]


def adapted(
    job: ClientJob, federation: Federation, ids: Tensor, own: Tensor, steps: int, rng: Rng, vectorise: bool
) -> Tensor:
    """Return clients' rows after local steps of the personal part alone, on their own training samples."""
    device = next(iter(job.start.values())).device
    job = replace(job, local=replace(job.local, steps=steps), methods=(Alone(),))
    shard = federation.train.fetch(ids)
    shard = replace(shard, x=each_input(shard.x, lambda x: x.to(device)), y=shard.y.to(device))
    work = plan_work(shard, ids, steps, job.local.batch_size, rng, device)
    found = train_block(job, shard, replace(work, personal=own.to(device)), vectorise).personal
    assert found is not None
    return found
