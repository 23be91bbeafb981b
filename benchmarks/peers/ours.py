"""This library: the engine that it chooses by itself, its clip and its sum, as a run has them, without noise."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch

from fedblur.core.config import Config, LocalTraining
from fedblur.core.rng import Seeded
from fedblur.core.version import version
from fedblur.data.population import Federation, Packed, Samples
from fedblur.engines import suitable_threads
from fedblur.learning.client import ClientJob
from fedblur.privacy.mechanisms.base import Release
from fedblur.training.machine import Machine
from fedblur.training.setup import Setup, prepare
from peers.modules import build_module
from peers.task import Channel, Floats, Task, load_task

SEED = 0  # of the clients' streams: the driver takes the index plan from the same ones


def prepare_run(task: Task, folder: Path) -> Setup:
    """The run that a user's configuration gives, on the task's clients, all of them in every round."""
    x, y = torch.from_numpy(task.x), torch.from_numpy(task.y)
    sizes = torch.full((task.clients,), task.steps * task.batch)
    clients = Packed(x, y, torch.cumsum(sizes, 0) - sizes, sizes, task.classes)
    config = Config(
        rounds=1000,
        sample_rate=1.0,
        epsilon=math.inf,
        clip_norm=task.clip_norm,
        method=(),
        local=LocalTraining(task.steps, task.batch, task.learning_rate),
        seed=SEED,
    )
    data = Federation("benchmark", clients, None, 0, Samples(x[:1], y[:1]), public=True)
    return prepare(config, folder / "ledger.jsonl", Machine(device="cpu"), data, build_module(task))


def run_round(task: Task, setup: Setup) -> Floats:
    """Plan, train, clip and sum: everything of a round before noise, ledger and server step."""
    protocol, layout = setup.protocol, setup.protocol.layout
    start, rng = layout.unflatten(setup.initial), Seeded.root(SEED)
    job = ClientJob(protocol.forward, layout, start, protocol.local, protocol.methods, task.clip_norm)
    release = Release(layout.total, task.clip_norm, 0.0, task.clients, setup.initial.device)
    blocks = setup.engine.map_clients(job, torch.arange(task.clients), rng)
    total = protocol.mechanism.accumulate((block.bounded for block in blocks), release, rng)
    return protocol.mechanism.release(total, release, protocol.mechanism.draw(release, rng)()).numpy()


def main() -> None:
    channel = Channel()
    task = load_task(channel.inputs)
    with tempfile.TemporaryDirectory() as folder:
        setup = prepare_run(task, Path(folder))
        with suitable_threads(setup.initial.device, setup.protocol.layout.total):
            how = f"{setup.source.machine}, intra-op threads: {torch.get_num_threads()}"
            channel.serve(lambda: run_round(task, setup), f"fedblur {version()}", how)


if __name__ == "__main__":
    main()
