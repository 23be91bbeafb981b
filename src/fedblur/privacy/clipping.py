"""Stage 4, clip. In: updates [clients, d]. Out: Bounded, every row's l2 norm ≤ l2_bound, also for 0, inf and nan.

    update [d] → public support [k] → clip or normalise to S → append the bit of adaptive clipping → message [k (+1)]

Formal guarantee: for every row, the exact (real-number) l2 norm of what is returned is at most `clip_norm`, so the
sum of a cohort changes by at most `clip_norm` when one client is added or removed. Only this file makes a
`Bounded`, and noise accepts nothing else.

Everything in a `Message` is public and the same for all clients of a round. The bit says whether the norm before the
clip is at most S. It is one more coordinate of value ± c/2, so that vector and bit are one vector of norm at most
√(S² + c²/4), released by one mechanism in one go: any mechanism, accounted for as ever.

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

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Bounding = Literal["clip", "normalise"]


@dataclass(frozen=True)
class Message:
    """The message that clients send in a round.

    Formal guarantee: the exact l2 norm of every encoded row is at most `l2_bound(clip_norm)`.

    | update            | vector part                  | bit part                               |
    |-------------------|------------------------------|----------------------------------------|
    | norm at most S    | as the table above says      | + c/2                                  |
    | norm above S      | as the table above says      | − c/2                                  |
    | inf or nan inside | 0                            | 0: a refused update says nothing       |
    """

    bounding: Bounding = "clip"
    support: Tensor | None = None  # [k] sorted int64, the public coordinates that are sent; None: all of them
    bit_weight: float = 0.0  # c; 0: no bit is sent

    def vector_width(self, dimension: int) -> int:
        """Return k, how many of the model's d coordinates are sent."""
        return dimension if self.support is None else len(self.support)

    def width(self, dimension: int) -> int:
        """Return the length of a message."""
        return self.vector_width(dimension) + bool(self.bit_weight)

    def l2_bound(self, clip_norm: float) -> float:
        """Return the sensitivity of the sum of messages to one client."""
        return math.hypot(clip_norm, self.bit_weight / 2)

    def encode(self, updates: Tensor, clip_norm: float) -> tuple[Bounded, Tensor]:
        """Encode clients' messages; return them and the norms before they were bounded (local_only)."""
        chosen = updates if self.support is None else updates.index_select(-1, self.support)
        bound = clip_l2 if self.bounding == "clip" else normalise_l2
        bounded, norms = bound(chosen, clip_norm)
        if not self.bit_weight:
            return bounded, norms
        sign = torch.where(norms <= clip_norm, 1.0, -1.0)  # 2b − 1
        bit = torch.where(torch.isfinite(norms), self._half() * sign, 0.0).to(updates.dtype)
        return Bounded(torch.cat([bounded.value, bit[:, None]], dim=-1), self.l2_bound(clip_norm)), norms

    def accept(self, rows: Tensor, clip_norm: float) -> tuple[Bounded, Tensor, Tensor]:
        """Accept messages from elsewhere: a row that is not finite, or longer than it may be, counts as zero.

        Also returns the rows' norms (zero for those) and which rows hold. What `encode` makes always holds: its margin
        of 2⁻²² is far above what the norm's own rounding, and the 2⁻⁴⁰ that is left for it here, can add up to.
        """
        bound = self.l2_bound(clip_norm)
        norms = row_norms(rows)
        holds = torch.isfinite(norms) & (norms <= bound * (1 - 2.0**-40))
        value = torch.where(holds[:, None], rows, 0.0)
        return Bounded(value, bound), torch.where(holds, norms, 0.0), holds

    def decode(self, total: Tensor, dimension: int) -> tuple[Tensor, float]:
        """Decode the sum of messages: a vector [d], zero where nothing was sent, and the bits' Σ (b − ½)."""
        vector = total[: self.vector_width(dimension)]
        bits = float(total[-1]) / (2 * self._half()) if self.bit_weight else 0.0
        if self.support is not None:
            vector = total.new_zeros(dimension).index_copy(0, self.support, vector)
        return vector, bits

    def _half(self) -> float:
        """Return c/2 less a margin: rounding it to float32 cannot lengthen the message beyond its bound."""
        return self.bit_weight / 2 * (1 - MARGIN)


# Rounding the factor and each product to float32 can lengthen a vector by a share of 2⁻²³; this margin is twice that.
# The norm itself is taken in float64: a float32 norm of a million values errs by 1.5e-5, more than this margin.
MARGIN = 2.0**-22
HUGE = 2.0**100


@dataclass(frozen=True)
class Bounded:
    """Updates whose sensitivity is known: each row's l2 norm is at most `l2_bound`."""

    value: Tensor  # [clients, d]
    l2_bound: float


def row_norms(values: Tensor) -> Tensor:
    """Return the norms of [rows, width] over the last dimension, float64."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)
    return norms


def clip_l2(updates: Tensor, clip_norm: float) -> tuple[Bounded, Tensor]:
    """Clip each row to one global l2 norm. Also returns the norms before clipping (local_only), [clients], float64."""
    norms = row_norms(updates)  # one norm over all tensors
    factor = torch.clamp(clip_norm * (1 - MARGIN) / norms, max=1.0)  # norm 0 gives inf, clamped to 1
    finite = norms < clip_norm * HUGE  # false for inf and nan
    factors = torch.where(finite, factor, 0.0).to(updates.dtype)
    scaled = updates * factors[:, None]
    if updates.device.type != "cpu" or not bool(finite.all()):  # asking a GPU would stop it
        scaled = torch.where(finite[:, None], scaled, 0.0)  # 0·nan is nan: a row that is not finite is itself replaced
    return Bounded(scaled, clip_norm), norms


def normalise_l2(updates: Tensor, clip_norm: float) -> tuple[Bounded, Tensor]:
    """Scale each row to the norm S, up or down: no client's signal is below S, at the sensitivity of `clip_l2`.

    In float64, since the factor of a tiny row leaves float32's range. Also returns the norms before scaling.
    """
    norms = row_norms(updates)
    usable = torch.isfinite(norms) & (norms > 0)
    factor = clip_norm * (1 - MARGIN) / torch.where(usable, norms, 1.0)
    scaled = (updates.double() * factor[:, None]).to(updates.dtype)
    return Bounded(torch.where(usable[:, None], scaled, 0.0), clip_norm), norms
