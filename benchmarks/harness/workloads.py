"""What is measured: models, cohorts and the inputs that all systems share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peers.ours import SEED
from peers.task import Task
from torch import Tensor

from fedblur.core.registry import build
from fedblur.core.rng import Seeded
from fedblur.data.population import Shard
from fedblur.learning.batches import plan_work
from fedblur.learning.models import make_model
from fedblur.learning.module_function import Layout, initial_vector


@dataclass(frozen=True)
class Workload:
    """A model and a cohort. Each client owns steps × batch samples and reads each of them once.

    A ReLU or a max-pool that sits on its kink to within a rounding error sends the gradient one way in one library and
    another way in the next: with 320 different images a client that happens in every round, and correct sums differ by
    1e-3. So a client of W repeats one image under changing labels, which costs the same time, and `seed` is one for
    which no unit is that close.
    """

    name: str
    words: str
    model: dict[str, object]
    shape: tuple[int, ...]
    classes: int
    clients: int
    steps: int
    batch: int
    learning_rate: float
    clip_norm: float  # S, near the median norm, so that some updates are clipped and some are not
    distinct: int  # samples of a client that differ
    seed: int = 1

    def task(self) -> Task:
        """The inputs: random samples, initial weights, and the index plan of our own engine."""
        x, y = self._samples()
        sizes = torch.full((self.clients,), self.steps * self.batch)
        shard = Shard(x, y, torch.cumsum(sizes, 0) - sizes, sizes)
        work = plan_work(shard, torch.arange(self.clients), self.steps, self.batch, Seeded.root(SEED))
        module = make_model(build("model", self.model), self.shape, self.classes, seed=0)
        layout = Layout.of(module)
        return Task(
            model=str(self.model["name"]),
            shape=self.shape,
            classes=self.classes,
            learning_rate=self.learning_rate,
            clip_norm=self.clip_norm,
            names=layout.names,
            shapes=layout.shapes,
            start=initial_vector(module).numpy(),
            x=x.numpy(),
            y=y.numpy(),
            plan=work.plan.numpy(),
        )

    def _samples(self) -> tuple[Tensor, Tensor]:
        """Each client's samples, one client after another; a client's labels are of three classes."""
        generator, own = torch.Generator().manual_seed(self.seed), self.steps * self.batch
        x = torch.randn((self.clients, self.distinct, *self.shape), generator=generator)
        x = x.repeat(1, own // self.distinct, *[1] * len(self.shape)).flatten(0, 1)
        classes = torch.randint(0, self.classes, (self.clients, 3), generator=generator)
        y = classes.gather(1, torch.randint(0, 3, (self.clients, own), generator=generator))
        return x, y.flatten()


WORKLOADS = (
    Workload(
        "W",
        "CNN-A on 28×28×1 with 62 classes, 8 clients × 5 steps × batch 64",
        {"name": "cnn", "variant": "a", "dropout": False},
        (1, 28, 28),
        62,
        clients=8,
        steps=5,
        batch=64,
        learning_rate=0.03,
        clip_norm=0.625,
        distinct=1,
        seed=3,
    ),
    Workload(
        "W-small",
        "MLP 64-32-10, 100 clients × 10 steps × batch 8",
        {"name": "mlp", "hidden": (32,)},
        (64,),
        10,
        clients=100,
        steps=10,
        batch=8,
        learning_rate=0.3,
        clip_norm=2.9,
        distinct=80,
    ),
)
