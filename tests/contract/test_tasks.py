"""Contracts of every task that is registered: vmap equals loop, padding is nothing, finite, nothing read across."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedblur.core.config import LocalTraining
from fedblur.core.errors import DataError
from fedblur.core.registry import build, describe, parts
from fedblur.data.population import Packed
from fedblur.engines import LocalEngine
from fedblur.learning.client import train_block
from fedblur.learning.metrics import metrics_of
from fedblur.learning.tasks import OwnLoss, Task
from tests.engines.neighbours import same_bits
from tests.worlds import CPU, job_for, work_for

SIZES, CLASSES, LENGTH = [2, 5, 9], 4, 3
OPTIMISERS = {"sgd": {}, "adam": {"optimizer": "adam", "learning_rate": 0.01}}


def cubed(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of one's own."""
    return (outputs.reshape(targets.shape) - targets).abs() ** 3


VARIANTS = {
    "classification": ({},),
    "regression": ({}, {"kind": "absolute"}, {"kind": "huber"}),
    "ranking": ({}, {"kind": "pairwise"}),
}
TASKS: list[Task] = [OwnLoss(cubed)] + [
    build("task", {"name": name, **settings})
    for name in sorted(parts("task"))
    for settings in VARIANTS.get(name, ({},))
    if name != "own"
]


@pytest.fixture(params=TASKS, ids=str)
def task(request) -> Task:
    return request.param


class Positions(nn.Module):
    """Logits for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, LENGTH * 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)).unflatten(-1, (LENGTH, 5)))


def targets_for(task: Task, count: int, generator: torch.Generator) -> Tensor:
    """Targets that the task accepts: the first of a few kinds that it does not refuse."""
    tokens = torch.randint(0, CLASSES, (count, LENGTH), generator=generator)
    tokens[::3, -1] = -100
    kinds = [
        tokens,
        torch.randint(0, CLASSES, (count,), generator=generator),
        torch.randint(0, 2, (count, LENGTH), generator=generator),
        torch.randint(0, 2, (count,), generator=generator),
    ]
    if task.part_name in ("own", "regression"):
        return torch.randn(count, generator=generator)
    for targets in kinds:
        try:
            task.check_targets("y", targets, CLASSES)
        except DataError:
            continue
        return targets
    raise AssertionError(f"no targets for {task}")


def world(task: Task, sizes: list[int] = SIZES) -> Packed:
    generator, counts = torch.Generator().manual_seed(1), torch.tensor(sizes)
    y = targets_for(task, int(counts.sum()), generator)
    x = torch.randn(int(counts.sum()), 6, generator=generator)
    return Packed(x, y, torch.cumsum(counts, 0) - counts, counts, 0 if y.is_floating_point() else CLASSES)


def module_for(task: Task, population: Packed) -> nn.Module:
    torch.manual_seed(0)
    shapes = task.shapes(tuple(population.y.shape[1:]), CLASSES)
    if shapes and len(shapes[0]) == 2:
        return Positions()
    width = task.width(tuple(population.y.shape[1:]), population.classes)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, width))


def job_of(task: Task, population: Packed, clip_norm: float = 0.3, **local):
    training = LocalTraining(**{"steps": 6, "batch_size": 4, "learning_rate": 0.1, **local})
    return replace(job_for(module_for(task, population), (), clip_norm, training), task=task)


def updates(task: Task, population: Packed, ids: list[int], vectorise: bool = True, **local) -> Tensor:
    job = job_of(task, population, **local)
    return train_block(job, *work_for(job, population, ids), vectorise).bounded.value


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_task__vmap_equals_loop(task: Task, optimiser: str) -> None:
    """Padding included: alone, a client of two samples has batches of two, in a block batches of four."""
    together, alone = (updates(task, world(task), [0, 1, 2], v, **OPTIMISERS[optimiser]) for v in (True, False))
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("how", ["plain", "traced"])
def test_task__a_client_is_the_same_to_the_bit_whoever_shares_its_block(task: Task, how: str, optimiser: str) -> None:
    population = world(task, [3] + [1 + i % 9 for i in range(31)])
    loud = world(task, [3] + [1 + i % 9 for i in range(31)])
    loud.x[3:] *= 1e4
    if loud.y.is_floating_point():
        loud.y[3:] *= -1e4
    job, found = job_of(task, population, **OPTIMISERS[optimiser]), []
    for people, ids in (
        (population, [0, *range(1, 32)]),
        (loud, [*range(1, 17), 0, *range(17, 32)]),
        (population, [0]),
    ):
        engine = LocalEngine(people, CPU, True, 32, how)
        shard, work = work_for(job, people, ids)
        if len(ids) == 1:  # filled up with empty clients
            [block] = engine.map_clients(job, torch.tensor(ids), _rng())
        else:
            block = engine.train(job, shard, work)
        found.append(block.bounded.value[ids.index(0)])
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


def _rng():
    from fedblur.core.rng import Seeded

    return Seeded.root(0)


def test_task__padding_has_no_slope_whatever_its_loss_is(task: Task) -> None:
    """Outputs at padding may be NaN or infinite, and the loss there too: rows of weight 0 have slope 0, exactly."""
    population = world(task)
    outputs = module_for(task, population)(population.x).detach()
    weights = torch.ones(len(outputs))
    expected = task.slope(outputs[:5], population.y[:5], weights[:5])
    weights[5:] = 0.0
    for odd in (1e30, 0.0):
        outputs[5:] = odd
        slope = task.slope(outputs, population.y, weights)
        assert bool((slope[5:] == 0).all())
        torch.testing.assert_close(slope[:5], expected, rtol=1e-6, atol=0)


def test_task__slope_is_the_gradient_of_the_weighted_losses(task: Task) -> None:
    population = world(task)
    outputs = module_for(task, population)(population.x).detach().requires_grad_()
    weights = torch.rand(len(outputs), generator=torch.Generator().manual_seed(0))
    (expected,) = torch.autograd.grad((weights * task.loss(outputs, population.y)).sum(), outputs)
    torch.testing.assert_close(task.slope(outputs.detach(), population.y, weights), expected, rtol=1e-5, atol=1e-7)


def test_task__each_loss_depends_on_its_own_sample_alone(task: Task) -> None:
    population = world(task)
    outputs = module_for(task, population)(population.x).detach()
    together = task.loss(outputs, population.y)
    assert together.shape == (len(outputs),)
    for i in (0, 5):
        alone = task.loss(outputs[i : i + 1], population.y[i : i + 1])
        torch.testing.assert_close(alone[0], together[i], rtol=1e-6, atol=1e-7)
    assert float(task.total_loss(outputs, population.y)) == pytest.approx(float(together.double().sum()), rel=1e-5)


@pytest.mark.parametrize("odd", ["constant", "huge", "one sample"])
def test_task__finite_on_odd_data(task: Task, odd: str) -> None:
    population = world(task, [1, 1, 1] if odd == "one sample" else SIZES)
    if odd == "constant":
        population.x.fill_(1.0)
        population.y.fill_(0)
    if odd == "huge":
        population.x.mul_(1e30)
        if population.y.is_floating_point():
            population.y.mul_(1e30)
    for optimiser in OPTIMISERS.values():
        assert bool(torch.isfinite(updates(task, population, [0, 1, 2], **optimiser)).all())


def test_task__clip_is_last_and_empty_clients_send_zeros(task: Task) -> None:
    population = world(task)
    job = job_of(task, population, clip_norm=1e-3)
    block = train_block(job, *work_for(job, population, [0, 1, 2]), True)
    assert float(block.bounded.value.double().norm(dim=1).max()) <= 1e-3
    _, work = work_for(job, population, [0, 1])
    for optimiser in OPTIMISERS.values():
        empty = job_of(task, population, **optimiser)
        nobody = replace(work, plan=torch.full_like(work.plan, -1), samples=torch.full_like(work.samples, -1))
        assert not bool(train_block(empty, population.fetch(torch.tensor([0, 1])), nobody, True).bounded.value.any())


def test_task__reads_nothing_across_clients(task: Task) -> None:
    population = world(task)
    clean = updates(task, population, [1])
    population.x[:2] = math.nan
    population.x[7:] = math.nan
    if population.y.is_floating_point():
        population.y[:2], population.y[7:] = math.nan, math.nan
    assert torch.equal(updates(task, population, [1]), clean)


def test_task__refuses_targets_by_name(task: Task) -> None:
    broken = torch.tensor([0.5, math.nan])
    with pytest.raises(DataError, match="the y of ours"):
        task.check_targets("the y of ours", broken, CLASSES)


def test_task__has_metrics_that_go_with_it(task: Task) -> None:
    population = world(task)
    outputs = module_for(task, population)(population.x).detach()
    for metric in metrics_of(task, ()):
        metric.check(outputs, population.y)
        whole = metric.value(metric.count(outputs, population.y))
        halves = [metric.count(outputs[part], population.y[part]) for part in (slice(0, 7), slice(7, None))]
        assert metric.value(torch.cat(halves) if metric.keeps_rows else halves[0] + halves[1]) == pytest.approx(whole)
        outputs_of_nothing = torch.full_like(outputs, math.nan)
        worst = metric.score(metric.value(metric.count(outputs_of_nothing, population.y)))
        assert worst <= min(1e-9, metric.score(whole))


def test_task__survives_the_configuration(task: Task) -> None:
    if not isinstance(task, OwnLoss):
        assert build("task", describe(task)) == task
    assert build("task", describe(task)).part_name == task.part_name
