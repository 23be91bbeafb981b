"""MNIST: 60,000 training and 10,000 test digits, 28 × 28. Natural clients if there is a `writer_id` column.

The hub's own copy has none, so its clients are made up. A copy with NIST's writer ids has 539 training writers, and its
test digits come from other people.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedblur.core.registry import register
from fedblur.data.cache import read_cached
from fedblur.data.dataset import Dataset, Form, Raw
from fedblur.data.holdout import both_splits
from fedblur.data.hub import hub_source
from fedblur.data.source import Source

_CLASSES = 10


@register("dataset", "mnist")
@dataclass(frozen=True)
class Mnist(Dataset):
    """Handwritten digits."""

    default_partition: ClassVar[str] = "natural"
    default_clients: ClassVar[int | None] = 1000
    summary: ClassVar[str] = "28x28 handwritten digits, 10 classes, 60,000 training images"
    public: ClassVar[bool] = True

    def form(self) -> Form:
        return (1, 28, 28), _CLASSES

    def load(self, data_dir: Path | None) -> Raw:
        stored = read_cached("mnist", self.source(data_dir))
        train, test = both_splits(stored, "mnist")
        made_up = "synthetic users, not writers"
        samples = train.samples(), test.samples()
        return Raw(*samples, train.writers, _CLASSES, made_up_note=made_up, names=train.names())

    def source(self, data_dir: Path | None) -> Source:
        return hub_source("mnist", "ylecun/mnist", "L", _CLASSES, data_dir)
