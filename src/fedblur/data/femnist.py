"""FEMNIST: handwritten digits and letters, 28 × 28, with the people who wrote them. The natural federation.

LEAF stores dark ink on a bright background (255). Here images are inverted: the background is 0 and ink is bright, as
in EMNIST and MNIST. Zero padding in a convolution then continues the background, and one model reads all three alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from fedblur.core.errors import ConfigError, DataError
from fedblur.core.registry import register
from fedblur.data.cache import read_cached
from fedblur.data.dataset import Dataset, Form, Raw
from fedblur.data.holdout import check_share, only_split, train_and_test, with_many_samples
from fedblur.data.hub import hub_source
from fedblur.data.population import Samples
from fedblur.data.source import Source, Stored

_CLASSES = 62


@register("dataset", "femnist")
@dataclass(frozen=True)
class Femnist(Dataset):
    """62 characters by writer; a share of each writer's images is held out for test."""

    min_samples: int = 20  # writers with fewer images are left out
    test_share: float = 0.1  # of each writer's images

    default_partition: ClassVar[str] = "natural"
    default_clients: ClassVar[int | None] = None
    summary: ClassVar[str] = "28x28 handwritten characters by writer, 62 classes, about 3,600 writers"
    public: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.min_samples < 1:
            raise ConfigError(f"dataset.femnist.min_samples={self.min_samples} must be at least 1")
        check_share("dataset.femnist.test_share", self.test_share)

    def form(self) -> Form:
        return (1, 28, 28), _CLASSES

    def load(self, data_dir: Path | None) -> Raw:
        stored = read_cached("femnist", self.source(data_dir))
        main = "train" if "train" in stored.splits else "test"
        split = stored.splits[main]
        if split.writers is None:
            raise DataError(
                "femnist without a writer_id column has no clients; use the hub's copy, or dataset = 'emnist'"
            )
        kept = with_many_samples(split, self.min_samples)
        if len(kept.y) == 0:
            most = int(torch.bincount(split.writers).max())
            raise DataError(f"min_samples={self.min_samples} leaves no writer; the largest has {most} images")
        stored = Stored({**stored.splits, main: kept}, stored.classes)
        train, test = train_and_test(stored, self.test_share)
        note = f"writers with at least {self.min_samples} images"
        if only_split(stored) is not None:
            note += f", {self.test_share:.0%} of each writer's images held out for test"
        train_set, test_set = (Samples(_inverted(split.x), split.y) for split in (train, test))
        made_up = "synthetic users, not writers"
        return Raw(train_set, test_set, train.writers, _CLASSES, note, made_up, train.names())

    def source(self, data_dir: Path | None) -> Source:
        return hub_source("femnist", "flwrlabs/femnist", "L", _CLASSES, data_dir)


def _inverted(x: Tensor) -> Tensor:
    """Invert each image that has a bright background, by itself: one client's images must not decide on another's.

    Characters hardly touch the border, so most of the border is background.
    """
    border = torch.cat([x[:, 0, 0], x[:, 0, -1], x[:, 0, 1:-1, 0], x[:, 0, 1:-1, -1]], dim=1)  # [images, 108]
    bright = (border > 127).sum(dim=1, dtype=torch.int64) * 2 > border.shape[1]
    return torch.where(bright[:, None, None, None], 255 - x, x)
