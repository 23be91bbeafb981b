"""What counting alone reaches on the plays: the rows of docs/text.md that are not private.

python tools/text_baselines.py

Counts are taken on the training speakers without noise, one added to each, and measured on the test data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedblur import load_federation


def rows() -> dict[str, tuple[float, float]]:
    """Loss in nats and accuracy by model: all alike, by frequency, by frequency given the character before."""
    data = load_federation("plays")
    train, test, letters = data.train, data.test, data.train.classes
    before = torch.ones(letters, letters, dtype=torch.float64)
    before.index_put_((train.x[:, -1].long(), train.y), torch.ones((), dtype=torch.float64), accumulate=True)
    alone = torch.bincount(train.y, minlength=letters).double() + 1
    every = torch.zeros(len(test.y), dtype=torch.int64)
    return {
        "all alike": _measured(torch.ones(1, letters, dtype=torch.float64), every, test.y),
        "by frequency": _measured(alone[None], every, test.y),
        "given the character before": _measured(before, test.x[:, -1].long(), test.y),
    }


def _measured(counts: Tensor, given: Tensor, wanted: Tensor) -> tuple[float, float]:
    log_shares = (counts / counts.sum(-1, keepdim=True)).log()[given]
    loss = -log_shares.gather(1, wanted[:, None]).mean()
    return float(loss), float((log_shares.argmax(-1) == wanted).double().mean())


if __name__ == "__main__":
    for name, (loss, accuracy) in rows().items():
        print(f"{name}: loss {loss:.3f}, accuracy {100 * accuracy:.1f} %")
