"""Packed samples on disk, so that images are decoded once. In: a source. Out: what it holds.

One safetensors file per data set and source, in FEDBLUR_CACHE or the platform's user cache folder; it may
be deleted at any time. A cache that cannot be read is rebuilt; one that cannot be written only costs speed.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedblur.data.raw import Place
from fedblur.data.source import Source, Split, Stored

_FORMAT = 2  # part of the key: a new layout never reads an old file


def cache_folder() -> Path | None:
    """Where packed samples are kept; None when the user has no home."""
    given = os.environ.get("FEDBLUR_CACHE")
    if given:
        return Path(given).expanduser()
    try:
        return _platform_cache() / "fedblur"
    except RuntimeError:  # no home folder
        return None


def _platform_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache_file(name: str, source: Source) -> Path | None:
    """The file that holds this source's samples once they are packed."""
    folder = cache_folder()
    key = hashlib.sha256(f"{_FORMAT}:{name}:{source.key}".encode()).hexdigest()[:16]
    return None if folder is None else folder / f"{name}-{key}.safetensors"


def read_cached(name: str, source: Source) -> Stored:
    """What the source holds, from the cache when it is there; else read, and kept for the next time."""
    path = cache_file(name, source)
    stored = None if path is None else _load(path)
    if stored is None:
        stored = source.read()
        if path is not None:
            _save(path, stored)
    return stored


def place_of(name: str, source: Source) -> Place:
    """Where a load would find the samples."""
    path = cache_file(name, source)
    if path is not None and path.is_file():
        return "cached"
    return "in the data dir" if source.local else "needs fetch"


def _load(path: Path) -> Stored | None:
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a dictionary
            about = file.metadata()
        splits = {
            split: Split(
                tensors[f"{split}.x"],
                tensors[f"{split}.y"],
                tensors.get(f"{split}.writers"),
                tensors.get(f"{split}.people"),
            )
            for split in about["splits"].split(",")
        }
        return Stored(splits, int(about["classes"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):  # cut short, or not ours
        return None


def _save(path: Path, stored: Stored) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, split in stored.splits.items():
        parts = {"x": split.x, "y": split.y, "writers": split.writers, "people": split.people}
        tensors |= {f"{name}.{part}": value.contiguous() for part, value in parts.items() if value is not None}
    about = {"classes": str(stored.classes), "splits": ",".join(stored.splits)}
    try:
        _save_atomically(path, tensors, about)
    except (OSError, SafetensorError):
        return  # full disk or a folder that may not be written: the next load decodes again


def _save_atomically(path: Path, tensors: dict[str, torch.Tensor], about: dict[str, str]) -> None:
    """Two processes may pack the same data at once: each writes its own file, and the last rename wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as scratch:
        draft = Path(scratch) / path.name
        save_file(tensors, draft, metadata=about)
        draft.replace(path)
