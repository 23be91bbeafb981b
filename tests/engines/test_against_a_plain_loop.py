"""Every engine of this machine against an ordinary PyTorch loop over clients: updates, and sums of clipped ones."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from fedblur.core.config import LocalTraining
from fedblur.core.registry import build
from fedblur.core.rng import Seeded
from fedblur.data.population import Packed
from fedblur.engines import LocalEngine, WorkerEngine
from fedblur.learning.client import ClientJob
from fedblur.learning.models import make_model
from tests.worlds import CPU, SmallCnn, job_for, packed, work_for

SIZES = [1, 3, 8, 20, 33, 8, 5]
LOCAL = LocalTraining(steps=12, batch_size=8, learning_rate=0.1, momentum=0.5, weight_decay=0.01)
ENGINES = {
    "vectorised": lambda population: LocalEngine(population, CPU, True, 3),
    "traced": lambda population: LocalEngine(population, CPU, True, 3, "traced"),
    "sequential": lambda population: LocalEngine(population, CPU, False, 3),
    "workers": lambda population: WorkerEngine(population, 3, workers=2),
}
MODELS = {
    "mlp": lambda: make_model(build("model", {"name": "mlp", "hidden": (16,)}), (1, 8, 8), 10, seed=0),
    "cnn": lambda: make_model(build("model", {"name": "cnn", "dropout": False}), (1, 12, 12), 10, seed=0),
    "groupnorm": lambda: SmallCnn(dropout=0.0),
}


def by_a_loop(module: nn.Module, job: ClientJob, population: Packed) -> Tensor:
    """[clients, d]: torch.optim on a copy of the module, one client after another, on the batches of the plan."""
    _, work = work_for(job, population, [*range(len(SIZES))])
    vector, updates = nn.utils.parameters_to_vector, []
    for plan in work.plan:
        own = copy.deepcopy(module).train()
        optimiser = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
        for batch in plan:
            chosen = batch[batch >= 0]
            optimiser.zero_grad()
            nn.functional.cross_entropy(own(population.x[chosen]), population.y[chosen]).backward()
            optimiser.step()
        updates.append(vector(own.parameters()).detach() - vector(module.parameters()).detach())
    return torch.stack(updates)


def by_engine(name: str, job: ClientJob, population: Packed) -> Tensor:
    """[clients, d], small clients first."""
    blocks = ENGINES[name](population).map_clients(job, torch.arange(len(SIZES)), Seeded.root(0))
    return torch.cat([block.bounded.value for block in blocks])


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_engine__is_a_plain_loop_over_clients(engine: str, model: str) -> None:
    torch.manual_seed(0)
    module = MODELS[model]()
    population = packed(
        SIZES, (1, 12, 12) if model == "cnn" else (1, 8, 8), seed=3
    )  # nobody oscillates: 2e-6 is the worst
    unclipped = job_for(module, clip_norm=math.inf, local=LOCAL)
    expected = by_a_loop(module, unclipped, population)[torch.argsort(torch.tensor(SIZES), stable=True)]
    found = by_engine(engine, unclipped, population)
    assert max(off(*pair) for pair in zip(found, expected, strict=True)) < 1e-5
    norms = expected.norm(dim=1, keepdim=True)
    bound = float(norms.median())  # some are clipped, some are not
    clipped = by_engine(engine, job_for(module, clip_norm=bound, local=LOCAL), population)
    assert off(clipped.sum(0), (expected * (bound / norms).clamp(max=1)).sum(0)) < 1e-5
