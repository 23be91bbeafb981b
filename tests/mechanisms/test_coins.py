"""Coins at their edges, where a bit too few or an equality too many cannot be seen in samples."""

from __future__ import annotations

import numpy as np
import torch
from fedblur.mechanisms.coins import Coins
from numpy.typing import NDArray

from tests.worlds import CPU


class Told:
    """A stream that gives the numbers it was told, one for each call."""

    private = True

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def child(self, *path: str | int) -> Told:
        return self

    def uniform(self, count: int) -> NDArray[np.float64]:
        return np.full(count, self.values.pop(0))


def coins(*values: float) -> Coins:
    return Coins(Told(*values), CPU)  # type: ignore[arg-type]


def test_coins__have_106_bits() -> None:
    """Where the first 53 bits are zero, the next 53 decide: tails are as fine as the middle."""
    assert coins(0.0, 0.5).fine_uniform(1).item() == 2.0**-54
    assert coins(0.0, 2.0**-53).fine_uniform(1).item() == 2.0**-106
    x = torch.tensor([40.0], dtype=torch.float64)  # e^-40 is below 2^-53
    assert coins(0.0, 0.0).heads(x).tolist() == [True]
    assert coins(0.0, 0.5).heads(x).tolist() == [False]


def test_coins__an_impossible_event_never_happens() -> None:
    """Bernoulli(0) with the smallest number that there is: `<`, not `<=`."""
    never = torch.tensor([torch.inf, 1000.0], dtype=torch.float64)  # e^-1000 is 0 in float64
    assert coins(0.0, 0.0).heads(never).tolist() == [False, False]
