"""A recurrent network over characters (Cho et al. 2014): a state that each character changes, and what comes next.

Tokens arrive as floats that are whole numbers. The cell is written out in products that `vmap` maps to batched products
of all clients; torch's own nn.GRU runs as one kernel, which has no rule for clients with weights of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedblur.core.errors import ConfigError, ModelError
from fedblur.core.registry import register
from fedblur.learning.models.base import glorot_


@register("model", "char_gru")
@dataclass(frozen=True)
class CharGru:
    """Reads tokens 0..classes-1 one after another and predicts the next one."""

    hidden: int = 64  # numbers in the state
    embedding: int = 16  # numbers for each character
    each: bool = False  # predict after each character, for task "next-token"; otherwise after the last one

    reads_text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("hidden", "embedding"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.char_gru.{name}={getattr(self, name)} must be at least 1")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        if len(shape) != 1 or shape[0] < 1:
            raise ModelError(
                f"shape={tuple(shape)} does not fit model 'char_gru', which reads windows of characters (length,); "
                'use dataset "plays", or "cnn" for images and "mlp" for numbers'
            )
        return _CharGru(classes, self.embedding, self.hidden, self.each)


class _CharGru(nn.Module):
    def __init__(self, classes: int, embedding: int, hidden: int, each: bool) -> None:
        super().__init__()
        self.classes, self.hidden, self.each = classes, hidden, each
        self.vectors = nn.Linear(classes, embedding, bias=False)
        self.into = nn.Linear(embedding, 3 * hidden)  # of the gates r and z, and of the candidate
        self.within = nn.Linear(hidden, 3 * hidden)
        self.head = nn.Linear(hidden, classes)
        glorot_(self)
        nn.init.normal_(self.vectors.weight)
        for block in self.within.weight.data.chunk(3):
            nn.init.orthogonal_(block)  # keeps the length of a state over many characters
        nn.init.zeros_(self.head.weight)  # all characters are equally likely before training: loss = ln(classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(self.classes, device=x.device)
        rows = (x[..., None] == tokens).to(self.vectors.weight.dtype)  # [batch, length, classes], one-hot
        given = self.into(self.vectors(rows))  # [batch, length, 3 hidden], for all characters at once
        state = torch.zeros_like(given[:, 0, : self.hidden])
        states = []
        for step in given.unbind(1):
            state = self._next(step, state)
            states.append(state)
        return self.head(torch.stack(states, 1) if self.each else state)  # type: ignore[no-any-return]

    def _next(self, given: Tensor, state: Tensor) -> Tensor:
        """Return the state after a character, [batch, hidden]."""
        own, gates = self.within(state), 2 * self.hidden
        reset, keep = torch.sigmoid(given[:, :gates] + own[:, :gates]).chunk(2, -1)
        candidate = torch.tanh(given[:, gates:] + reset * own[:, gates:])
        return candidate + keep * (state - candidate)
