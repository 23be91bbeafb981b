"""Every engine against an ordinary PyTorch loop with torch's own losses and Adam: updates, and sums of clipped ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedblur.core.config import LocalTraining
from fedblur.core.registry import build
from fedblur.data.population import Inputs, Packed, each_input
from fedblur.learning.client import ClientJob
from fedblur.learning.tasks import OwnLoss, Task
from tests.engines.test_against_a_plain_loop import ENGINES, SIZES, by_engine, off
from tests.task_worlds import LENGTH, TASK_WORLDS, TOKENS, Reader, log_cosh
from tests.worlds import job_for, work_for

LOCALS = {
    "sgd": LocalTraining(steps=6, batch_size=8, learning_rate=0.1, momentum=0.5, weight_decay=0.01),
    "adam": LocalTraining(
        steps=6, batch_size=8, learning_rate=0.01, optimizer="adam", betas=(0.8, 0.99), weight_decay=0.01
    ),
}


@dataclass(frozen=True)
class Case:
    """A task, its data, a model, and torch's own loss of a batch."""

    task: Task
    population: Packed
    module: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]  # of a batch: the mean over its samples


def by_position(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(o, t, ignore_index=-100) for o, t in zip(outputs, targets, strict=True)]).mean()


def mlp(width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, width))


def case(name: str) -> Case:
    """One of the cases; its clients have the sizes of `test_against_a_plain_loop.py`."""
    draw, total, sizes = torch.Generator().manual_seed(2), sum(SIZES), torch.tensor(SIZES)
    starts = torch.cumsum(sizes, 0) - sizes
    x = torch.randn(total, 6, generator=draw)
    number = x @ torch.linspace(-1, 1, 6)
    if name == "next-token":
        tokens = torch.randint(0, TOKENS, (total, LENGTH), generator=draw)
        y = torch.where(torch.rand(total, LENGTH, generator=draw) < 0.3, -100, tokens.roll(-1, 1))
        y[:, 0] = tokens[:, 1]  # torch's mean over no position would be NaN
        read: Inputs = {"tokens": tokens, "mask": (torch.rand(total, LENGTH, generator=draw) < 0.8).float()}
        return Case(build("task", "next-token"), Packed(read, y, starts, sizes, TOKENS), Reader, by_position)
    made: dict[str, tuple[Task, Tensor, int, Callable[[Tensor, Tensor], Tensor]]] = {
        "regression": (build("task", "regression"), number, 1, lambda o, t: F.mse_loss(o[:, 0], t)),
        "multilabel": (
            build("task", "multilabel"), torch.stack([number > 0, x[:, 0] > 0, x[:, 1] > 1], 1).long(), 3,
            lambda o, t: F.binary_cross_entropy_with_logits(o, t.float()),
        ),
        "own": (OwnLoss(log_cosh), number, 1, lambda o, t: torch.log(torch.cosh(o[:, 0] - t)).mean()),
        "ranking": (build("task", "ranking"), x.argmax(1), 6, F.cross_entropy),
    }  # fmt: skip
    task, y, width, loss = made[name]
    return Case(task, Packed(x, y, starts, sizes, 0 if y.is_floating_point() else width), mlp(width), loss)


def by_a_loop(found: Case, module: nn.Module, job: ClientJob, local: LocalTraining) -> Tensor:
    """[clients, d]: torch.optim on a copy of the module, one client after another, on the batches of the plan."""
    _, work = work_for(job, found.population, [*range(len(SIZES))])
    vector, updates = nn.utils.parameters_to_vector, []
    for plan in work.plan:
        own = copy.deepcopy(module).train()
        if local.optimizer == "adam":
            optimiser: torch.optim.Optimizer = torch.optim.Adam(
                own.parameters(), lr=local.learning_rate, betas=local.betas, weight_decay=local.weight_decay
            )
        else:
            optimiser = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
        for batch in plan:
            chosen = batch[batch >= 0]
            read = each_input(found.population.x, lambda x, chosen=chosen: x[chosen])
            optimiser.zero_grad()
            found.loss(own(**read) if isinstance(read, dict) else own(read), found.population.y[chosen]).backward()
            optimiser.step()
        updates.append(vector(own.parameters()).detach() - vector(module.parameters()).detach())
    return torch.stack(updates)


@pytest.mark.parametrize("optimiser", LOCALS)
@pytest.mark.parametrize("name", TASK_WORLDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_engine__trains_every_task_as_a_plain_loop_does(engine: str, name: str, optimiser: str) -> None:
    torch.manual_seed(0)
    found, local = case(name), LOCALS[optimiser]
    module = found.module()
    unclipped = replace(job_for(module, clip_norm=math.inf, local=local), task=found.task)
    expected = by_a_loop(found, module, unclipped, local)[torch.argsort(torch.tensor(SIZES), stable=True)]
    updates = by_engine(engine, unclipped, found.population)
    assert all(off(*pair) < 1e-5 for pair in zip(updates, expected, strict=True))
    norms = expected.norm(dim=1, keepdim=True)
    bound = float(norms.median())  # some are clipped, some are not
    clipped = by_engine(engine, replace(unclipped, clip_norm=bound), found.population)
    assert off(clipped.sum(0), (expected * (bound / norms).clamp(max=1)).sum(0)) < 1e-5
