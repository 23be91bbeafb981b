"""Checkpoints: one safetensors file each, with the state as JSON in its header, written atomically.

A file holds a checksum of its own content, its round included. The newest two are kept, so that a corrupt one costs a
few rounds, not the run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedblur.core.errors import RunError
from fedblur.core.files import make_folder, read_bytes, remove, write_atomically

KEEP = 2
_MOST_BYTES = 2**36  # of a checkpoint
_FORMAT = 2  # its checksum covers the round
_NAME = re.compile(r"round-([0-9]{6,})\.safetensors")  # six digits sort files; more rounds than that have longer names


@dataclass(frozen=True)
class Checkpoint:
    """A server's state after a round, and what it belongs to."""

    round: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]  # JSON values: the resolved configuration, the model's layout


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint, then drop those beyond the newest two."""
    make_folder(folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    header = {"format": _FORMAT, "round": checkpoint.round, "state": checkpoint.state}
    header["digest"] = _digest(tensors, header)
    path = folder / f"round-{checkpoint.round:06d}.safetensors"
    write_atomically(path, save(tensors, metadata={"fedblur": json.dumps(header)}))
    remove(*[path for _, path in _newest_first(folder)[KEEP:]])
    return path


def load_newest(folder: Path) -> tuple[Checkpoint, list[str]]:
    """Load the newest checkpoint that is whole, with a note for each that is not."""
    notes: list[str] = []
    kept = _newest_first(folder)
    for _, path in kept:
        try:
            return _load(path), notes
        except (SafetensorError, RunError, ValueError, KeyError, TypeError, OSError, RecursionError) as error:
            reason = " ".join(str(error).split())[:80]
            notes.append(f"{path.name} is corrupt ({reason}); falling back to the checkpoint before it")
    broken = ", ".join(path.name for _, path in kept)
    found = f": {broken} cannot be read; restore one from a copy, or" if broken else ";"
    raise RunError(f"{folder} has no usable checkpoint{found} start a new run")


def has_checkpoint(folder: Path) -> bool:
    """Return whether a checkpoint was ever written here, whole or not."""
    return bool(_newest_first(folder))


def rounds_kept(folder: Path) -> list[int]:
    """Return the rounds of the checkpoints that a run may continue from, the newest first."""
    return [round_ for round_, _ in _newest_first(folder)]


def _load(path: Path) -> Checkpoint:
    data = read_bytes(path, most=_MOST_BYTES)
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        raise ValueError("it is cut short")
    header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["fedblur"])
    tensors = load(data)
    if header["digest"] != _digest(tensors, header):
        raise ValueError("its checksum does not match")
    if path.name != f"round-{header['round']:06d}.safetensors":
        raise ValueError(f"it holds round {header['round']}")
    return Checkpoint(header["round"], tensors, header["state"])


def _newest_first(folder: Path) -> list[tuple[int, Path]]:
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("round-*.safetensors"))
    return sorted(((int(name[1]), path) for name, path in found if name), reverse=True)


def _digest(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """Hash names, types, shapes and content. Version 0.2 hashed the state and the content alone."""
    if "format" not in header:
        digest = hashlib.sha256(json.dumps(header["state"], sort_keys=True).encode())
    else:
        kinds = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
        about = [header["format"], header["round"], header["state"], kinds]
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()
