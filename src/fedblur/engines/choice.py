"""Which engine suits a model and a device, unless the user names one."""

from __future__ import annotations

import math

import torch
from torch import nn

from fedblur.data.population import Population
from fedblur.engines.local import EngineName, LocalEngine
from fedblur.engines.workers import WorkerEngine

_CPU_BYTES = 512 * 2**20  # weights, gradients and temporaries of a block on a CPU


def choose_engine(
    population: Population,
    model: nn.Module,
    dimension: int,
    device: torch.device,
    name: EngineName = "auto",
    steps: int = 0,
    cohort: float = 0.0,
) -> LocalEngine | WorkerEngine:
    """The engine that suits the model and the device, or the one that was asked for.

    `steps` are those of the whole run, `cohort` is its expected size.
    """
    convolutional = any(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in model.modules())
    # On a CPU small dense models gain tenfold from vmap (benchmarks/results/cpu.md), and convolutions lose.
    vectorise = name == "vectorised" or (name == "auto" and (device.type == "cuda" or not convolutional))
    if device.type == "cuda":
        compiled = vectorise and steps >= 2000  # compiling takes half a minute
        block = _gpu_block(dimension, device)
        sizes = block_sizes(block, cohort) if compiled else ()
        return LocalEngine(population.to(device), device, vectorise, block, compiled, sizes)
    copies = max(1, _CPU_BYTES // (dimension * 4 * 8))  # 8: Δ, θ, gradients, ...
    if not vectorise:
        return WorkerEngine(population, min(16, copies))
    return LocalEngine(population.to(device), device, vectorise, min(1024, copies))


def _gpu_block(dimension: int, device: torch.device) -> int:
    """A first guess from free memory, at 12 copies of the weights; running out halves it."""
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(2048, int(0.7 * free) // (dimension * 4 * 12)))


def block_sizes(block: int, cohort: float) -> tuple[int, ...]:
    """What compiled blocks are filled up to: a Poisson cohort's size and one or four standard deviations, at most."""
    spread = math.sqrt(cohort)
    return tuple(sorted({min(block, 8 * math.ceil((cohort + k * spread) / 8)) for k in (1, 4)}))
