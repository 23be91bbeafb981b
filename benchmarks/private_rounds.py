"""A private round of CNN-B beside a seeded one: what exact noise, its key and the ledger's line cost.

And one with correlated noise of four buffers (BLT), its keys on disk and a record of who took part, beside both.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import fedblur
from fedblur.data.population import Packed, Samples
from fedblur.engines.local import EngineName
from fedblur.training.machine import Machine
from fedblur.training.round import run_round
from fedblur.training.setup import prepare

SIDES: dict[str, dict[str, Any]] = {
    "seeded": {"sampling": "full", "seed": 0},
    "private": {"sampling": "full"},
    "BLT": {
        "sampling": {"name": "min_separation", "rounds": 1},
        "mechanism": {
            "name": "blt", "buffers": 4, "decays": [0.99, 0.9, 0.6, 0.2], "weights": [0.03, 0.1, 0.2, 0.2],
        },
    },
}  # fmt: skip


def rounds(
    repeats: int = 25, clients: int = 136, steps: int = 30, device: str = "cuda", engine: EngineName = "vectorised"
) -> dict[str, float]:
    """Seconds of a round of CNN-B of each side, in turns; the same block, the same cohort of all clients."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (clients * 64, 1, 28, 28), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 62, (clients * 64,), generator=generator)
    owners = torch.arange(clients).repeat_interleave(64)
    train = Packed.from_owners(x, y, owners, 62)
    data = fedblur.Federation("noise", train, None, 0, Samples(x[:64], y[:64]), public=True)
    sides = {}
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEDBLUR_POPULATIONS"] = str(Path(folder) / "state")  # where the keys of correlated noise lie
        for name, changes in SIDES.items():
            config = fedblur.Config(
                model="cnn", method=["blur", "lus"], noise_multiplier=2.0, sample_rate=1.0, rounds=1000, delta=1e-5,
                clip_norm=0.03, local={"steps": steps, "batch_size": 64, "learning_rate": 0.03}, **changes,
            )  # fmt: skip
            place = Path(folder) / name
            place.mkdir()
            setup = prepare(config, place / "ledger.jsonl", Machine(device=device, engine=engine), data)
            print(name, setup.source.machine, flush=True)
            sides[name] = setup.keeping_record(place / "participation.jsonl", new=True)
        states = {name: setup.protocol.server.init(setup.initial) for name, setup in sides.items()}
        took: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(repeats + 3):
            for name, setup in sides.items():
                wait()
                began = time.perf_counter()
                states[name] = run_round(setup.protocol, states[name], setup.rng.child("round", turn)).state
                wait()
                took[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(seconds[3:]) for name, seconds in took.items()}

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(took[one][3:], took[other][3:], strict=True))

    found = {f"{name} ms": 1e3 * value for name, value in medians.items()}
    return {**found, "private ÷ seeded": ratio("private", "seeded"), "BLT ÷ private": ratio("BLT", "private")}
