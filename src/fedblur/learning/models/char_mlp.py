"""A neural n-gram model (Bengio et al. 2003): characters as vectors, a hidden layer over the window, what comes next.

Tokens arrive as floats that are whole numbers. The lookup is a product with one-hot rows: under `vmap` that is one
batched product for all clients, where indexing would scatter gradients one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedblur.core.errors import ConfigError, ModelError
from fedblur.core.registry import register
from fedblur.learning.models.base import glorot_


@register("model", "char_mlp")
@dataclass(frozen=True)
class CharMlp:
    """Reads windows of tokens 0..classes-1 and predicts the next one."""

    embedding: int = 8  # numbers for each character
    hidden: int = 64  # units of the hidden layer

    reads_text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("embedding", "hidden"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.char_mlp.{name}={getattr(self, name)} must be at least 1")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        if len(shape) != 1 or shape[0] < 1:
            raise ModelError(
                f"shape={tuple(shape)} does not fit model 'char_mlp', which reads windows of characters (length,); "
                'use dataset "plays", or "cnn" for images and "mlp" for numbers'
            )
        return _CharMlp(shape[0], classes, self.embedding, self.hidden)


class _CharMlp(nn.Module):
    def __init__(self, window: int, classes: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.classes = classes
        self.vectors = nn.Linear(classes, embedding, bias=False)
        self.dense = nn.Linear(window * embedding, hidden)
        self.head = nn.Linear(hidden, classes)
        glorot_(self)
        nn.init.normal_(self.vectors.weight)
        nn.init.zeros_(self.head.weight)  # all characters are equally likely before training: loss = ln(classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(self.classes, device=x.device)
        rows = (x[..., None] == tokens).to(self.vectors.weight.dtype)  # [batch, window, classes], one-hot
        return self.head(torch.tanh(self.dense(self.vectors(rows).flatten(1))))  # type: ignore[no-any-return]
