"""Stage 6, the student. In: released labels and the public pool. Out: the model that is published.

Post-processing: nothing here sees a client. Labelled samples teach by cross-entropy; on the rest of the pool the
student must give a strongly disturbed sample the class that it is sure of when the sample is disturbed a little
(FixMatch, Sohn et al. 2020). SGD with momentum, the learning rate falling to 0 on a cosine. Such a step can be too long
for a network on hard images, which then says one class to everything for good; those steps are taken again, shorter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.data.population import as_input
from fedblur.dropout import SeededDropout
from fedblur.functional import Forward, Layout, Params
from fedblur.rng import Rng
from fedblur.voting.augment import strong, weak
from fedblur.voting.base import Voting
from fedblur.voting.release import UNANSWERED

_MOMENTUM = 0.9
_UNLABELLED = 2  # samples without a label for each one with a label, in a step
_AT_ONCE = 500  # samples
_SHORTEST = 1 / 32  # of the learning rate; a student that falls silent even so stays as it is


@dataclass(frozen=True)
class Lessons:
    """What the student learns from; all of it is public by now."""

    x: Tensor  # [pool, *shape], as stored
    labelled: Tensor  # positions in x
    labels: Tensor  # of those
    rest: Tensor  # positions without a label
    scale: Tensor  # standard deviation of the pool's values

    @classmethod
    def of(cls, x: Tensor, labels: Tensor) -> Lessons:
        """`labels` belong to the first samples of the pool."""
        known = torch.full((len(x),), UNANSWERED, device=x.device)
        known[: len(labels)] = labels
        labelled = torch.nonzero(known != UNANSWERED).flatten()
        rest = torch.nonzero(known == UNANSWERED).flatten()
        return cls(x, labelled, known[labelled], rest, as_input(x).std())


@dataclass(frozen=True)
class Student:
    """The model between two steps."""

    theta: Tensor  # [d]
    velocity: Tensor  # [d]
    steps: int  # done
    share: float = 1.0  # of the learning rate that it bears

    @classmethod
    def at(cls, theta: Tensor) -> Student:
        return cls(theta, torch.zeros_like(theta), 0)

    def slower(self) -> Student:
        return replace(self, velocity=torch.zeros_like(self.velocity), share=self.share / 2)


@dataclass(frozen=True)
class Course:
    """How a student is taught."""

    forward: Forward
    layout: Layout
    lessons: Lessons
    settings: Voting

    def teach(self, student: Student, until: int, rng: Rng) -> Student:
        """Steps up to `until`. A step's randomness is its own: a student goes on as if it had never stopped."""
        taught = student
        while taught.steps < until:
            taught = self._step(taught, rng.child("student", taught.steps))
        if student.share > _SHORTEST and self._silent(taught) and not self._silent(student):
            return self.teach(student.slower(), until, rng)
        return taught

    def _silent(self, student: Student) -> bool:
        """Whether it says one class to all of its labelled samples, or nothing that is a number."""
        lessons, theta = self.lessons, self.layout.unflatten(student.theta)
        with torch.no_grad(), SeededDropout(None):
            parts = [self.forward(theta, as_input(lessons.x[part])) for part in torch.split(lessons.labelled, _AT_ONCE)]
        logits = torch.cat(parts)
        said = logits.argmax(1)
        several = bool((lessons.labels != lessons.labels[0]).any())
        return not bool(logits.isfinite().all()) or (several and bool((said == said[0]).all()))

    def _step(self, student: Student, rng: Rng) -> Student:
        device = student.theta.device
        generator = torch.Generator(device).manual_seed(rng.seed())
        seed = torch.tensor(rng.child("dropout").seed() & 0xFFFFFFFF, device=device)
        theta = self.layout.unflatten(student.theta)
        gradient = self.layout.flatten(torch.func.grad(self._loss)(theta, generator, seed))
        velocity = _MOMENTUM * student.velocity + gradient
        done = student.steps / self.settings.student_steps
        rate = student.share * self.settings.student_learning_rate * 0.5 * (1 + math.cos(math.pi * done))
        return replace(student, theta=student.theta - rate * velocity, velocity=velocity, steps=student.steps + 1)

    def _loss(self, theta: Params, generator: torch.Generator, seed: Tensor) -> Tensor:
        lessons, size = self.lessons, self.settings.student_batch_size
        drawn = _draw(len(lessons.labelled), size, generator)
        x = weak(as_input(lessons.x[lessons.labelled[drawn]]), generator)
        with SeededDropout(seed, 0):
            loss = F.cross_entropy(self.forward(theta, x), lessons.labels[drawn])
        if self.settings.consistency == 0 or len(lessons.rest) == 0:
            return loss
        rest = as_input(lessons.x[lessons.rest[_draw(len(lessons.rest), _UNLABELLED * size, generator)]])
        return loss + self.settings.consistency * self._inconsistency(theta, rest, generator, seed)

    def _inconsistency(self, theta: Params, x: Tensor, generator: torch.Generator, seed: Tensor) -> Tensor:
        """Cross-entropy of the disturbed view against the class of the plain one, where that is sure."""
        fixed = {name: tensor.detach() for name, tensor in theta.items()}
        with SeededDropout(None):
            sure, target = self.forward(fixed, weak(x, generator)).softmax(1).max(1)
        with SeededDropout(seed, 1):
            logits = self.forward(theta, strong(x, self.lessons.scale, generator))
        losses = F.cross_entropy(logits, target, reduction="none")
        return (losses * (sure >= self.settings.confidence)).mean()


def _draw(total: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` positions below `total`, each sample at most once while there are enough."""
    if count >= total:
        return torch.randint(total, (count,), generator=generator, device=generator.device)
    return torch.randperm(total, generator=generator, device=generator.device)[:count]
