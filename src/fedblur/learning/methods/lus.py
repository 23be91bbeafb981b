"""LUS, local update sparsification (Cheng et al. 2022, Eq. 10 to 12): zero what matters least to the local loss.

The score of a coordinate is |g·Δ|, the first-order change of the local loss when its update is undone. Per scope the
s = max(1, round((1 − c)·d)) largest are kept: exactly s, ties going to the lowest index. The mask depends on private
data, so noise still covers every coordinate (invariant 2): LUS moves a clipped update's norm, it saves no noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.learning.methods.base import Method, Score
from fedblur.learning.module_function import Layout, Params

_BLOCK = 1024


@register("method", "lus")
@dataclass(frozen=True)
class Lus(Method):
    """Keep the parts of an update that matter most."""

    sparsity: float = 0.7  # c, the share that is zeroed
    scope: Literal["tensor", "module", "global"] = "tensor"  # the share is taken of each tensor, each layer, or all
    score_on: Literal["full", "last"] = "full"  # all local samples, or the last batch
    exempt_1d: bool = False  # leave biases and norm layers dense

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise ConfigError(f"method.lus.sparsity={self.sparsity} must be in [0, 1)")

    @property
    def score_batch(self) -> Score:
        return self.score_on

    def shape_update(self, delta: Params, gradient: Params, layout: Layout) -> Params:
        scores = {name: (gradient[name] * delta[name]).abs() for name in delta}  # T = |∂f/∂w · Δw|, Eq. 10
        shaped = dict(delta)
        for group in self._groups(layout):
            flat = torch.cat([scores[name].flatten() for name in group])
            mask = keep_largest(flat, kept_count(flat.numel(), self.sparsity))
            sizes = [scores[name].numel() for name in group]
            for name, part in zip(group, torch.split(mask, sizes), strict=True):
                shaped[name] = torch.where(part.view(delta[name].shape), delta[name], 0.0)  # M∘Δ, Eq. 12
        return shaped

    def _groups(self, layout: Layout) -> list[list[str]]:
        names = [
            n for n, shape in zip(layout.names, layout.shapes, strict=True) if not (self.exempt_1d and len(shape) < 2)
        ]
        if self.scope == "tensor":
            return [[name] for name in names]
        if self.scope == "global":
            return [names] if names else []
        wanted = set(names)
        return [kept for group in layout.modules().values() if (kept := [name for name in group if name in wanted])]


def kept_count(size: int, sparsity: float) -> int:
    """Return s = max(1, round((1 − c)·d)), halves up."""
    return max(1, math.floor((1 - sparsity) * size + 0.5))


def keep_largest(scores: Tensor, count: int) -> Tensor:
    """Return a mask of exactly the `count` largest scores; among equals the lowest index wins.

    By selection, not by sorting: the threshold is the count-th largest value, whatever order `topk` returns ties in.
    """
    if count >= scores.numel():
        return torch.ones_like(scores, dtype=torch.bool)
    threshold = torch.topk(scores, count, sorted=False).values.min()
    above, ties = scores > threshold, scores == threshold
    # The first ties, counted in blocks: one running sum over a million values leaves a GPU idle.
    blocks = torch.nn.functional.pad(ties, (0, -len(ties) % _BLOCK)).view(-1, _BLOCK)
    counted = torch.cumsum(blocks, -1, dtype=torch.int16)  # at most _BLOCK
    before = torch.cumsum(counted[:, -1], 0) - counted[:, -1]
    room = count - above.sum()
    return above | (blocks & (counted <= (room - before)[:, None])).flatten()[: len(ties)]
