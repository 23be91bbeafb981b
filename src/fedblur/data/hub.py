"""Image data sets in the public hub's layout: a folder of parquet files, or a name on the hub.

Both go through `datasets.load_dataset`, so a test on a folder runs the same code as a user with a network.
Columns: `image` or `img`, `label` or `character`, and `writer_id` where the source knows the writers.
"""

from __future__ import annotations

import importlib
import io
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedblur.core.errors import DataError
from fedblur.data.packed import packed_folder
from fedblur.data.roles import identities
from fedblur.data.source import Source, Split, Stored, data_folder, fingerprint

_PIXELS = 512 * 512  # of an image; a thousand of them are decoded at a time
Mode = Literal["L", "RGB"]  # grey or colour, as Pillow names them


@dataclass(frozen=True)
class HubFolder:
    """A folder of parquet files, as a download from the hub leaves it."""

    folder: Path
    mode: Mode
    classes: int
    local: bool = True

    @property
    def key(self) -> str:
        return fingerprint(self.folder.rglob("*.parquet"))

    def read(self) -> Stored:
        library = _library()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, _quiet(library):
            try:  # the scratch folder takes the library's own copy, of no use once the images are packed
                return _pack(
                    library.load_dataset(str(self.folder), cache_dir=scratch), self.mode, self.classes, library
                )
            except DataError:
                raise
            except Exception as error:  # the library raises whatever its readers raise
                raise DataError(
                    f"{self.folder} cannot be read as parquet of the hub's layout: {_line(error)}"
                ) from None


@dataclass(frozen=True)
class HubName:
    """A data set on the public hub."""

    name: str  # ours
    hub_name: str  # owner/name
    mode: Mode
    classes: int
    local: bool = False

    @property
    def key(self) -> str:
        return f"hub:{self.hub_name}"

    def read(self) -> Stored:
        library = _library()
        with _quiet(library):
            try:
                # fail at once when the network is away; the library itself would retry for half a minute
                hub, constants = (importlib.import_module(f"huggingface_hub{part}") for part in ("", ".constants"))
                if not constants.HF_HUB_OFFLINE:  # offline by the user's wish: the library looks in its own cache
                    hub.HfApi().dataset_info(self.hub_name, timeout=10)
                return _pack(library.load_dataset(self.hub_name), self.mode, self.classes, library)
            except DataError:
                raise
            except Exception as error:
                raise DataError(
                    f"{self.name} is not in a data dir and could not be fetched from the hub ({_line(error)}): run "
                    f"`fedblur data fetch {self.name}` with a network connection, or put the parquet files of "
                    f"{self.hub_name} in DIR/{self.name} and give data_dir=DIR or FEDBLUR_DATA=DIR"
                ) from None


def hub_source(name: str, hub_name: str, mode: Mode, classes: int, data_dir: Path | None) -> Source:
    """Return the user's own copy if there is one, else the hub. `classes` is public knowledge, never counted."""
    own = packed_folder(name, data_dir) or local_folder(name, mode, classes, data_dir)
    return own or HubName(name, hub_name, mode, classes)


def local_folder(name: str, mode: Mode, classes: int, data_dir: Path | None) -> HubFolder | None:
    """Return DIR/name if it holds parquet files."""
    folder = data_folder(data_dir)
    if folder is None or not any((folder / name).rglob("*.parquet")):
        return None
    return HubFolder(folder / name, mode, classes)


def _library() -> Any:
    """Import the library late: it takes a second, and `fedblur[data]` is optional."""
    try:
        importlib.import_module("PIL.Image")
        return importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"image data sets need {error.name}: pip install 'fedblur[data]'") from None


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Silence the library's progress bars, log lines and warnings, and restore its settings."""
    bars, level = not library.are_progress_bars_disabled(), library.logging.get_verbosity()
    library.disable_progress_bars()
    library.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        library.logging.set_verbosity(level)
        if bars:
            library.enable_progress_bars()


def _pack(tables: Any, mode: Mode, classes: int, library: Any) -> Stored:
    splits = {split: _pack_split(table, mode, library) for split, table in tables.items() if split in ("train", "test")}
    if not splits:
        raise DataError(
            f"found splits {sorted(tables)}, but neither 'train' nor 'test'; name the files train-*.parquet"
        )
    for name, split in splits.items():
        if not 0 <= int(split.y.min()) <= int(split.y.max()) < classes:
            raise DataError(f"the {name} labels are not all in 0..{classes - 1}, as those of this data set are")
    return Stored(splits, classes)


def _pack_split(table: Any, mode: Mode, library: Any) -> Split:
    picture, label = _column(table, "image", "img"), _column(table, "label", "character")
    encoded = table.cast_column(picture, library.Image(decode=False)).with_format("arrow")
    pixels = np.concatenate([_decode(batch.column(picture), mode) for batch in encoded.iter(batch_size=1000)])
    writers, people = None, None
    if "writer_id" in table.column_names:
        names, codes = np.unique(np.asarray(encoded[:].column("writer_id")).astype(str), return_inverse=True)
        writers, people = torch.from_numpy(codes.astype(np.int64)), identities(names.tolist())
    y = np.asarray(encoded[:].column(label)).astype(np.int64)
    return Split(torch.from_numpy(pixels), torch.from_numpy(y), writers, people)


def _column(table: Any, *names: str) -> str:
    found = next((name for name in names if name in table.column_names), None)
    if found is None:
        raise DataError(f"found columns {table.column_names}, but none is {' or '.join(names)}")
    return found


def _decode(column: Any, mode: Mode) -> NDArray[np.uint8]:
    """Decode images of one size: [images, channels, height, width]."""
    from PIL import Image

    opened = [Image.open(io.BytesIO(cell["bytes"])) for cell in column.to_pylist()]
    sizes = {picture.size for picture in opened}  # by their headers: nothing is decompressed yet
    if len(sizes) > 1:
        raise DataError("the images differ in size; all images of a data set must have the same height and width")
    if any(width * height > _PIXELS for width, height in sizes):
        width, height = sizes.pop()
        raise DataError(f"an image has {width} x {height} pixels; {_PIXELS:,} is the limit")
    stacked = np.stack([np.asarray(picture.convert(mode)) for picture in opened])
    return stacked[:, None] if mode == "L" else np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))


def _line(error: Exception) -> str:
    """Return the first line of another library's error, shortened: ours are one line."""
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:160]
