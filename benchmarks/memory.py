"""The most memory that a round of 1000 CNN-B clients takes on the CPU. It must stay under 6 GiB.

    PYTHONPATH=src python benchmarks/memory.py [--clients 1000] [--steps 1] [--batch 64]

BLUR + LUS on EMNIST shapes, each client with one batch of noise; a client's memory does not grow with its steps.
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch

from fedblur.core.config import Config, LocalTraining
from fedblur.data.population import Federation, Packed, Samples
from fedblur.training.machine import Machine
from fedblur.training.round import run_round
from fedblur.training.setup import prepare

LIMIT = 6.0  # GiB


def clients_of(count: int, samples: int) -> Packed:
    """Clients of 28×28 images, as bytes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count * samples, 1, 28, 28), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 62, (count * samples,), generator=generator)
    sizes = torch.full((count,), samples)
    return Packed(x, y, torch.cumsum(sizes, 0) - sizes, sizes, 62)


def peak(clients: int, steps: int, batch: int) -> tuple[float, float, str]:
    """GiB at most, seconds of the round, and the engine in words."""
    train = clients_of(clients, batch)
    data = Federation("noise", train, None, 0, Samples(train.x[:1], train.y[:1]), public=True)
    config = Config(
        model={"name": "cnn", "variant": "b"},
        sample_rate=1.0,
        epsilon=math.inf,
        rounds=1,
        clip_norm=0.3,
        method=["blur", "lus"],
        local=LocalTraining(steps, batch, 0.03),
        seed=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        setup = prepare(config, Path(folder) / "ledger.jsonl", Machine(device="cpu"), data)
        began = time.perf_counter()
        run_round(setup.protocol, setup.protocol.server.init(setup.initial), setup.rng.child("round", 1))
        seconds = time.perf_counter() - began
    return most_memory(), seconds, setup.source.machine


def most_memory() -> float:
    """The most that this process has held, in GiB.

    Not by getrusage on Linux: its maximum counts the parent before exec, here perhaps a test runner of 2 GiB.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**20
    unit = 2**30 if sys.platform == "darwin" else 2**20  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    gib, seconds, machine = peak(options.clients, options.steps, options.batch)
    print(f"{options.clients} clients of CNN-B: at most {gib:.2f} GiB, {seconds:.0f} s ({machine}); limit {LIMIT} GiB")
    return int(gib > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
