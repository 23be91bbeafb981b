"""What a simulation may look at and a deployment may not: `local_only`, never released, never accounted.

The terms are those of the paper: the error of a noisy clipped update (the equation after Algorithm 1), for one
client's message as printed and for the aggregate, which is what trains the model; ᾱ and β of its convergence theorem;
and the signal κ, the norm of the mean clipped update in units of S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedblur.client import Block
from fedblur.norms import row_norms

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass
class Diagnostics:
    """Gathers blocks as they pass by on their way to the mechanism."""

    coordinates: int  # k, how many are sent: d without a mask
    clip_norm: float  # S of this round
    norms: list[Tensor] = field(default_factory=list)
    kept_norms: list[Tensor] = field(default_factory=list)  # after the clip
    trained_norms: list[Tensor] = field(default_factory=list)
    clipped_sum: Tensor | None = None
    bias_sum: Tensor | None = None

    def observe(self, block: Block) -> None:
        """Look at a block; the sums before clipping are recovered from the clipped rows and their norms."""
        value = block.bounded.value[:, : self.coordinates]  # without the bit of adaptive clipping
        kept = row_norms(value)
        excess = torch.where(kept > 0, block.norms / kept - 1, 0.0)  # negative where normalising lengthens
        clipped = value.sum(0)
        bias = excess.to(value.dtype) @ value  # Σ (Δ̂ − clip(Δ̂)) = Σ (‖Δ̂‖/‖clip(Δ̂)‖ − 1)·clip(Δ̂)
        self.clipped_sum = clipped if self.clipped_sum is None else self.clipped_sum + clipped
        self.bias_sum = bias if self.bias_sum is None else self.bias_sum + bias
        self.norms.append(block.norms)
        self.kept_norms.append(kept)
        self.trained_norms.append(block.trained_norms.double())

    def report(self, noise_std: float, expected_cohort: float) -> dict[str, float | list[float] | None]:
        """One round's figures; None where an empty cohort leaves nothing to measure."""
        norms = torch.cat(self.norms).cpu() if self.norms else torch.empty(0, dtype=torch.float64)
        trained = torch.cat(self.trained_norms).cpu() if self.norms else norms
        kept = torch.cat(self.kept_norms).cpu() if self.norms else norms
        finite = torch.isfinite(norms)
        known, known_trained, known_kept = norms[finite], trained[finite], kept[finite]
        figures: dict[str, float | list[float] | None] = {
            "cohort": len(norms),
            "refused": len(norms) - len(known),  # non-finite, counted as zero
            "clip_norm": self.clip_norm if math.isfinite(self.clip_norm) else None,  # public
            "coordinates": self.coordinates,  # public
            "noise_norm": noise_std * math.sqrt(self.coordinates) / expected_cohort,
            "noise_error": self.coordinates * (noise_std / expected_cohort) ** 2,  # dσ²S²/P̄²
            "noise_error_message": noise_std**2 / max(len(norms), 1),  # σ²S²/|P_t|, Eq. 3
        }
        if not len(known):
            return figures | dict.fromkeys((*_MEASURED, "norm_quantiles", "trained_norm_quantiles"))
        assert self.clipped_sum is not None
        assert self.bias_sum is not None
        measured = (
            float((known > self.clip_norm).double().mean()),
            float((known - known_kept).square().mean()) / self.coordinates,  # max(0, ‖Δ‖ − S)²/d, Eq. 3
            float((self.bias_sum.double() / len(known)).square().sum()),
            float((known_kept / known).nan_to_num(1.0).mean()),  # ᾱ of the convergence theorem
            float((known / known_trained).nan_to_num(1.0).mean()),  # β: what sparsification leaves of the norm
            float(self.clipped_sum.double().norm()) / len(known) / self.clip_norm,  # κ
        )
        figures |= dict(zip(_MEASURED, measured, strict=True))
        figures["norm_quantiles"] = torch.quantile(known, torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
        figures["trained_norm_quantiles"] = torch.quantile(
            known_trained, torch.tensor(QUANTILES, dtype=torch.float64)
        ).tolist()
        return figures


_MEASURED = ("clipped_share", "clip_error_message", "clip_error", "alpha_bar", "beta", "kappa")
