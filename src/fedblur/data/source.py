"""Sources, the places of a data set's samples before they are packed: a folder, archives, or the hub.

Reading is slow, so a source has a key that changes with its content; `cache.py` keeps what was read under it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from fedblur.core.errors import DataError
from fedblur.data.population import Samples

Place = Literal["built in", "cached", "in the data dir", "needs fetch"]


@dataclass(frozen=True)
class Split:
    """The samples of one split as the source has them."""

    x: Tensor  # [samples, channels, height, width], uint8
    y: Tensor  # [samples], int64
    writers: Tensor | None  # [samples], int64, 0..K-1
    people: Tensor | None = None  # [K], int64: a hash of each writer's own id (`roles.identities`); None: not known

    def samples(self) -> Samples:
        return Samples(self.x, self.y)

    def take(self, index: Tensor) -> Split:
        """Return only these samples."""
        return Split(self.x[index], self.y[index], None if self.writers is None else self.writers[index], self.people)

    def names(self) -> tuple[str, ...] | None:
        """Return each writer's name: the same in every copy of the data, whoever else is in it.

        Where ids are not known (exports by version 0.1), the place in the source has to do.
        """
        if self.writers is None:
            return None
        if self.people is None:
            return tuple(map(str, range(int(self.writers.max()) + 1)))
        return tuple(map(str, self.people.tolist()))


@dataclass(frozen=True)
class Stored:
    """Everything that a source has: "train", "test", or only one of them."""

    splits: Mapping[str, Split]
    classes: int


class Source(Protocol):
    """Something that can be read once and remembered."""

    @property
    def local(self) -> bool:
        """Return whether it lies in the user's data folder (else it is fetched)."""

    @property
    def key(self) -> str:
        """Return the same text for the same content."""

    def read(self) -> Stored: ...


def data_folder(data_dir: Path | None) -> Path | None:
    """Return the user's data folder: the argument, else FEDBLUR_DATA, else none."""
    given = data_dir or os.environ.get("FEDBLUR_DATA")
    if not given:
        return None
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"data_dir={str(folder)!r} is not a folder; give one that holds the data sets (or FEDBLUR_DATA)"
        )
    return folder


def fingerprint(files: Iterable[Path]) -> str:
    """Return a key that changes when a file is added, renamed, resized or rewritten; no file is read."""
    digest = hashlib.sha256()
    for file in sorted(files):
        stat = file.stat()
        digest.update(f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
