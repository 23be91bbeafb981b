"""synthetic(α, β) of FedProx (Li et al. 2020): clients computed when needed, so that N costs nothing.

Client k: u_k ~ N(0, α), B_k ~ N(0, β); W_k, b_k ~ N(u_k, 1); v_k ~ N(B_k, 1); x ~ N(v_k, diag(j^-1.2)) for
j = 1..60; y = argmax(W_k x + b_k). α and β are standard deviations, as in the authors' code; sizes are a
minimum plus lognormal(4, 2). Every client has its own W_k, so a global model can learn little.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register
from fedblur.core.rng import Seeded
from fedblur.data.dataset import Form, Generated
from fedblur.data.population import Federation, Samples, Shard

_FEATURES, _CLASSES = 60, 10
_CPU = torch.device("cpu")
_SCALE = (np.arange(1, _FEATURES + 1) ** -0.6).astype(np.float32)  # square roots of j^-1.2


@register("dataset", "synthetic")
@dataclass(frozen=True)
class Synthetic(Generated):
    """Any number of clients; validation and test samples come from further clients, who never train."""

    alpha: float = 1.0  # how much clients' labelling rules differ
    beta: float = 1.0  # how much clients' features differ
    min_samples: int = 50  # of a client
    max_samples: int = 500  # of a client
    held_out_clients: int = 100  # test clients, and the most validation clients: their samples are kept in memory

    default_partition: ClassVar[str] = "natural"
    default_clients: ClassVar[int | None] = 1000
    summary: ClassVar[str] = "synthetic(alpha, beta) of FedProx, 60 features, 10 classes, any number of clients"
    public: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ConfigError(f"dataset.synthetic.{name}={getattr(self, name)} must be 0 or more")
        if not 1 <= self.min_samples <= self.max_samples:
            raise ConfigError(
                f"dataset.synthetic.min_samples={self.min_samples} must be at least 1 "
                f"and at most max_samples={self.max_samples}"
            )
        if self.held_out_clients < 1:
            raise ConfigError(f"dataset.synthetic.held_out_clients={self.held_out_clients} must be at least 1")

    def form(self) -> Form:
        return (_FEATURES,), _CLASSES

    def federation(self, clients: int, validation_share: float, seed: int) -> Federation:
        streams = Seeded.root(seed).child("synthetic")
        wanted = round(clients * validation_share / (1 - validation_share))
        held = min(max(1, wanted), self.held_out_clients) if validation_share > 0 else 0
        validation = SyntheticClients(self, streams.child("validation"), held)
        test = SyntheticClients(self, streams.child("test"), self.held_out_clients)
        return Federation(
            name="synthetic",
            train=SyntheticClients(self, streams.child("train"), clients),
            validation=validation.samples() if held else None,
            validation_clients=held,
            test=test.samples(),
            validation_sizes=validation.sizes() if held else None,
            note=f"generated clients; test samples from {self.held_out_clients} clients that never train",
        )


@dataclass(frozen=True)
class SyntheticClients:
    """A population whose clients are generated when they are fetched."""

    law: Synthetic
    streams: Seeded
    clients: int
    device: torch.device = _CPU
    shape: tuple[int, ...] = (_FEATURES,)
    classes: int = _CLASSES

    def fetch(self, ids: Tensor) -> Shard:
        wanted = [int(client) for client in ids]
        if wanted and not 0 <= min(wanted) <= max(wanted) < self.clients:
            raise IndexError(f"clients {min(wanted)} to {max(wanted)} of a population of {self.clients}")
        x, y, sizes = self._generate(wanted)
        return Shard(x.to(self.device), y.to(self.device), torch.cumsum(sizes, 0) - sizes, sizes)

    def to(self, device: torch.device) -> SyntheticClients:
        return replace(self, device=device)

    def samples(self) -> Samples:
        """Return all samples of all clients: for the few that are held out."""
        x, y, _ = self._generate(range(self.clients))
        return Samples(x, y)

    def sizes(self) -> Tensor:
        """Return how many samples each client has."""
        return self._generate(range(self.clients))[2]

    def _generate(self, ids: Iterable[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Generate x [samples, 60], y [samples], sizes [ids]; a client depends on the seed and its id alone."""
        pairs = [_client(self.law, self.streams.child(client).numpy()) for client in ids]
        x = np.concatenate([np.empty((0, _FEATURES), np.float32), *(x for x, _ in pairs)])
        y = np.concatenate([np.empty(0, np.int64), *(y for _, y in pairs)])
        sizes = torch.tensor([len(y) for _, y in pairs], dtype=torch.int64)
        return torch.from_numpy(x), torch.from_numpy(y), sizes


def _client(law: Synthetic, rng: np.random.Generator) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    size = int(min(law.max_samples, law.min_samples + rng.lognormal(4, 2)))
    u, spread = law.alpha * rng.standard_normal(), law.beta * rng.standard_normal()  # u_k, B_k
    weight = np.float32(u) + rng.standard_normal((_FEATURES, _CLASSES), dtype=np.float32)  # W_k
    bias = np.float32(u) + rng.standard_normal(_CLASSES, dtype=np.float32)  # b_k
    centre = np.float32(spread) + rng.standard_normal(_FEATURES, dtype=np.float32)  # v_k
    x = rng.standard_normal((size, _FEATURES), dtype=np.float32)
    x *= _SCALE
    x += centre
    return x, np.argmax(x @ weight + bias, axis=1)
