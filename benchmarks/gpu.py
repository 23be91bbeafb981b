"""One round on a GPU, several ways: time per step and round, TFLOP/s, share of the memory floor, agreement of the sums.

    python benchmarks/gpu.py [--models cnn cnn_a gn_cnn resnet18] [--ways loop pfl half compiled] [--json FILE]

`pfl` needs that package (`peers/pfl.txt`) on the path. Data are random images of the right shape, resident on the
device; one client's work is 30 steps of batch 64 (ResNet-18: batch 50), with BLUR and LUS on. `loop` is an ordinary
PyTorch loop over clients, the way peers train.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedblur.core.config import LocalTraining
from fedblur.core.registry import build
from fedblur.core.rng import Seeded
from fedblur.data.population import Packed
from fedblur.engines import LocalEngine
from fedblur.engines.local import How
from fedblur.learning.client import Block, ClientJob
from fedblur.learning.methods import Method
from fedblur.learning.methods.blur import Blur
from fedblur.learning.methods.lus import Lus
from fedblur.learning.models import make_model
from fedblur.learning.module_function import Layout, as_function, initial_vector

BANDWIDTH = 4.3e12  # bytes/s, a device-to-device copy on one H200
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Task:
    """A model and a cohort."""

    name: str
    model: Any
    shape: tuple[int, ...]
    classes: int
    clients: int
    batch: int
    steps: int = 30
    block: int = 0  # clients at once; 0: all

    def module(self) -> nn.Module:
        return make_model(build("model", self.model), self.shape, self.classes, seed=0).to(CUDA).train()

    def population(self) -> Packed:
        generator = torch.Generator().manual_seed(0)
        total = self.clients * self.batch
        x = torch.randint(0, 256, (total, *self.shape), generator=generator, dtype=torch.uint8)
        y = torch.randint(0, self.classes, (total,), generator=generator)
        sizes = torch.full((self.clients,), self.batch)
        return Packed(x, y, torch.cumsum(sizes, 0) - sizes, sizes, self.classes).to(CUDA)


TASKS = {
    "cnn": Task("CNN-B", {"name": "cnn"}, (1, 28, 28), 62, 136, 64),
    "cnn_a": Task("CNN-A", {"name": "cnn", "variant": "a"}, (1, 28, 28), 62, 136, 64),
    "gn_cnn": Task("GN-CNN", "gn_cnn", (1, 28, 28), 62, 136, 64),
    "resnet18": Task("ResNet-18", "resnet18", (3, 32, 32), 10, 30, 50),
    "resnet18_users": Task("ResNet-18, 160 clients of 10 images", "resnet18", (3, 32, 32), 10, 160, 10),
    "resnet18_blocks": Task("ResNet-18, blocks of 34", "resnet18", (3, 32, 32), 10, 136, 64, block=34),
}
HOW: dict[str, How] = {"compiled": "compiled", "compiled-fp32": "compiled"}  # others: plain
HALF = ("half", "compiled")  # bf16
METHODS: tuple[Method, ...] = (Blur(0.4), Lus(0.7))


def job_for(task: Task, module: nn.Module, half: bool, methods: tuple[Method, ...]) -> ClientJob:
    layout = Layout.of(module)
    local = LocalTraining(steps=task.steps, batch_size=task.batch, learning_rate=0.03)
    return ClientJob(as_function(module, half), layout, layout.unflatten(initial_vector(module)), local, methods, 0.03)


def ours(task: Task, module: nn.Module, population: Packed, way: str) -> Callable[[], list[Block]]:
    block = task.block or task.clients
    engine = LocalEngine(population, CUDA, vectorise=True, block_size=block, how=HOW.get(way, "plain"))
    job, ids, rng = job_for(task, module, way in HALF, METHODS), torch.arange(task.clients), Seeded.root(0)
    return lambda: list(engine.map_clients(job, ids, rng))


def loop(task: Task, module: nn.Module, population: Packed) -> Callable[[], Tensor]:
    """How peers do it: torch.optim, one client after another (without BLUR and LUS, so that it only gets faster)."""
    start = [p.detach().clone() for p in module.parameters()]

    def run() -> Tensor:
        total = torch.zeros(sum(p.numel() for p in start), device=CUDA)
        for c in range(task.clients):
            with torch.no_grad():
                for p, s in zip(module.parameters(), start, strict=True):
                    p.copy_(s)
            optimiser = torch.optim.SGD(module.parameters(), lr=0.03)
            x = population.x[c * task.batch : (c + 1) * task.batch].float() / 255
            y = population.y[c * task.batch : (c + 1) * task.batch]
            for _ in range(task.steps):
                optimiser.zero_grad(set_to_none=True)
                nn.functional.cross_entropy(module(x), y).backward()
                optimiser.step()
            delta = torch.cat([(p.detach() - s).flatten() for p, s in zip(module.parameters(), start, strict=True)])
            total += delta * (0.03 / delta.norm()).clamp(max=1)
        return total

    return run


def by_pfl(task: Task, module: nn.Module, population: Packed) -> Callable[[], Any]:
    """One round of pfl-research on the same images, batches and steps; clipping only, as in the loop."""
    import pfl.internal.ops.selector as ops
    from peers.pfl import Trainable, backend_of, context_for
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.internal.ops import pytorch_ops
    from pfl.model.pytorch import PyTorchModel

    ops.set_framework_module(pytorch_ops)
    trained = Trainable(module)
    model = PyTorchModel(trained, torch.optim.SGD, torch.optim.SGD(trained.parameters(), lr=1.0))
    x, y = (t.split(task.batch) for t in (population.x.float() / 255, population.y))
    clients = [PyTorchTensorDataset([*pair], user_id=str(i)) for i, pair in enumerate(zip(x, y, strict=True))]
    backend = backend_of(clients.__getitem__, task.clients, clip_norm=0.03)
    context = context_for(task.clients, task.batch, epochs=task.steps, learning_rate=0.03)
    return lambda: backend.gather_results(model, FederatedAveraging(), central_context=context)


def milliseconds(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """(first call in seconds, median of the following ones in milliseconds)."""
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return first, sorted(times)[len(times) // 2]


PEERS = {"loop": loop, "pfl": by_pfl}


def flops_per_step(task: Task, module: nn.Module) -> float:
    x = torch.zeros(2, *task.shape, device=CUDA)
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    return counter.get_total_flops() / 2 * task.clients * task.batch


def show_kernels(run: Callable[[], Any]) -> None:
    """Where the GPU's time goes, kernel by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)
    total = sum(e.device_time_total for e in events)
    print(f"  kernels: {total / 1e3:.1f} ms")
    for e in events[:45]:
        print(f"  {e.device_time_total / 1e3:8.2f} ms  {e.count:5d} x  {e.key[:110]}")


def measure(key: str, ways: list[str], repeats: int, profile: bool) -> list[dict[str, Any]]:
    task = TASKS[key]
    module, population = task.module(), task.population()
    flops = flops_per_step(task, module)
    rows: list[dict[str, Any]] = []
    reference: Tensor | None = None
    for way in ways:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = way != "fp32"
        run: Callable[[], Any]
        if way in PEERS:
            run = PEERS[way](task, copy.deepcopy(module), population)  # they train it in place
        else:
            run = ours(task, module, population, way)
        torch.cuda.reset_peak_memory_stats()
        try:
            first, ms = milliseconds(run, 1 if way in PEERS else repeats)
        except Exception as error:  # one way that fails must not cost the others' time
            rows.append({"model": task.name, "way": way, "error": f"{type(error).__name__}: {str(error)[:300]}"})
            print(rows[-1], flush=True)
            continue
        if profile and way not in PEERS:
            show_kernels(run)
        total = None if way in PEERS else sum(block.bounded.value.sum(0, dtype=torch.float64) for block in run())
        reference = total if reference is None else reference  # peers have no dropout masks of ours to compare with
        agreement = None if total is None else float((total - reference).norm() / reference.norm())
        rows.append(
            {
                "model": task.name,
                "way": way,
                "round_ms": round(ms, 2),
                "step_ms": round(ms / task.steps, 3),
                "first_s": round(first, 1),
                "tflops": round(flops * task.steps / ms / 1e9, 1),
                "off_first_way": agreement,  # relative difference of the sums of clipped updates
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*TASKS], choices=[*TASKS])
    parser.add_argument("--ways", nargs="+", default=["loop", "fp32", "tf32", "half", "compiled", "compiled-fp32"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="list the kernels that take the time")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    rows = [row for key in options.models for row in measure(key, options.ways, options.repeats, options.profile)]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
