"""Stage 2, AE-DPFL: each client trains a model of its own from scratch, and votes for the class that it predicts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.client import Block, ClientJob
from fedblur.config import LocalTraining
from fedblur.data.population import as_input
from fedblur.dropout import SeededDropout
from fedblur.engines import LocalEngine, WorkerEngine, choose_engine
from fedblur.functional import Layout, Params, as_function, check_model, initial_vector
from fedblur.models import make_model
from fedblur.registry import convert_part, part, register
from fedblur.rng import Rng
from fedblur.voting.base import Booth, Electorate, Voting

_CHUNK = 256  # samples that a block of teachers looks at together


@register("voting", "ae-dpfl")
@dataclass(frozen=True)
class AeDpfl(Voting):
    """Teachers vote one class each."""

    teacher: Any = part("model")  # noqa: RUF009, it is a dataclass field; None: the student's model
    teacher_steps: int = 100
    teacher_batch_size: int = 32
    teacher_learning_rate: float = 0.1
    teacher_weight_decay: float = 1e-4

    title: ClassVar[str] = "AE-DPFL"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "teacher", convert_part("model", self.teacher))
        for name in ("teacher_steps", "teacher_batch_size"):
            self._demand(getattr(self, name) >= 1, name, "must be at least 1")
        self._demand(self.teacher_learning_rate > 0, "teacher_learning_rate", "must be above 0")
        self._demand(self.teacher_weight_decay >= 0, "teacher_weight_decay", "must be 0 or more")

    def electorate(self, booth: Booth) -> Electorate:
        shape, classes = booth.population.shape, booth.population.classes
        if self.teacher is None:
            module = copy.deepcopy(booth.module)
        else:
            module = make_model(self.teacher, shape, classes, booth.rng.child("teacher").seed())
            check_model(module, shape, classes)
        layout, start = Layout.of(module), initial_vector(module).to(booth.device)
        module = module.to(booth.device).train()
        local = LocalTraining(
            steps=self.teacher_steps,
            batch_size=self.teacher_batch_size,
            learning_rate=self.teacher_learning_rate,
            weight_decay=self.teacher_weight_decay,
        )
        # Nothing of a teacher leaves its client, so there is nothing to clip.
        job = ClientJob(as_function(module), layout, layout.unflatten(start), local, (), float("inf"))
        engine = choose_engine(booth.population, module, layout.total, booth.device, booth.engine)
        return Teachers(job, start, engine, classes)


@dataclass(frozen=True)
class Teachers:
    """Clients with a model each, trained in the engine that rounds use."""

    job: ClientJob
    start: Tensor  # [d], where every teacher starts
    engine: LocalEngine | WorkerEngine
    classes: int

    @property
    def at_once(self) -> int:
        return self.engine.block_size

    def votes(self, ids: Tensor, x: Tensor, rng: Rng) -> Tensor:
        blocks = self.engine.map_clients(self.job, ids, rng)
        return torch.cat([self._vote(block, x) for block in blocks])

    @torch.no_grad()
    def _vote(self, block: Block, x: Tensor) -> Tensor:
        thetas = self.start + block.bounded.value  # [clients, d]
        if self.engine.vectorise:
            chosen = self._predict_all(self.job.layout.unflatten(thetas), x)
        else:
            chosen = torch.stack([self._predict(self.job.layout.unflatten(theta), x) for theta in thetas])
        return F.one_hot(chosen, self.classes).double()

    def _predict_all(self, thetas: Params, x: Tensor) -> Tensor:
        """[clients, samples] classes."""
        inputs = [as_input(chunk) for chunk in torch.split(x, _CHUNK)]
        mapped = torch.func.vmap(self._classes, in_dims=(0, None))
        return torch.cat([mapped(thetas, chunk) for chunk in inputs], dim=1)

    def _predict(self, theta: Params, x: Tensor) -> Tensor:
        return torch.cat([self._classes(theta, as_input(chunk)) for chunk in torch.split(x, _CHUNK)])

    def _classes(self, theta: Params, inputs: Tensor) -> Tensor:
        with SeededDropout(None):
            return self.job.forward(theta, inputs).argmax(-1)
