"""The contract of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from fedblur.client import Block, ClientJob
from fedblur.rng import Rng


class Engine(Protocol):
    """Runs clients somewhere: on one device, on many, on real nodes."""

    @property
    def device(self) -> torch.device: ...

    def map_clients(self, job: ClientJob, ids: Tensor, rng: Rng) -> Iterator[Block]:
        """The updates of these clients, in blocks. `rng` is the round's stream; each client takes its own child."""
        ...
