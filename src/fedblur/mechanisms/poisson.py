"""Poisson and Skellam integers. A Skellam variable is the difference of two equal Poisson variables.

Poisson variables are drawn by transformed rejection (Hörmann 1993, PTRS without its shortcuts) for a mean of 10
or more, else by counting arrivals. Both follow the law exactly in real arithmetic; here probabilities are float64
(`coins.py`), with the logarithm of the density good to 1e-11.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedblur.mechanisms.coins import Coins

_BATCH = 2**22  # proposals at once: bounds the memory
_STIRLING = 16.0  # from here on Stirling's series is exact in float64


def sample_skellam(variance: float, count: int, coins: Coins) -> Tensor:
    """`count` independent draws with mean 0, int64."""
    return sample_poisson(variance / 2, count, coins) - sample_poisson(variance / 2, count, coins)


def sample_poisson(mean: float, count: int, coins: Coins) -> Tensor:
    """`count` independent draws, int64."""
    return _by_arrivals(mean, count, coins) if mean < 10 else _by_rejection(mean, count, coins)


def _by_arrivals(mean: float, count: int, coins: Coins) -> Tensor:
    """How many arrivals with exponential gaps fit into `mean`."""
    left = torch.full_like(coins.uniform(count), mean)
    total = torch.zeros_like(left)
    alive = torch.arange(count, device=left.device)
    while len(alive):
        left[alive] += torch.log(coins.fine_uniform(len(alive)))
        alive = alive[left[alive] > 0]
        total[alive] += 1
    return total.long()


def _by_rejection(mean: float, count: int, coins: Coins) -> Tensor:
    b = 0.931 + 2.53 * math.sqrt(mean)
    a = -0.059 + 0.02483 * b
    inverse_alpha = 1.1239 + 1.1328 / (b - 3.4)
    accepted: list[Tensor] = []
    missing = count
    while missing > 0:
        tries = min(_BATCH, math.ceil(1.3 * missing) + 32)
        u, v = coins.uniform(tries) - 0.5, coins.fine_uniform(tries)
        edge = 0.5 - u.abs()
        value = torch.floor((2 * a / edge + b) * u + mean + 0.43)
        hat = v * inverse_alpha / (a / edge**2 + b)
        accepted.append(value[(value >= 0) & (hat.log() <= _log_density(value.clamp(min=0), mean))])
        missing -= len(accepted[-1])
    return torch.cat(accepted)[:count].long()


def _log_density(k: Tensor, mean: float) -> Tensor:
    """log of the Poisson probability; for large k without the difference of large numbers that lgamma would need."""
    small = k * math.log(mean) - mean - torch.lgamma(k + 1)
    n = k.clamp(min=_STIRLING)
    x = (mean - n) / n
    series = 1 / (12 * n) - 1 / (360 * n**3) + 1 / (1260 * n**5) - 1 / (1680 * n**7)
    large = n * (torch.log1p(x) - x) - 0.5 * torch.log(2 * math.pi * n) - series
    return torch.where(k < _STIRLING, small, large)
