"""A short timing of local steps each way at the start of a run, kept in the cache per model, work and machine.

Made-up clients are trained, nobody's data. The rule's engine stays unless the other one is clearly faster, so that
noise on the machine does not flip a choice; a run that would gain less than the timing costs is left to the rule.
FEDBLUR_TIMING=off does without timings altogether.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedblur.core.cache_files import keep, read_kept
from fedblur.core.errors import FedBlurError, ModelError
from fedblur.core.files import cache_folder
from fedblur.core.rng import Seeded
from fedblur.core.switches import accelerated, switched_on
from fedblur.data.population import Packed, Samples, made_up
from fedblur.engines.choice import KINDS, Choice, Kind, choose_engine, rule
from fedblur.engines.isolation_check import cannot_map
from fedblur.engines.local import suitable_threads
from fedblur.learning.client import ClientJob

_FORMAT = 5  # part of the key: engines that became faster, or are timed in another way, are timed anew
_FEWEST = 5_000  # client steps of a run; below, not even one step is timed
_WORTH = 10.0  # seconds of estimated training; below, the rule decides
_BUDGET = 1.0  # seconds for either way, after a warm-up
_MARGIN = 1.15  # how much faster the other engine must be
_STEPS = 2
_CLIENTS = 32


@dataclass(frozen=True)
class Work:
    """The work of a run, as far as a timing must know it."""

    job: ClientJob
    module: nn.Module
    like: Samples  # held out: the shapes and types of samples
    classes: int
    cohort: float  # expected clients of a round
    rounds: int

    @property
    def client_steps(self) -> float:
        return self.cohort * self.rounds * self.job.local.steps


def timed_choice(work: Work, device: torch.device) -> Choice:
    """Return the faster engine: as measured before, or now; the rule's engine if a timing would not pay."""
    usual = rule(work.module, device)
    if not switched_on("FEDBLUR_TIMING"):
        return Choice(usual, "by rule, FEDBLUR_TIMING=off")
    if not accelerated():
        return Choice(usual, "by rule, FEDBLUR_ACCEL=off")
    if work.client_steps < _FEWEST:
        return Choice(usual, "by rule, the run is too short to time it")
    path = _path(work, device)
    known = _load(path)
    if known is not None:
        return Choice(known[0], f"{known[1]}, cached")
    from fedblur.accel.cpu import usable_cores

    with suitable_threads(device, work.job.layout.total):
        one_step = _seconds(work, device, "sequential", 1)
        if one_step * work.client_steps / usable_cores() < _WORTH:
            return Choice(usual, "by rule, the run is too short to time it")
        seconds: dict[Kind, float] = {}
        for kind in KINDS:
            # as many clients as the budget allows; on a GPU, where a block's size pays, a full block: beside other work
            # on the same GPU one step takes long, and a budget left a block few clients, so that it lost
            full, most = kind == "vectorised" and device.type == "cuda", min(_CLIENTS, work.cohort)
            clients = int(max(2, most if full else min(most, _BUDGET / (one_step * _STEPS))))
            try:
                seconds[kind] = _seconds(work, device, kind, clients)
            except (torch.OutOfMemoryError, ModelError):  # memory does not hold it
                seconds[kind] = math.inf
            except RuntimeError:  # `vmap` refuses the model, or a method's hook
                if kind == usual and not cannot_map(work.job, work.like, work.classes, device):
                    raise
                seconds[kind] = math.inf
    choice, words = _faster(seconds, usual)
    if path is not None:
        with contextlib.suppress(OSError, FedBlurError):  # what cannot be kept is timed again
            keep(path, json.dumps({"engine": choice, "why": words}).encode())
    return Choice(choice, f"{words}, measured")


def _faster(seconds: dict[Kind, float], usual: Kind) -> tuple[Kind, str]:
    other: Kind = "sequential" if usual == "vectorised" else "vectorised"
    kind = other if seconds[usual] > _MARGIN * seconds[other] else usual
    left = other if kind == usual else usual
    if math.isinf(seconds[left]):
        return kind, f"{left} cannot run this model"
    return kind, f"{left} takes {seconds[left] / seconds[kind]:.2g} times as long"


def _seconds(work: Work, device: torch.device, kind: Kind, clients: int) -> float:
    """Time one step of one client while `clients` made-up ones train as this run's do; the second time counts."""
    local = replace(work.job.local, steps=min(_STEPS, work.job.local.steps))
    own = 2 * local.batch_size  # samples of each: two full batches of noise
    generator = torch.Generator().manual_seed(0)
    samples = made_up(work.like, clients * own, work.classes, generator)
    sizes = torch.full((clients,), own)
    population = Packed(samples.x, samples.y, torch.cumsum(sizes, 0) - sizes, sizes, work.classes)
    engine = choose_engine(population, work.module, work.job.layout.total, device, kind, cohort=clients)
    job, ids, took = replace(work.job, local=local), torch.arange(clients), 0.0
    for _ in range(2):
        began = time.perf_counter()
        for block in engine.map_clients(job, ids, Seeded.root(0)):
            float(block.bounded.value[0, 0])  # waits for a GPU
        took = time.perf_counter() - began
    return took / (clients * local.steps)


def _path(work: Work, device: torch.device) -> Path | None:
    """Return the path of one small file for everything that the answer may depend on."""
    from fedblur.accel.cpu import usable_cores
    from fedblur.accel.kernels import native

    folder = cache_folder()
    job = work.job
    about = (
        _FORMAT, torch.__version__, platform.machine(), _machine(device), usable_cores(), repr(work.module),
        job.layout.shapes, job.local.batch_size, job.methods, job.message.bounding, getattr(job.forward, "half", False),
        _shapes(work.like), int(work.cohort).bit_length(), native.wanted(),
    )  # fmt: skip
    key = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    return None if folder is None else folder / f"engine-{key}.json"


def _shapes(like: Samples) -> Any:
    """Return what a timing depends on: for plain numbers or images their shape alone, as keys always were."""
    if isinstance(like.x, Tensor) and like.y.dim() == 1 and not like.y.is_floating_point():
        return tuple(like.x.shape[1:])
    inputs = like.x if isinstance(like.x, dict) else {"": like.x}
    return [(name, tuple(x.shape[1:]), x.dtype) for name, x in {**inputs, "target": like.y}.items()]


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _load(path: Path | None) -> tuple[Kind, str] | None:
    """Load the answer; a file that is cut short or not ours counts as none."""
    content = None if path is None else read_kept(path)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        stored = json.loads(content or b"{}")
        if stored["engine"] in KINDS:
            return stored["engine"], str(stored["why"])
    return None
