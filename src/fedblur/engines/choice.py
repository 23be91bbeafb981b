"""The choice of an engine: what the user names, what a short timing says, or a rule of thumb.

Engines agree to float tolerance, not bit for bit. So a run's choice is recorded in its folder and a resumed run takes
it from there; under torchrun rank 0 chooses for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from fedblur.core.switches import accelerated
from fedblur.data.population import Population, Samples, as_input, each_input, made_up
from fedblur.engines.local import EngineName, How, LocalEngine
from fedblur.learning.client import ClientJob
from fedblur.learning.randomness import SeededRandomness

if TYPE_CHECKING:
    from fedblur.engines.workers import WorkerEngine

Kind = Literal["vectorised", "sequential"]
KINDS: tuple[Kind, Kind] = ("vectorised", "sequential")
_CPU_BYTES = 512 * 2**20  # weights, gradients and temporaries of a block on a CPU
_LEAST_BYTES = 64 * 2**20  # of a block whose model is mostly frozen: it takes no more memory than the frozen part
_CPU_BLOCK = 256  # clients: more of them share little more overhead, and fall out of the caches
_TRACED = 1000  # steps of a run on a CPU from which tracing one, which takes about 0.2 s, pays for itself
# A block's size is a multiple of this. On a CPU torch computes a tensor 32 numbers at a time and the rest one by one,
# with other formulas (sigmoid, GELU); without a rest a client's place in a block does not matter. GPUs' kernels like 8.
_CPU_GRAIN, _GPU_GRAIN = 32, 8
_COMPILED = 2000  # steps of a run on a GPU: compiling takes half a minute


@dataclass(frozen=True)
class Choice:
    """An engine, and in words why it was taken; no words where the user named it."""

    kind: Kind
    why: str = ""


def rule(module: nn.Module, device: torch.device) -> Kind:
    """Choose without a timing: on a CPU small dense models gain tenfold from vmap (benchmarks/results/cpu.md), and
    convolutions lose."""
    convolutional = any(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in module.modules())
    return "sequential" if device.type == "cpu" and convolutional else "vectorised"


def choose_engine(
    population: Population,
    module: nn.Module,
    dimension: int,
    device: torch.device,
    name: EngineName = "auto",
    steps: int = 0,
    cohort: float = 0.0,
    spread: float = 0.0,
    activations: int = 0,
) -> LocalEngine | WorkerEngine:
    """Return the engine of this name, or by the rule.

    `steps`: of the whole run. `cohort` and `spread`: mean and deviation of a cohort's size, 0 for the whole population.
    `activations`: bytes that one client's step keeps besides its weights, where those do not tell (`activation_bytes`).
    """
    cohort, spread = (cohort, spread) if cohort else (float(population.clients), 0.0)
    everyone = max(1, population.clients)
    kind = rule(module, device) if name == "auto" else name
    vectorise = kind == "vectorised"
    if device.type == "cuda":
        compiled = vectorise and steps >= _COMPILED and accelerated()
        free, _ = torch.cuda.mem_get_info(device)
        # 12 copies of weights: a guess; else halved
        largest = max(1, min(2048, int(0.7 * free) // (dimension * 4 * 12 + activations)))
        block = even_blocks(largest, min(cohort, everyone), spread, _GPU_GRAIN)
        return LocalEngine(population.to(device), device, vectorise, block, "compiled" if compiled else "plain")
    frozen = sum(tensor.nbytes for tensor in module.parameters() if not tensor.requires_grad)
    room = min(_CPU_BYTES, max(_LEAST_BYTES, frozen)) if activations else _CPU_BYTES
    copies = max(1, room // (dimension * 4 * 8 + activations))  # 8: Δ, θ, gradients, ...
    if not accelerated():
        return LocalEngine(population, device, vectorise, min(_CPU_BLOCK if vectorise else 16, copies))
    from fedblur.accel.cpu import keep_freed_memory
    from fedblur.engines.workers import WorkerEngine

    keep_freed_memory()
    if not vectorise:
        return WorkerEngine(population, min(16, copies))
    how: How = "traced" if steps >= _TRACED else "plain"
    block = even_blocks(min(_CPU_BLOCK, copies), min(cohort, everyone), spread, _CPU_GRAIN)
    return LocalEngine(population.to(device), device, vectorise, block, how)


def activation_bytes(job: ClientJob, module: nn.Module, like: Samples, classes: int) -> int:
    """Measure what one client's step keeps for its gradient, where a frozen part makes that more than the weights.

    0 for a model without frozen parameters, whose blocks are sized by its weights. It follows from public shapes alone.
    """
    if all(tensor.requires_grad for tensor in module.parameters()):
        return 0
    device = next(iter(job.start.values())).device
    few = min(4, job.local.batch_size)
    inputs = made_up(like, few, classes, torch.Generator().manual_seed(0)).x
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    leaves = {name: tensor.detach().requires_grad_() for name, tensor in job.start.items()}
    counting = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with counting, SeededRandomness(torch.tensor(0, device=device)):
        output = job.forward(leaves, as_input(each_input(inputs, lambda x: x.to(device))))
    del output  # until here all was kept
    return 2 * sum(kept.values()) * job.local.batch_size // few  # as much again while gradients are computed


def even_blocks(largest: int, cohort: float, spread: float, grain: int) -> int:
    """Return the size of a block that shares a cohort out evenly: nearly all cohorts (two deviations) fit into so many.

    It follows from public numbers alone, and is a multiple of `grain` unless memory holds fewer clients than that.
    Blocks are always full, so empty clients are what a larger one costs.
    """
    grain = grain if largest >= grain else 1
    most = largest // grain
    needed = max(1, math.ceil((cohort + 2 * spread) / grain))  # grains of a cohort
    return grain * math.ceil(needed / math.ceil(needed / most))
