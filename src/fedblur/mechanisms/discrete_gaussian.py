"""The discrete Gaussian: integers x with probability in proportion to exp(−x²/2τ²).

Canonne, Kamath and Steinke (2020), vectorised: a discrete Laplace proposal, accepted by one coin. Exact in
the sense of `coins.py`; rounding a continuous Gaussian would give another law, with another (unknown) privacy loss.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedblur.mechanisms.coins import Coins

_BATCH = 2**22  # proposals at once: bounds the memory


def sample_discrete_gaussian(tau: float, count: int, coins: Coins) -> Tensor:
    """`count` independent draws, int64. tau = 0 gives zeros."""
    if tau == 0 or count == 0:
        return coins.uniform(count).mul(0).long()
    scale = math.floor(tau) + 1  # t
    accepted: list[Tensor] = []
    missing = count
    while missing > 0:
        proposal = _discrete_laplace(scale, min(_BATCH, math.ceil(2.5 * missing) + 32), coins)
        excess = proposal.abs() - tau**2 / scale
        accepted.append(proposal[coins.heads(excess**2 / (2 * tau**2))])
        missing -= len(accepted[-1])
    return torch.cat(accepted)[:count].long()


def _discrete_laplace(scale: int, tries: int, coins: Coins) -> Tensor:
    """Draws with probability in proportion to exp(−|y|/scale), float64; as many as `tries` proposals give."""
    rest = coins.below(scale, tries)
    rest = rest[coins.heads(rest / scale)]
    size = rest + scale * coins.geometric(len(rest))
    negative = coins.uniform(len(size)) < 0.5
    kept = ~(negative & (size == 0))  # zero has one sign, or it would be drawn twice as often
    return torch.where(negative, -size, size)[kept]
