"""Handwritten digits that come with scikit-learn: 1,797 images of 8 × 8, without a download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from fedblur.core.registry import register
from fedblur.data.dataset import Dataset, Form, Raw
from fedblur.data.population import Samples

_SPLIT_SEED = 0  # public: the same test digits for everyone


@register("dataset", "digits")
@dataclass(frozen=True)
class Digits(Dataset):
    """8 × 8 digits, 80 % for training, 20 % for test, the same share of each digit."""

    default_partition: ClassVar[str] = "iid"
    default_clients: ClassVar[int | None] = 359
    summary: ClassVar[str] = "scikit-learn's 8x8 digits, 10 classes, 1,437 training images"
    public: ClassVar[bool] = True

    def form(self) -> Form:
        return (1, 8, 8), 10

    def load(self, data_dir: Path | None) -> Raw:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        x, y = load_digits(return_X_y=True)
        images = (x.reshape(-1, 1, 8, 8) / 16).astype(np.float32)  # stored as 0..16
        parts = train_test_split(images, y.astype(np.int64), test_size=0.2, random_state=_SPLIT_SEED, stratify=y)
        train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in parts)
        return Raw(Samples(train_x, train_y), Samples(test_x, test_y), owners=None, classes=10)
