"""Stage 6, the student. In: released labels and the public pool. Out: the model that is published.

Post-processing: nothing here sees a client. Labelled samples teach by cross-entropy; on the rest of the pool the
student must give a strongly disturbed sample the class that it is sure of when the sample is disturbed a little
(FixMatch, Sohn et al. 2020). SGD with momentum, the learning rate falling to 0 on a cosine. Such a step can be too long
for a network on hard images, which then says one class to everything for good; those steps are taken again, shorter.

The two views are made for small images whose meaning a mirror would change (digits, letters): shifts, noise, and a
square cut out. Samples that are not images get noise, and some of their values are dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.core.rng import Rng
from fedblur.data.population import as_input
from fedblur.learning.module_function import Forward, Layout, Params, evaluating
from fedblur.learning.randomness import SeededRandomness
from fedblur.voting.base import Voting
from fedblur.voting.release import UNANSWERED

_WEAK, _STRONG = 28, 9  # an image moves by up to its side over this: 1 and 3 pixels of 28
_HOLE = 3  # the square that is cut out: its side over this
_DROPPED = 0.2  # of the values of a sample that is not an image
_NOISE = 0.3  # in units of the pool's standard deviation
_MOMENTUM = 0.9
_UNLABELLED = 2  # samples without a label for each one with a label, in a step
_AT_ONCE = 500  # samples
_SHORTEST = 1 / 32  # of the learning rate; a student that collapses even so stays as it is


@dataclass(frozen=True)
class TrainingSet:
    """The student's training set; all of it is public by now."""

    x: Tensor  # [pool, *shape], as stored
    labelled: Tensor  # positions in x
    labels: Tensor  # of those
    rest: Tensor  # positions without a label
    scale: Tensor  # standard deviation of the pool's values

    @classmethod
    def of(cls, x: Tensor, labels: Tensor) -> TrainingSet:
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


@dataclass(frozen=True)
class Trainer:
    """The training of a student."""

    forward: Forward
    layout: Layout
    data: TrainingSet
    settings: Voting

    def train(self, student: Student, until: int, rng: Rng) -> Student:
        """Train up to step `until`. A step's randomness is its own: a student goes on as if it had never stopped."""
        trained = student
        while trained.steps < until:
            trained = self._step(trained, rng.child("student", trained.steps))
        if student.share > _SHORTEST and self._collapsed(trained) and not self._collapsed(student):
            slower = replace(student, velocity=torch.zeros_like(student.velocity), share=student.share / 2)
            return self.train(slower, until, rng)
        return trained

    def _collapsed(self, student: Student) -> bool:
        """Return whether it predicts one class for all of its labelled samples, or nothing that is a number."""
        data, theta, at_rest = self.data, self.layout.unflatten(student.theta), evaluating(self.forward)
        with torch.no_grad(), SeededRandomness(None):
            parts = [at_rest(theta, as_input(data.x[part])) for part in torch.split(data.labelled, _AT_ONCE)]
        logits = torch.cat(parts)
        said = logits.argmax(1)
        several = bool((data.labels != data.labels[0]).any())
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
        data, size = self.data, self.settings.student_batch_size
        drawn = _draw(len(data.labelled), size, generator)
        x = weak(as_input(data.x[data.labelled[drawn]]), generator)
        with SeededRandomness(seed, 0):
            loss = F.cross_entropy(self.forward(theta, x), data.labels[drawn])
        if self.settings.consistency == 0 or len(data.rest) == 0:
            return loss
        # the cross-entropy of the disturbed view against the class of the plain one, where that is sure
        rest = as_input(data.x[data.rest[_draw(len(data.rest), _UNLABELLED * size, generator)]])
        fixed = {name: tensor.detach() for name, tensor in theta.items()}
        with SeededRandomness(None):
            sure, target = evaluating(self.forward)(fixed, weak(rest, generator)).softmax(1).max(1)
        with SeededRandomness(seed, 1):
            logits = self.forward(theta, strong(rest, data.scale, generator))
        losses = F.cross_entropy(logits, target, reduction="none")
        return loss + self.settings.consistency * (losses * (sure >= self.settings.confidence)).mean()


def _draw(total: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` positions below `total`, each sample at most once while there are enough."""
    if count >= total:
        return torch.randint(total, (count,), generator=generator, device=generator.device)
    return torch.randperm(total, generator=generator, device=generator.device)[:count]


def weak(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return [samples, *shape], moved a little."""
    return _shift(x, x.shape[-1] // _WEAK, generator) if x.dim() == 4 else x


def strong(x: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
    """Return [samples, *shape], moved, noisy, and with a part missing. `scale`: the pool's standard deviation."""
    if x.dim() == 4:
        x = _cut(_shift(x, x.shape[-1] // _STRONG, generator), generator)
    else:
        x = x * (_uniform(x.shape, x, generator) >= _DROPPED)
    return x + _NOISE * scale * torch.randn(x.shape, generator=generator, device=x.device)


def _shift(x: Tensor, reach: int, generator: torch.Generator) -> Tensor:
    """Move each image by up to `reach` pixels both ways; zeros come in."""
    if reach == 0:
        return x
    samples, channels, height, width = x.shape
    padded = torch.nn.functional.pad(x, (reach,) * 4)
    by = torch.randint(0, 2 * reach + 1, (2, samples, 1), generator=generator, device=x.device)
    rows = by[0] + torch.arange(height, device=x.device)  # [samples, height]
    columns = by[1] + torch.arange(width, device=x.device)
    tall = padded.gather(2, rows[:, None, :, None].expand(-1, channels, -1, padded.shape[3]))
    return tall.gather(3, columns[:, None, None, :].expand(-1, channels, height, -1))


def _cut(x: Tensor, generator: torch.Generator) -> Tensor:
    """Zero a square around a random pixel."""
    samples, _, height, width = x.shape
    centre = _uniform((2, samples, 1), x, generator)
    inside = [
        (torch.arange(side, device=x.device) + 0.5 - centre[axis] * side).abs() < side / _HOLE / 2
        for axis, side in enumerate((height, width))
    ]
    return x * ~(inside[0][:, None, :, None] & inside[1][:, None, None, :])


def _uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=like.device)
