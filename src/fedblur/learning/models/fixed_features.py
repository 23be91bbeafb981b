"""Models that begin with fixed features: the front is a constant, only the rest is trained, clipped and noised.

What a front makes of a sample never changes. So where nothing alters samples on the way (no views), the features are
computed once before the first round, each client's from its own samples, instead of in every local step.
"""

from __future__ import annotations

import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from fedblur.core.switches import accelerated
from fedblur.data.population import Federation, Packed, as_input, one_input
from fedblur.learning.methods import Method

_AT_ONCE = 256  # samples
_SILENT = 10.0  # seconds between two lines about progress


class Fronted(nn.Module):
    """rest(front(x)), the front a constant."""

    def __init__(self, front: nn.Module, rest: nn.Module, key: str) -> None:
        super().__init__()
        self.front = front.requires_grad_(False)
        self.rest = rest
        self.key = key  # the same for fronts that compute the same

    def forward(self, x: Tensor) -> Tensor:
        # a front computes in its own precision, whichever the rest has; its input may have been rounded before
        own = next((weight.dtype for weight in self.front.parameters()), x.dtype)
        logits: Tensor = self.rest(self.front(x.to(own)).to(x.dtype))
        return logits


def with_head(front: nn.Module, features: int, classes: int, key: str) -> Fronted:
    """Return a linear model on a front's features. It starts at zero, as `logistic` does: the loss is convex."""
    head = nn.Linear(features, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return Fronted(front, nn.Sequential(OrderedDict(head=head)), key)


def stored(path: Path) -> dict[str, Tensor]:
    """Load the constants of a front from an .npz of half precision; each caller gets its own."""
    return {name: torch.from_numpy(value).float() for name, value in _arrays(path).items()}


@functools.cache
def _arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def computed_ahead(
    module: nn.Module,
    data: Federation,
    methods: Iterable[Method],
    device: torch.device,
    tell: Callable[[str], None] | None = None,
) -> tuple[nn.Module, Federation]:
    """Return the module and the data to train with: features instead of samples where the logits are the same.

    `tell` hears how far it is where it takes long.
    """
    if not isinstance(module, Fronted) or not isinstance(data.train, Packed):
        return module, data
    if any(method.views > 1 or type(method).view is not Method.view for method in methods):  # samples are altered
        return module, data
    if module.key not in data.features:
        given = [data.train.x, data.test.x, *([] if data.validation is None else [data.validation.x])]
        parts = [one_input(x, "this model's fixed front") for x in given]
        progress = _Progress(sum(map(len, parts)), tell)
        front = module.front.to(device)
        train, test, *validation = (_features(front, x, device, progress) for x in parts)
        done = replace(data, train=replace(data.train, x=train), test=replace(data.test, x=test))
        if data.validation is not None:
            done = replace(done, validation=replace(data.validation, x=validation[0]))
        data.features.clear()  # features can be larger than the data: keep those of one front
        data.features[module.key] = done
    return Fronted(nn.Identity(), module.rest, "features"), data.features[module.key]


class _Progress:
    """A line every ten seconds."""

    def __init__(self, samples: int, tell: Callable[[str], None] | None) -> None:
        self.samples, self.tell, self.done, self.said = samples, tell, 0, time.monotonic()

    def add(self, count: int) -> None:
        self.done += count
        if self.tell is not None and time.monotonic() - self.said > _SILENT and self.done < self.samples:
            self.tell(f"features, once: {100 * self.done // self.samples} % of {self.samples:,} samples")
            self.said = time.monotonic()


def _features(front: nn.Module, x: Tensor, device: torch.device, progress: _Progress) -> Tensor:
    """Compute the features of all samples, on the samples' device."""

    def of(part: Tensor) -> Tensor:
        with torch.no_grad():  # which each thread has of its own
            return cast(Tensor, front(as_input(part.to(device)))).to(x.device)

    def gathered(some: Iterable[Tensor]) -> Tensor:
        parts = []
        for part in some:
            parts.append(part)
            progress.add(len(part))
        return torch.cat(parts)

    if not accelerated():
        return gathered(map(of, torch.split(x, _AT_ONCE)))
    from fedblur.accel.cpu import single_threads, usable_cores

    with single_threads(usable_cores() if device.type == "cpu" else 1) as pool:
        return gathered(pool.map(of, torch.split(x, _AT_ONCE)))
