"""Stage 4, clip. In: updates [clients, d]. Out: Bounded, every row's l2 norm ≤ l2_bound, also for 0, inf and nan.

Formal guarantee: for every row, the exact (real-number) l2 norm of what is returned is at most `clip_norm`, so the
sum of a cohort changes by at most `clip_norm` when one client is added or removed. Only this file and `bounding.py`,
which calls it, make a `Bounded`, and noise accepts nothing else.

| update            | `clip_l2`                                     | `normalise_l2`                               |
|-------------------|-----------------------------------------------|----------------------------------------------|
| 0                 | 0                                             | 0                                            |
| norm below S      | unchanged, bit for bit                        | S·(1 − 2⁻²²)·unit vector, rounded to float32 |
| norm above S      | S·(1 − 2⁻²²)·unit vector, rounded to float32  | the same                                     |
| inf or nan inside | 0                                             | 0                                            |
| norm ≥ 2¹⁰⁰·S     | 0: the factor would leave float32's range     | as any other: it is scaled in float64        |
| clip_norm = inf   | unchanged (only without noise: FedAvg)        | refused by the configuration                 |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Rounding the factor and each product to float32 can lengthen a vector by a share of 2⁻²³; this margin is twice that.
# float32 norms err by 1.5e-5 on a million elements, so the norm itself is taken in float64.
MARGIN = 2.0**-22
HUGE = 2.0**100


@dataclass(frozen=True)
class Bounded:
    """Updates whose sensitivity is known: each row's l2 norm is at most `l2_bound`."""

    value: Tensor  # [clients, d]
    l2_bound: float


def clip_l2(updates: Tensor, clip_norm: float) -> tuple[Bounded, Tensor]:
    """Clip each row to one global l2 norm. Also returns the norms before clipping (local_only), [clients], float64."""
    norms = torch.linalg.vector_norm(updates, dim=-1, dtype=torch.float64)  # one norm over all tensors
    factor = torch.clamp(clip_norm * (1 - MARGIN) / norms, max=1.0)  # norm 0 gives inf, clamped to 1
    finite = norms < clip_norm * HUGE  # false for inf and nan
    scaled = updates * torch.where(finite, factor, 0.0).to(updates.dtype)[:, None]
    if updates.device.type == "cpu" and bool(finite.all()):  # asking a GPU would stop it
        return Bounded(scaled, clip_norm), norms
    value = torch.where(finite[:, None], scaled, 0.0)  # 0·nan is nan, so the row itself is replaced
    return Bounded(value, clip_norm), norms


def normalise_l2(updates: Tensor, clip_norm: float) -> tuple[Bounded, Tensor]:
    """Scale each row to the norm S, up or down: no client's signal is below S, at the sensitivity of `clip_l2`.

    In float64, since the factor of a tiny row leaves float32's range. Also returns the norms before scaling.
    """
    norms = torch.linalg.vector_norm(updates, dim=-1, dtype=torch.float64)
    usable = torch.isfinite(norms) & (norms > 0)
    factor = clip_norm * (1 - MARGIN) / torch.where(usable, norms, 1.0)
    scaled = (updates.double() * factor[:, None]).to(updates.dtype)
    return Bounded(torch.where(usable[:, None], scaled, 0.0), clip_norm), norms
