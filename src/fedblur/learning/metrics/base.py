"""The contract of a metric: what a chunk of predictions adds up to, and the figure that the sum means.

    @fedblur.metric("within_half", larger_is_better=True, best=1.0, worst=0.0)
    def within_half(outputs, targets):
        return (outputs.reshape(targets.shape) - targets).abs() < 0.5  # of each sample; the figure is the mean

Predictions that are NaN always count as the worst. `larger_is_better`, `best` and `worst` say how figures compare, and
`score` puts them into [0, 1] for choices that are private.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.registry import declare_base, register


class Metric:
    """A figure about predictions. A part of kind "metric" is a frozen dataclass."""

    part_name: ClassVar[str]
    larger_is_better: ClassVar[bool] = True
    best: ClassVar[float] = 1.0  # of any figure; inf or -inf: there is no such bound
    worst: ClassVar[float] = 0.0
    percent: ClassVar[bool] = False  # whether people read it as a share of 100 %
    keeps_rows: ClassVar[bool] = False  # whether `count` gives rows that are kept, instead of sums that are added

    @property
    def key(self) -> str:
        """The name of the figure in results: the part's, with what else tells it from others ("ndcg@10")."""
        return self.part_name

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse what the metric is not about with a ConfigError: outputs of a few samples, all held-out targets."""

    def count(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what a chunk adds, float64: [k] sums, or [samples, k] rows where `keeps_rows`."""
        raise NotImplementedError

    def value(self, counted: Tensor) -> float:
        """Return the figure of the added sums, or of all rows: by default the first over the second, a mean.

        NaN: there were no samples.
        """
        total, count = counted.tolist()
        return total / count if count else math.nan

    def score(self, value: float) -> float:
        """Return a figure as a score in [0, 1], larger is better; NaN is 0. For scores that are released with noise.

        Without a worst bound, 1 / (1 + distance to the best): an error of 1 scores a half.
        """
        if math.isnan(value):
            return 0.0
        if math.isfinite(self.worst):
            return min(1.0, max(0.0, (value - self.worst) / (self.best - self.worst)))
        return 1.0 / (1.0 + max(0.0, abs(value - self.best)))


declare_base("metric", Metric)


class Mean(Metric):
    """A metric that is the mean of a figure of each sample. NaN becomes the worst."""

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's figure, [samples], or true and false."""
        raise NotImplementedError

    def count(self, outputs: Tensor, targets: Tensor) -> Tensor:
        values = self.each(outputs, targets).double()
        values = torch.where(unreadable(outputs) | values.isnan(), self.worst, values)
        return torch.stack([values.sum(), values.new_tensor(len(values))])


def has_classes(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether each target is one class, token or item, and outputs have a logit for each of them."""
    return (
        not targets.is_floating_point()
        and outputs.dim() == targets.dim() + 1
        and outputs.shape[1:-1] == targets.shape[1:]
        and outputs.shape[-1] > 1
    )


def says_yes_or_no(targets: Tensor) -> bool:
    """Return whether all targets are 0 or 1."""
    return bool(((targets == 0) | (targets == 1)).all())


def unreadable(outputs: Tensor) -> Tensor:
    """Return which samples have a NaN among their outputs, [samples]."""
    return outputs.reshape(len(outputs), -1).isnan().any(1)


def metric(
    name: str, larger_is_better: bool = True, best: float | None = None, worst: float | None = None
) -> Callable[[Callable[[Tensor, Tensor], Tensor]], Callable[[Tensor, Tensor], Tensor]]:
    """Register a function (outputs, targets) -> [samples] as a metric: the mean over samples.

    Without bounds, the best is 1 and the worst 0 where larger is better; where smaller is, 0 and unbounded.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"metric {name!r} must be a name of letters, digits and _, like 'within_half'")
    ends = (1.0, 0.0) if larger_is_better else (0.0, math.inf)
    good, bad = (end if given is None else float(given) for given, end in zip((best, worst), ends, strict=True))
    if not math.isfinite(good) or (good > bad) != larger_is_better:
        raise ConfigError(f"metric {name!r}: best={good:g} and worst={bad:g} contradict {larger_is_better=}")

    def made(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        @dataclass(frozen=True)
        class Own(Mean):
            def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
                values = function(outputs, targets)
                if not isinstance(values, Tensor) or values.shape != (len(targets),):
                    shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
                    raise ConfigError(f"metric {name!r} returns {shape}, must be one number per sample, [samples]")
                return values

        Own.larger_is_better, Own.best, Own.worst = larger_is_better, good, bad
        Own.__qualname__ = f"{function.__module__}.{function.__qualname__}"
        Own.__doc__ = function.__doc__
        register("metric", name)(Own)
        return function

    return made
