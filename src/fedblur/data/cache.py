"""Packed samples on disk, so that images are decoded once. In: a source. Out: its samples.

There is one safetensors file for each data set and source, in FEDBLUR_CACHE or the platform's user cache folder. It may
be deleted at any time. A cache that cannot be read, or that others could have written, is rebuilt; one that cannot be
written only costs time.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedblur.core.cache_files import keep, open_kept, own_folder
from fedblur.core.errors import RunError
from fedblur.core.files import cache_folder
from fedblur.data.source import Place, Source, Split, Stored

_FORMAT = 2  # part of the key: a new layout never reads an old file


def cache_file(name: str, source: Source) -> Path | None:
    """Return the file that holds this source's samples once they are packed."""
    folder = cache_folder()
    key = hashlib.sha256(f"{_FORMAT}:{name}:{source.key}".encode()).hexdigest()[:16]
    return None if folder is None else folder / f"{name}-{key}.safetensors"


def read_cached(name: str, source: Source) -> Stored:
    """Return the source's samples from the cache, or read them now and cache them."""
    path = cache_file(name, source)
    stored = None if path is None else _load(path)
    if stored is None:
        stored = source.read()
        if path is not None:
            _save(path, stored)
    return stored


def place_of(name: str, source: Source) -> Place:
    """Return where a load would find the samples."""
    path = cache_file(name, source)
    if path is not None and path.is_file():
        return "cached"
    return "in the data dir" if source.local else "needs fetch"


def _load(path: Path) -> Stored | None:
    kept = open_kept(path, adopt=True)
    if kept is None:
        return None
    try:
        with kept, safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a dictionary
            about = file.metadata()
        splits = {}
        for name in about["splits"].split(","):
            writers, people = (tensors.get(f"{name}.{part}") for part in ("writers", "people"))
            splits[name] = Split(tensors[f"{name}.x"], tensors[f"{name}.y"], writers, people)
        return Stored(splits, int(about["classes"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):  # cut short, or not ours
        return None


def _save(path: Path, stored: Stored) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, split in stored.splits.items():
        parts = {"x": split.x, "y": split.y, "writers": split.writers, "people": split.people}
        tensors |= {f"{name}.{part}": value.contiguous() for part, value in parts.items() if value is not None}
    about = {"classes": str(stored.classes), "splits": ",".join(stored.splits)}
    if not own_folder(path.parent):
        return
    try:  # a file of our own is renamed: two processes may pack the same data, and the last rename wins
        with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as scratch:
            draft = Path(scratch) / path.name
            save_file(tensors, draft, metadata=about)
            keep(path, draft)
    except (OSError, SafetensorError, RunError):
        return  # full disk or a folder that may not be written: the next load decodes again
