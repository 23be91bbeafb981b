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

from fedblur.norms import in_one_pass, row_norms

# Rounding the factor and each product to float32 can lengthen a vector by a share of 2⁻²³; this margin is twice that.
# The norm itself is taken in float64 (`norms.py`).
MARGIN = 2.0**-22
HUGE = 2.0**100


@dataclass(frozen=True)
class Bounded:
    """Updates whose sensitivity is known: each row's l2 norm is at most `l2_bound`."""

    value: Tensor  # [clients, d]
    l2_bound: float


def clip_l2(updates: Tensor, clip_norm: float) -> tuple[Bounded, Tensor]:
    """Clip each row to one global l2 norm. Also returns the norms before clipping (local_only), [clients], float64."""
    norms = row_norms(updates)  # one norm over all tensors
    factor = torch.clamp(clip_norm * (1 - MARGIN) / norms, max=1.0)  # norm 0 gives inf, clamped to 1
    finite = norms < clip_norm * HUGE  # false for inf and nan
    return Bounded(_scaled(updates, torch.where(finite, factor, 0.0).to(updates.dtype), finite), clip_norm), norms


def _scaled(updates: Tensor, factors: Tensor, finite: Tensor) -> Tensor:
    """Each row times its factor, rounded to float32; 0·nan is nan, so a row that is not finite is itself replaced."""
    if in_one_pass(updates):
        from fedblur.kernels import triton_clip

        return triton_clip.scaled_rows(updates, factors, finite)
    scaled = updates * factors[:, None]
    if updates.device.type == "cpu" and bool(finite.all()):  # asking a GPU would stop it
        return scaled
    return torch.where(finite[:, None], scaled, 0.0)


def normalise_l2(updates: Tensor, clip_norm: float) -> tuple[Bounded, Tensor]:
    """Scale each row to the norm S, up or down: no client's signal is below S, at the sensitivity of `clip_l2`.

    In float64, since the factor of a tiny row leaves float32's range. Also returns the norms before scaling.
    """
    norms = row_norms(updates)
    usable = torch.isfinite(norms) & (norms > 0)
    factor = clip_norm * (1 - MARGIN) / torch.where(usable, norms, 1.0)
    scaled = (updates.double() * factor[:, None]).to(updates.dtype)
    return Bounded(torch.where(usable[:, None], scaled, 0.0), clip_norm), norms
