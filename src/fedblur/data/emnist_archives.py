"""EMNIST as NIST publishes it: `matlab.zip` or its .mat files, `gzip.zip` or its IDX files.

Only the MATLAB form names writers. Both store each image transposed; here they are turned upright. The letters
split counts classes from 1; here they start at 0.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedblur.core.decompression import Readable, count_at_most, read_at_most
from fedblur.core.errors import DataError
from fedblur.data.roles import identities
from fedblur.data.source import Source, Split, Stored, fingerprint

CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
_FIRST_LABEL = {"letters": 1}
_MOST = 2**30  # bytes of a file without its compression; the largest, byclass's training images, has 547,178,704
_COMPRESSED = 15  # the kind of a MATLAB file's compressed elements
_BROKEN = (
    OSError, EOFError, KeyError, IndexError, TypeError, ValueError, zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip


def find_archive(folder: Path, split: str) -> Source | None:
    """Return the first official form in the folder or its `emnist` subfolder; MATLAB first, as it has writers."""
    for place in (folder, folder / "emnist"):
        for file in (place / f"emnist-{split}.mat", place / "matlab.zip"):
            if file.is_file():
                return MatArchive(file, split)
        idx = [
            next((file for file in (place / name, place / f"{name}.gz") if file.is_file()), None)
            for name in _idx_names(split)
        ]
        if all(idx):
            return IdxArchive(tuple(file for file in idx if file), split)
        if (place / "gzip.zip").is_file():
            return IdxArchive((place / "gzip.zip",), split)
    return None


@dataclass(frozen=True)
class MatArchive:
    """emnist-<split>.mat, or matlab.zip that holds it."""

    file: Path
    split: str
    local: bool = True

    @property
    def key(self) -> str:
        return f"{self.split}:{fingerprint([self.file])}"

    def read(self) -> Stored:
        from scipy.io import loadmat
        from scipy.io.matlab import MatReadError

        splits: dict[str, Split] = {}
        try:
            with _opened(self.file, f"emnist-{self.split}.mat") as stream:
                content = read_at_most(stream, _MOST)
            _check_mat(content)
            root = loadmat(io.BytesIO(content), variable_names=["dataset"])["dataset"][0, 0]
            for name in ("train", "test"):
                table = root[name][0, 0]
                writers = table["writers"].ravel() if "writers" in (table.dtype.names or ()) else None
                splits[name] = _split_of(table["images"].reshape(-1, 28, 28), table["labels"], writers, self.split)
        except (*_BROKEN, MatReadError) as error:
            raise _broken(self.file, error) from None
        return Stored(splits, CLASSES[self.split])


@dataclass(frozen=True)
class IdxArchive:
    """The four IDX files of a split, or gzip.zip that holds them."""

    files: tuple[Path, ...]  # gzip.zip alone, or train images, train labels, test images, test labels
    split: str
    local: bool = True

    @property
    def key(self) -> str:
        return f"{self.split}:{fingerprint(self.files)}"

    def read(self) -> Stored:
        arrays, file = [], self.files[0]
        try:
            for position, name in enumerate(_idx_names(self.split)):
                file = self.files[position % len(self.files)]  # the zip holds all four
                with _opened(file, f"{name}.gz") as stream:
                    arrays.append(_read_idx(stream))
            file = self.files[0]
            pairs = {"train": arrays[:2], "test": arrays[2:]}
            splits = {name: _split_of(images, labels, None, self.split) for name, (images, labels) in pairs.items()}
        except _BROKEN as error:
            raise _broken(file, error) from None
        return Stored(splits, CLASSES[self.split])


def _idx_names(split: str) -> list[str]:
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    return [f"emnist-{split}-{part}-{kind}" for part in ("train", "test") for kind in kinds]


@contextmanager
def _opened(file: Path, member: str) -> Iterator[Readable]:
    """Open a file's content without zip and gzip; `member` is looked up by name in a zip."""
    with ExitStack() as stack:
        name = file.name
        stream: IO[bytes] = stack.enter_context(file.open("rb"))
        if file.suffix == ".zip":
            archive = stack.enter_context(zipfile.ZipFile(stream))
            name = next((n for n in archive.namelist() if n.rpartition("/")[2] == member), "")
            if not name:
                raise ValueError(f"it has no {member}")
            stream = stack.enter_context(archive.open(name))
        yield gzip.GzipFile(fileobj=stream) if name.endswith(".gz") else stream


def _check_mat(content: bytes) -> None:
    """Refuse a MATLAB file whose compressed elements hold more than the limit together; scipy has none."""
    order = "<" if content[126:128] == b"IM" else ">"
    at, left = 128, _MOST
    while at + 8 <= len(content):
        kind, size = struct.unpack(f"{order}II", content[at : at + 8])
        if kind == _COMPRESSED:
            stream = _Inflated(content[at + 8 : at + 8 + size])
            left -= count_at_most(stream, left)
        at += 8 + size


class _Inflated:
    """The content of a zlib stream."""

    def __init__(self, data: bytes) -> None:
        self._left, self._inflate = data, zlib.decompressobj()

    def read(self, size: int, /) -> bytes:
        part = self._inflate.decompress(self._left, size)
        self._left = self._inflate.unconsumed_tail
        return part


def _read_idx(stream: Readable) -> NDArray[np.uint8]:
    """Read the IDX format: 0, 0, type 8 (unsigned byte), number of dimensions; each dimension; then the bytes."""
    zero, kind, dimensions = struct.unpack(">HBB", stream.read(4))
    if zero != 0 or kind != 8:
        raise ValueError("it does not start like an IDX file of bytes")
    shape = struct.unpack(f">{dimensions}I", stream.read(4 * dimensions))
    if math.prod(shape) > _MOST:
        raise ValueError(f"its header promises more than {_MOST:,} bytes")
    return np.frombuffer(read_at_most(stream, math.prod(shape)), dtype=np.uint8).reshape(shape)


def _split_of(images: NDArray[Any], labels: NDArray[Any], writers: NDArray[Any] | None, split: str) -> Split:
    upright = np.ascontiguousarray(images.transpose(0, 2, 1)[:, None]).astype(np.uint8, copy=False)  # [n, 1, 28, 28]
    y = labels.ravel().astype(np.int64) - _FIRST_LABEL.get(split, 0)
    if len(upright) != len(y) or not 0 <= y.min() <= y.max() < CLASSES[split]:
        raise ValueError(f"{len(upright)} images, {len(y)} labels, classes {y.min()} to {y.max()}")
    if writers is None:
        return Split(torch.from_numpy(upright), torch.from_numpy(y), None)
    names, codes = np.unique(writers, return_inverse=True)
    people = identities(str(int(name)) for name in names)
    return Split(torch.from_numpy(upright), torch.from_numpy(y), torch.from_numpy(codes.astype(np.int64)), people)


def _broken(file: Path, error: Exception) -> DataError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(f"{file} is not the EMNIST archive that its name says ({reason}); download it again")
