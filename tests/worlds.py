"""Small worlds that tests share: packed clients, jobs, engines."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn

from fedblur.core.config import LocalTraining
from fedblur.core.rng import Seeded
from fedblur.data.population import Packed, Shard
from fedblur.learning.batches import Work, plan_work
from fedblur.learning.client import ClientJob
from fedblur.learning.methods import Method
from fedblur.learning.module_function import Layout, as_function, initial_vector
from fedblur.privacy.claim import Claim
from fedblur.training.run_folder import RunSummary

CPU = torch.device("cpu")


def calls(task: Callable[..., object], *values: object, **options: object) -> int:
    """Count the functions that a task calls, in this thread: its work, however busy the machine is."""
    count = 0

    def notice(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        task(*values, **options)
    finally:
        sys.setprofile(before)
    return count


def packed(sizes: list[int], shape: tuple[int, ...] = (1, 8, 8), classes: int = 10, seed: int = 0) -> Packed:
    """Random clients of these sizes; each has its own pattern per class, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    y = torch.randint(0, classes, (total,), generator=generator)
    patterns = torch.randn(classes, *shape, generator=generator)
    x = patterns[y] + 0.5 * torch.randn(total, *shape, generator=generator)
    counts = torch.tensor(sizes)
    return Packed(x, y, torch.cumsum(counts, 0) - counts, counts, classes)


def job_for(
    module: nn.Module,
    methods: tuple[Method, ...] = (),
    clip_norm: float = 0.5,
    local: LocalTraining | None = None,
) -> ClientJob:
    layout = Layout.of(module)
    local = local or LocalTraining(steps=6, batch_size=8, learning_rate=0.1)
    start = layout.unflatten(initial_vector(module))
    return ClientJob(as_function(module.train()), layout, start, local, methods, clip_norm)


def work_for(job: ClientJob, population: Packed, ids: list[int], seed: int = 0) -> tuple[Shard, Work]:
    chosen = torch.tensor(ids)
    shard = population.fetch(chosen)
    return shard, plan_work(shard, chosen, job.local.steps, job.local.batch_size, Seeded.root(seed))


class SmallCnn(nn.Module):
    """A convolution, GroupNorm and dropout: everything that could behave differently under vmap."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)  # a bias before a norm has scores of pure rounding
        self.norm = nn.GroupNorm(2, 4)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(4 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.max_pool2d(x, 2)
        return self.head(self.drop(x.flatten(1)))


class Recurrent(nn.Module):
    """A recurrent network with dropout between its layers; it reads the first rows of an image."""

    def __init__(self, kind: type[nn.RNNBase], **options: bool) -> None:
        super().__init__()
        self.layers = kind(8, 6, num_layers=2, dropout=0.5, batch_first=True, **options)
        self.head = nn.Linear(12 if options else 6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(x.flatten(1, 2)[:, :3])[0][:, -1])
        return logits


class Transformer(nn.Module):
    """A stock layer, with dropout in attention, feed-forward and residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layer(x.flatten(1, 2)).mean(1))
        return logits


def adapted() -> nn.Module:
    """Return a transformer of which little is trained: its head, and a small layer beside a frozen one."""
    module = Transformer()
    module.requires_grad_(False)
    module.register_buffer("scale", torch.linspace(0.5, 1.5, 10))
    module.head = Beside(nn.Linear(8, 10).requires_grad_(False))
    return module


class Beside(nn.Module):
    """A frozen layer plus a product of two small ones, as LoRA's (Hu et al. 2021)."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down, self.up = nn.Linear(frozen.in_features, 2), nn.Linear(2, frozen.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


def record_of_a_run(accuracy: float = 0.5, clipped_share: float | None = 0.5) -> RunSummary:
    """The summary of an invented run."""
    claim = Claim(
        warning=None, epsilon=2.0, delta=0.01, accountant="pld", adjacency="add or remove one client", sampling="all",
        mechanism="gaussian", noise_multiplier=1.0, clip_norm=0.1, expected_cohort=10.0, releases=5,
        trust_model="a server", tuning="none", signal_to_noise=1.0,
    )  # fmt: skip
    return RunSummary(
        status="complete", rounds=5, accuracy=accuracy, loss=1.0, accuracy_last_10_evaluations=accuracy,
        evaluated_on="test", data="digits", data_note="", clients=100, parameters=650, privacy=claim,
        local_only={"clipped_share": clipped_share}, seconds=1.0, versions={"fedblur": "0"},
    )  # fmt: skip
