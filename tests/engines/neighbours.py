"""Neighbouring populations: does one client change what others send, and by how much does it move the integer sum?

    python -m tests.engines.neighbours --count 10000          every engine, about 15 minutes each
    python -m tests.engines.neighbours --models own           recurrent layers, attention, frozen parts

Each trial draws a model, methods, local training and a cohort, at random or as an adversary would choose them, and runs
the engine with and without one target client. A violation is another client's message that differs in any bit, a sum
that moves by more than S (compared in whole numbers), or a sum that moves by anything but the target's own message.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor, nn

from fedblur.core.config import LocalTraining
from fedblur.core.rng import Seeded
from fedblur.data.population import Packed
from fedblur.engines import Engine, LocalEngine, WorkerEngine
from fedblur.learning.client import ClientJob
from fedblur.learning.methods import Method
from fedblur.learning.methods.blur import Blur
from fedblur.learning.methods.lus import Lus
from fedblur.learning.methods.sam import Sam
from fedblur.privacy.mechanisms.base import Release
from fedblur.privacy.mechanisms.gaussian import FixedPoint, Gaussian
from tests.worlds import CPU, Recurrent, SmallCnn, Transformer, adapted, job_for

ENGINES: dict[str, Callable[[Packed, int], Engine]] = {
    "vectorised": lambda population, block: LocalEngine(population, CPU, True, block),
    "traced": lambda population, block: LocalEngine(population, CPU, True, block, "traced"),
    "sequential": lambda population, block: LocalEngine(population, CPU, False, block),
    "workers": lambda population, block: WorkerEngine(population, block, workers=2),
}
METHODS: tuple[tuple[Method, ...], ...] = ((), (Blur(0.4), Lus(0.7)), (Blur(0.4),), (Sam(0.05), Lus(0.5)))
KINDS = ("random", "chaotic copies", "huge target", "one sample each", "long target")
CLIP_NORM, SIGMA = 0.1, 1.0


@dataclass
class Counts:
    """What many trials found."""

    trials: int = 0
    messages: int = 0  # of other clients, compared
    touched: int = 0  # of these, how many differ in any bit
    too_far: int = 0  # sums that move by more than S
    not_its_own: int = 0  # sums that do not move by just the target's message
    largest: float = 0.0  # how far a sum moved, in S

    @property
    def violations(self) -> int:
        return self.touched + self.too_far + self.not_its_own


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def logistic() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def recurrent() -> nn.Module:
    return Recurrent(nn.LSTM)


MODELS: dict[str, tuple[Callable[[], nn.Module], ...]] = {
    "library": (dense, logistic, SmallCnn),
    "own": (recurrent, Transformer, adapted),
}


def job_of(trial: int, models: str = "library") -> ClientJob:
    """Return one of a dozen jobs, so that traced code is met again."""
    local = LocalTraining(steps=(2, 12)[trial % 2], batch_size=8, learning_rate=(0.1, 2.0)[trial % 2])
    torch.manual_seed(trial % 3)
    module = MODELS[models][trial % 3]()
    return job_for(module, METHODS[trial % 4], CLIP_NORM, local)


def population_of(kind: str, draw: np.random.Generator) -> Packed:
    """Return a population whose last client is the target."""
    others = int(draw.integers(1, 12))
    sizes = draw.choice([1, 2, 7, 9, 40], others + 1)
    if kind in ("one sample each", "chaotic copies"):
        sizes[:-1] = 1
    if kind in ("long target", "chaotic copies"):
        sizes[-1] = draw.integers(60, 200)
    x = draw.normal(size=(int(sizes.sum()), 1, 8, 8)).astype(np.float32)
    y = draw.integers(0, 10, len(x))
    if kind == "chaotic copies":
        x[:others], y[:others] = x[0], y[0]
    if kind == "huge target":
        x[len(x) - int(sizes[-1]) :] *= np.float32(10.0 ** draw.integers(5, 38))
        x = np.clip(x, -3e38, 3e38)
    counts = torch.from_numpy(sizes)
    return Packed(torch.from_numpy(x), torch.from_numpy(y), torch.cumsum(counts, 0) - counts, counts, 10)


def count_violations(engine: str, trials: int, seed: int = 0, models: str = "library") -> Counts:
    """Run so many trials on one engine."""
    found = Counts()
    jobs = {trial: job_of(trial, models) for trial in range(12)}
    for trial in range(trials):
        draw = np.random.default_rng((seed, trial))
        population = population_of(KINDS[int(draw.integers(len(KINDS)))], draw)
        made = ENGINES[engine](population, 32 * int(draw.integers(1, 3)))
        _compare(found, made, jobs[int(draw.integers(12))], population, trial)
    return found


def _compare(found: Counts, engine: Engine, job: ClientJob, population: Packed, trial: int) -> None:
    everyone, rng = torch.arange(population.clients), Seeded.root(trial)
    target = population.clients - 1
    with_it, without = (messages(engine, replace(job), population, ids, rng) for ids in (everyone, everyone[:-1]))
    found.trials += 1
    found.messages += len(without)
    found.touched += sum(not same_bits(row, with_it[client]) for client, row in without.items())
    grid = FixedPoint.of(Release(job.layout.total, CLIP_NORM, SIGMA, len(everyone), CPU))
    moved = _sum(with_it, job) - _sum(without, job)
    steps = Fraction(CLIP_NORM) / Fraction(grid.step)
    squared = sum(int(v) ** 2 for v in moved[moved != 0].tolist())
    found.too_far += squared > steps**2
    found.not_its_own += not torch.equal(moved, _sum({target: with_it[target]}, job))
    found.largest = max(found.largest, float(squared / steps**2) ** 0.5)


def messages(engine: Engine, job: ClientJob, population: Packed, ids: Tensor, rng: Seeded) -> dict[int, Tensor]:
    """Return each client's message; engines take clients in the order of their sizes."""
    order = ids[torch.argsort(population.sizes[ids], stable=True)].tolist()
    rows = [row.clone() for block in engine.map_clients(job, ids, rng) for row in block.bounded.value]
    return dict(zip(order, rows, strict=True))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def _sum(rows: dict[int, Tensor], job: ClientJob) -> Tensor:
    """Return the mechanism's own sum, [d] int64."""
    from fedblur.privacy.clipping import Bounded

    release = Release(job.layout.total, CLIP_NORM, SIGMA, len(rows), CPU)
    blocks: Iterator[Bounded] = iter([Bounded(torch.stack(list(rows.values())), CLIP_NORM)] if rows else [])
    return Gaussian().accumulate(blocks, release, Seeded.root(0))


def table(found: dict[str, Counts]) -> str:
    """Return the counts as a table for docs/isolation.md."""
    head = (
        "| engine | pairs of populations | messages of others | of these, a bit differs | sum moved by more than S | "
        "by anything but the target | largest move, S |"
    )
    rows = [
        f"| {engine} | {c.trials:,} | {c.messages:,} | {c.touched} | {c.too_far} | {c.not_its_own} | {c.largest:.6f} |"
        for engine, c in found.items()
    ]
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="trials for each engine")
    parser.add_argument("--engine", choices=[*ENGINES], action="append", help="default: all")
    parser.add_argument("--models", choices=[*MODELS], default="library")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Counts] = {}
    for engine in given.engine or [*ENGINES]:
        found[engine] = count_violations(engine, given.count, given.seed, given.models)
        print(table({engine: found[engine]}).splitlines()[-1], flush=True)
    return min(1, sum(counts.violations for counts in found.values()))


if __name__ == "__main__":
    sys.exit(main())
