"""Random bits as the discrete samplers use them, on the device where the result is needed.

Without a seed every bit comes from the operating system. What "exact" means for the samplers that are built on these
coins: they follow the law by a proof that holds for ideal coins, at every value, and use no rounded Gaussian. A coin
here compares a uniform number of 106 bits with a probability in float64, so its probability is off by a relative 2^-52,
in the tails too. Nothing else is approximated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedblur.rng import Rng

_BITS = 53


class Coins:
    """One stream of bits; every call goes on where the last one ended."""

    def __init__(self, rng: Rng, device: torch.device) -> None:
        self._rng, self._device, self._calls = rng, device, 0

    def uniform(self, count: int) -> Tensor:
        """`count` multiples of 2^-53 in [0, 1), float64."""
        self._calls += 1
        stream = self._rng.child("draw", self._calls)
        if self._rng.private or self._device.type == "cpu":
            return torch.from_numpy(stream.uniform(count)).to(self._device)
        generator = torch.Generator(self._device).manual_seed(stream.seed())
        return torch.rand(count, generator=generator, dtype=torch.float64, device=self._device)

    def fine_uniform(self, count: int) -> Tensor:
        """Uniform in [0, 1] with 106 bits, so that small values have a full float64 mantissa as well."""
        return self.uniform(count) + 2.0**-_BITS * self.uniform(count)

    def heads(self, x: Tensor) -> Tensor:
        """Bernoulli(exp(−x)) for every x ≥ 0, [n] bool."""
        return self.fine_uniform(len(x)) < torch.exp(-x)

    def below(self, bound: int, count: int) -> Tensor:
        """Integers uniform in [0, bound), as float64; a little fewer than `count` where rejection needs it."""
        width = 2**_BITS // bound
        value = torch.floor(torch.floor(self.uniform(count) * 2.0**_BITS) / width)
        return value[value < bound]  # the last, incomplete interval would favour some values

    def geometric(self, count: int) -> Tensor:
        """How many times Bernoulli(1/e) succeeds before it fails, [n] float64."""
        total = torch.zeros(count, dtype=torch.float64, device=self._device)
        alive = torch.arange(count, device=self._device)
        while len(alive):
            alive = alive[self.heads(torch.ones(len(alive), dtype=torch.float64, device=self._device))]
            total[alive] += 1
        return total
