"""The same few clients for regression, multi-label, next token and a loss of one's own, wherever they are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedblur.data.population import Federation, Inputs, Packed, Samples, each_input

CLIENTS, EACH, TOKENS, LENGTH = 6, 7, 12, 5


class Reader(nn.Module):
    """Reads tokens and a mask by name: an embedding, a mean over what the mask shows so far, logits by position."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors, self.head = nn.Embedding(TOKENS, 6), nn.Linear(6, TOKENS)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        shown = self.vectors(tokens) * mask[..., None]
        return self.head(torch.tanh(shown.cumsum(1) / mask.cumsum(1).clamp(min=1)[..., None]))


def log_cosh(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of one's own."""
    return (outputs.reshape(targets.shape) - targets).cosh().log()


@dataclass(frozen=True)
class TaskWorld:
    """What a run of a task needs beside its configuration."""

    settings: dict[str, Any]
    x: Inputs
    y: Tensor
    classes: int
    module: Callable[[], nn.Module] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def shape(self) -> Any:
        """The shape of a sample, or of each of its inputs."""
        if isinstance(self.x, dict):
            return {name: tuple(x.shape[1:]) for name, x in self.x.items()}
        return tuple(self.x.shape[1:])

    def part(self, which: int) -> tuple[Inputs, Tensor]:
        """A client's samples and targets; the last part belongs to nobody."""
        own = slice(which * EACH, (which + 1) * EACH)
        return each_input(self.x, lambda x: x[own]), self.y[own]

    def given(self) -> dict[str, Any]:
        """The arguments of `fedblur.train` that come from Python."""
        cut, sizes = CLIENTS * EACH, torch.full((CLIENTS,), EACH)
        train = Packed(
            each_input(self.x, lambda x: x[:cut]), self.y[:cut], torch.cumsum(sizes, 0) - sizes, sizes, self.classes
        )
        data = Federation("worlds", train, None, 0, Samples(*self.part(CLIENTS)), public=True)
        module = self.module() if self.module else None
        return {"federation": data, "module": module, "loss": self.loss}


def reader() -> nn.Module:
    """A model of tokens with the same weights everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Reader()


def task_world(name: str) -> TaskWorld:
    """Make one of `TASK_WORLDS`."""
    draw, total = torch.Generator().manual_seed(2), (CLIENTS + 1) * EACH
    x = torch.randn(total, 6, generator=draw)
    number = x @ torch.linspace(-1, 1, 6)
    if name == "next-token":
        tokens = torch.randint(0, TOKENS, (total, LENGTH), generator=draw)
        y = tokens.roll(-1, 1)
        y[:, -1] = -100
        y[::4, 2:] = -100
        read: Inputs = {"tokens": tokens, "mask": (torch.rand(total, LENGTH, generator=draw) < 0.8).float()}
        return TaskWorld({"task": "next-token"}, read, y, TOKENS, module=reader)
    if name == "multilabel":
        y = torch.stack([number > 0, x[:, 0] > 0, x[:, 1] > 1], 1).long()
        return TaskWorld({"task": "multilabel", "model": "mlp"}, x, y, 2)
    if name == "own":
        return TaskWorld({"model": "mlp"}, x, number, 0, loss=log_cosh)
    return TaskWorld({"task": "regression", "model": "mlp", "local": ADAM}, x, number, 0)


SGD = {"steps": 3, "batch_size": 4, "learning_rate": 0.1}
ADAM = {"steps": 3, "batch_size": 4, "learning_rate": 0.02, "optimizer": "adam"}
TASK_WORLDS = ("regression", "multilabel", "next-token", "own")
SHARED = {
    "rounds": 3, "epsilon": 8.0, "delta": 0.01, "sample_rate": 0.7, "clip_norm": 0.5, "seed": 3, "eval_every": 1,
    "accountant": "rdp", "local": SGD,
}  # fmt: skip
