"""Stage 2, AE-DPFL: each client trains a model of its own from scratch, and votes for the class that it predicts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.core.config import LocalTraining
from fedblur.core.registry import convert_part, part, register
from fedblur.core.rng import Rng
from fedblur.data.population import as_input
from fedblur.learning.client import Block, ClientJob
from fedblur.learning.model_checks import check_model, for_training
from fedblur.learning.models import make_model
from fedblur.learning.module_function import Layout, Params, as_function, evaluating, initial_vector
from fedblur.learning.randomness import SeededRandomness
from fedblur.voting.base import Booth, Electorate, Voting

if TYPE_CHECKING:
    from fedblur.engines import LocalEngine, WorkerEngine

_CHUNK = 256  # samples that a block of teachers looks at together


@register("voting", "ae-dpfl")
@dataclass(frozen=True)
class AeDpfl(Voting):
    """Teachers vote one class each."""

    teacher: Any = part("model")  # noqa: RUF009, it is a dataclass field; None: the student's model
    teacher_steps: int = 100  # of SGD, on each teacher's own samples
    teacher_batch_size: int = 32  # samples in each of them
    teacher_learning_rate: float = 0.1  # of each of them
    teacher_weight_decay: float = 1e-4  # of each of them

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
        module = for_training(module.to(booth.device))
        local = LocalTraining(
            steps=self.teacher_steps,
            batch_size=self.teacher_batch_size,
            learning_rate=self.teacher_learning_rate,
            weight_decay=self.teacher_weight_decay,
        )
        # Nothing of a teacher leaves its client, so there is nothing to clip.
        job = ClientJob(as_function(module), layout, layout.unflatten(start), local, (), float("inf"))
        from fedblur.engines import choose_engine  # not where a method's name is parsed

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
        thetas, unflatten = self.start + block.bounded.value, self.job.layout.unflatten  # [clients, d]
        inputs = [as_input(chunk) for chunk in torch.split(x, _CHUNK)]
        if self.engine.vectorise:
            mapped, params = torch.func.vmap(self._classes, in_dims=(0, None)), unflatten(thetas)
            chosen = torch.cat([mapped(params, chunk) for chunk in inputs], dim=1)
        else:
            each = (unflatten(theta) for theta in thetas)
            chosen = torch.stack([torch.cat([self._classes(params, chunk) for chunk in inputs]) for params in each])
        return F.one_hot(chosen, self.classes).double()  # from [clients, samples]

    def _classes(self, theta: Params, inputs: Tensor) -> Tensor:
        with SeededRandomness(None):
            return evaluating(self.job.forward)(theta, inputs).argmax(-1)
