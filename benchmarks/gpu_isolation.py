"""On a GPU: do clients touch each other, what does exact noise cost, and do the attacks stay at chance?

    PYTHONPATH=src:. python benchmarks/gpu_isolation.py [--json FILE] [--models NAME ...]

For each family of models, plain and compiled, in fp32 and bf16: every other client's message with and without one
client of 1 and of 150 samples, in blocks of three sizes, compared bit for bit, and one block run twice. Then a private
round of CNN-B (136 clients × 30 steps × batch 64, bf16, compiled) beside a seeded one, in turns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from private_rounds import rounds
from torch import nn

from fedblur.core.config import LocalTraining
from fedblur.core.registry import build
from fedblur.core.rng import Seeded
from fedblur.engines import LocalEngine
from fedblur.engines.local import How
from fedblur.learning.models import make_model
from tests.engines.neighbours import METHODS, messages, same_bits
from tests.engines.test_isolation_check import FAMILIES
from tests.worlds import job_for, packed

CUDA = torch.device("cuda")
BLOCKS = (8, 16, 40)


def large(name: str) -> nn.Module:
    return make_model(build("model", name), (1, 28, 28), 10, seed=0)


def touched(module: nn.Module, half: bool, how: How, shape: tuple[int, ...], batch: int) -> dict[str, int]:
    """Count messages of other clients that differ: with and without a target, by the block's size, and run again."""
    found = {"compared": 0, "with and without": 0, "by block size": 0, "run twice": 0}
    local = LocalTraining(steps=4, batch_size=batch, learning_rate=0.5)
    job = job_for(module.to(CUDA), METHODS[1], 0.1, local)
    job.forward.half = half  # type: ignore[attr-defined]
    for target in (1, 150):
        population = packed([1, 3, 9, 1, 20, batch, target], shape).to(CUDA)
        ids, reference = torch.arange(7), {}
        for block in BLOCKS:
            engine = LocalEngine(population, CUDA, True, block, how)
            whole, again, without = (
                messages(engine, job, population, some, Seeded.root(3)) for some in (ids, ids, ids[:-1])
            )
            reference = reference or without
            found["compared"] += len(without)
            found["with and without"] += sum(not same_bits(row, whole[i]) for i, row in without.items())
            found["run twice"] += sum(not same_bits(row, whole[i]) for i, row in again.items())
            found["by block size"] += sum(not same_bits(row, reference[i]) for i, row in without.items())
    return found


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    **{name: (make, (1, 8, 8), 8) for name, make in FAMILIES.items()},
    **{f"{name}-28": (partial(large, name), (1, 28, 28), 64) for name in ("cnn", "gn_cnn")},
}


def isolation(models: list[str]) -> Iterator[dict[str, Any]]:
    """Give a row for each model, precision and way to run."""
    for name in models:
        make, shape, batch = CASES[name]
        for half in (False, True):
            for how in ("plain", "compiled"):
                torch.manual_seed(0)
                row: dict[str, Any] = {"model": name, "bf16": half, "how": how}
                try:
                    row |= touched(make(), half, how, shape, batch)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                print(row, flush=True)
                yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", choices=[*CASES], help="default: all")
    given = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def keep() -> None:
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")

    found["rounds"] = rounds()
    print(found["rounds"], flush=True)
    keep()
    found["isolation"] = []
    for row in isolation(given.models or list(CASES)):
        found["isolation"].append(row)
        keep()


if __name__ == "__main__":
    main()
