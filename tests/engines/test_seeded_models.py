"""Models that draw: the same masks on every engine, whatever torch's global generator has been used for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedblur.core.config import LocalTraining
from fedblur.core.rng import Seeded
from fedblur.engines import Engine, LocalEngine
from fedblur.learning.methods.lus import Lus
from tests.engines.neighbours import ENGINES
from tests.worlds import CPU, Recurrent, Transformer, job_for, packed


class Attention(nn.Module):
    """Attention that returns its weights: another path through torch's code."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2)
        values, weights = self.attention(x, x, x)
        logits: Tensor = self.head(values.mean(1)) + weights.sum()
        return logits


class Drawn(nn.Module):
    """A layer whose output is disturbed by a draw."""

    def __init__(self, disturb: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.disturb = nn.Linear(64, 12), nn.Linear(12, 10), disturb

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x.flatten(1)))
        logits: Tensor = self.head(self.disturb(h) if self.training else h)
        return logits


def depth(h: Tensor) -> Tensor:
    """Stochastic depth as torchvision and timm write it: an empty tensor, filled in place."""
    return h * torch.empty((len(h), 1), dtype=h.dtype, device=h.device).bernoulli_(0.5).div_(0.5)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU, both ways": lambda: Recurrent(nn.GRU, bidirectional=True),
    "transformer": Transformer,
    "attention with weights": Attention,
    "stochastic depth": lambda: Drawn(depth),
    "rand": lambda: Drawn(lambda h: h * (torch.rand(len(h), 1) < 0.5)),
    "randn_like": lambda: Drawn(lambda h: h + torch.randn_like(h)),
    "new_empty": lambda: Drawn(lambda h: h + h.new_empty(h.shape).normal_()),
    "gumbel_softmax": lambda: Drawn(lambda h: F.gumbel_softmax(h, tau=0.5)),
    "rrelu": lambda: Drawn(lambda h: F.rrelu(h, training=True)),
    "alpha_dropout": lambda: Drawn(lambda h: F.alpha_dropout(h, 0.3, training=True)),
}


@pytest.mark.parametrize("name", MODELS)
def test_randomness__is_the_clients_own_on_every_engine(name: str) -> None:
    torch.manual_seed(0)
    module = MODELS[name]()
    job = job_for(module, (Lus(0.5),), local=LocalTraining(steps=3, batch_size=4, learning_rate=0.5))
    population, ids = packed([9, 4, 7]), torch.arange(3)

    def messages(engine: Engine) -> Tensor:
        torch.manual_seed(len(rows))  # whatever else has drawn before
        drawn = torch.get_rng_state()
        blocks = [block.bounded.value for block in engine.map_clients(job, ids, Seeded.root(0))]
        assert torch.equal(torch.get_rng_state(), drawn)
        return torch.cat(blocks)

    rows: list[Tensor] = []
    traced = ["traced"] if name in ("LSTM", "transformer", "stochastic depth") else []  # tracing takes seconds
    for engine in ("vectorised", "sequential", "workers", *traced, "vectorised"):
        rows.append(messages(ENGINES[engine](population, 32)))
    for row in rows[1:]:
        torch.testing.assert_close(row, rows[0], rtol=0, atol=1e-5)
    assert torch.equal(rows[-1], rows[0])  # to the byte
    undisturbed = job_for(module.eval(), (Lus(0.5),), local=job.local)
    module.eval()
    plain = torch.cat(
        [b.bounded.value for b in LocalEngine(population, CPU, False, 32).map_clients(undisturbed, ids, Seeded.root(0))]
    )
    assert not torch.allclose(plain, rows[0], atol=1e-3)
