"""CIFAR-10: 50,000 training and 10,000 test images, 32 × 32, colour. They have no owners: clients are made up."""

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


@register("dataset", "cifar10")
@dataclass(frozen=True)
class Cifar10(Dataset):
    """Colour images of ten classes."""

    default_partition: ClassVar[str] = "dirichlet"
    default_clients: ClassVar[int | None] = 1000
    summary: ClassVar[str] = "32x32 colour images, 10 classes, 50,000 training images"
    public: ClassVar[bool] = True

    def form(self) -> Form:
        return (3, 32, 32), _CLASSES

    def load(self, data_dir: Path | None) -> Raw:
        stored = read_cached("cifar10", self.source(data_dir))
        train, test = both_splits(stored, "cifar10")
        return Raw(train.samples(), test.samples(), owners=None, classes=_CLASSES)

    def source(self, data_dir: Path | None) -> Source:
        return hub_source("cifar10", "uoft-cs/cifar10", "RGB", _CLASSES, data_dir)
