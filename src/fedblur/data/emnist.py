"""EMNIST: handwritten digits and letters, 28 × 28. 3,400 *synthetic* users by default, not people.

Read from the user's data folder: parquet in the hub's layout (`emnist/`), or NIST's official archives
(`emnist_archives.py`). Only the MATLAB archive says who wrote what; with it `partition = "natural"` works.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from fedblur.core.errors import DataError
from fedblur.core.registry import register
from fedblur.data.cache import read_cached
from fedblur.data.dataset import Dataset, Form, Raw
from fedblur.data.emnist_archives import CLASSES, find_archive
from fedblur.data.holdout import check_share, only_split, train_and_test
from fedblur.data.hub import local_folder
from fedblur.data.packed import packed_folder
from fedblur.data.source import Place, Source, data_folder


@register("dataset", "emnist")
@dataclass(frozen=True)
class Emnist(Dataset):
    """One of EMNIST's six published splits."""

    split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"] = "byclass"  # which of the six
    test_share: float = 0.1  # held out where the source has one split only

    default_partition: ClassVar[str] = "dirichlet"
    default_clients: ClassVar[int | None] = 3400
    summary: ClassVar[str] = "28x28 handwritten characters, 62 classes (byclass), 697,932 training images"
    public: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_share("dataset.emnist.test_share", self.test_share)

    def form(self) -> Form:
        return (1, 28, 28), CLASSES[self.split]

    def load(self, data_dir: Path | None) -> Raw:
        source = self.source(data_dir)
        if source is None:
            raise DataError(
                f"emnist {self.split} is not here: put gzip.zip or matlab.zip from NIST's EMNIST page "
                "(nist.gov/itl/products-and-services/emnist-dataset) in DIR, and give data_dir=DIR or "
                "FEDBLUR_DATA=DIR"
            )
        stored = read_cached(self.cache_name, source)
        train, test = train_and_test(stored, self.test_share)
        only, note = only_split(stored), ""
        if only is not None:
            note = f"the {only} split only, {self.test_share:.0%} of it held out for test"
        made_up = "synthetic users, not writers"
        classes = CLASSES[self.split]
        return Raw(train.samples(), test.samples(), train.writers, classes, note, made_up, train.names())

    @property
    def cache_name(self) -> str:
        return f"emnist-{self.split}"

    def place(self, data_dir: Path | None) -> Place:
        return "needs fetch" if self.source(data_dir) is None else super().place(data_dir)

    def source(self, data_dir: Path | None) -> Source | None:
        folder = data_folder(data_dir)
        if self.split == "byclass":
            own = packed_folder("emnist", data_dir) or local_folder("emnist", "L", CLASSES[self.split], data_dir)
            if own is not None:
                return own
        return None if folder is None else find_archive(folder, self.split)
