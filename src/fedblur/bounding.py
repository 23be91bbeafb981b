"""Stage 4, bound: what of an update a client sends. In: updates [clients, d]. Out: Bounded messages [clients, width].

    update [d] → public support [k] → clip or normalise to S → append the bit of adaptive clipping → message [k (+1)]

Everything in a `Message` is public and the same for all clients of a round. The bit says whether the norm before the
clip is at most S. It is one more coordinate of value ± c/2, so that vector and bit are one vector of norm at most
√(S² + c²/4), released by one mechanism in one go: any mechanism, accounted for as ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedblur.clipping import MARGIN, Bounded, clip_l2, normalise_l2
from fedblur.norms import row_norms

Bounding = Literal["clip", "normalise"]


@dataclass(frozen=True)
class Message:
    """What clients send in a round.

    Formal guarantee: the exact l2 norm of every encoded row is at most `l2_bound(clip_norm)`.

    | update            | vector part                  | bit part                               |
    |-------------------|------------------------------|----------------------------------------|
    | norm at most S    | as `clipping.py` says        | + c/2                                  |
    | norm above S      | as `clipping.py` says        | − c/2                                  |
    | inf or nan inside | 0                            | 0: a refused update says nothing       |
    """

    bounding: Bounding = "clip"
    support: Tensor | None = None  # [k] sorted int64, the public coordinates that are sent; None: all of them
    bit_weight: float = 0.0  # c; 0: no bit is sent

    def vector_width(self, dimension: int) -> int:
        """k, how many of the model's d coordinates are sent."""
        return dimension if self.support is None else len(self.support)

    def width(self, dimension: int) -> int:
        """Length of a message."""
        return self.vector_width(dimension) + bool(self.bit_weight)

    def l2_bound(self, clip_norm: float) -> float:
        """Sensitivity of the sum of messages to one client."""
        return math.hypot(clip_norm, self.bit_weight / 2)

    def encode(self, updates: Tensor, clip_norm: float) -> tuple[Bounded, Tensor]:
        """Messages of clients, and the norms of what they send before it was bounded (local_only)."""
        chosen = updates if self.support is None else updates.index_select(-1, self.support)
        bound = clip_l2 if self.bounding == "clip" else normalise_l2
        bounded, norms = bound(chosen, clip_norm)
        if not self.bit_weight:
            return bounded, norms
        sign = torch.where(norms <= clip_norm, 1.0, -1.0)  # 2b − 1
        bit = torch.where(torch.isfinite(norms), self._half() * sign, 0.0).to(updates.dtype)
        return Bounded(torch.cat([bounded.value, bit[:, None]], dim=-1), self.l2_bound(clip_norm)), norms

    def accept(self, rows: Tensor, clip_norm: float) -> tuple[Bounded, Tensor, Tensor]:
        """Messages that came from elsewhere: a row that is not finite, or longer than it may be, counts as zero.

        Also returns the rows' norms (zero for those) and which rows hold. What `encode` makes always holds: its margin
        of 2⁻²² is far above what the norm's own rounding, and the 2⁻⁴⁰ that is left for it here, can add up to.
        """
        bound = self.l2_bound(clip_norm)
        norms = row_norms(rows)
        holds = torch.isfinite(norms) & (norms <= bound * (1 - 2.0**-40))
        value = torch.where(holds[:, None], rows, 0.0)
        return Bounded(value, bound), torch.where(holds, norms, 0.0), holds

    def decode(self, total: Tensor, dimension: int) -> tuple[Tensor, float]:
        """The sum of messages as a vector [d], zero where nothing was sent, and the bits' Σ (b − ½)."""
        vector = total[: self.vector_width(dimension)]
        bits = float(total[-1]) / (2 * self._half()) if self.bit_weight else 0.0
        if self.support is not None:
            vector = total.new_zeros(dimension).index_copy(0, self.support, vector)
        return vector, bits

    def _half(self) -> float:
        """c/2 less a margin: rounding it to float32 cannot lengthen the message beyond its bound."""
        return self.bit_weight / 2 * (1 - MARGIN)
