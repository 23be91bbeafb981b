"""Checkpoints: one safetensors file each, with the state as JSON in its header, written atomically.

A file holds a checksum of its own content. The newest two are kept, so that a corrupt one costs a few rounds, not
the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedblur.core.errors import RunError
from fedblur.core.files import write_atomically

KEEP = 2


@dataclass(frozen=True)
class Checkpoint:
    """A server's state after a round, and what it belongs to."""

    round: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]  # JSON values: the resolved configuration, the model's layout


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint, then drop those beyond the newest two."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    digest = _digest(tensors, checkpoint.state)
    header = {"round": checkpoint.round, "state": checkpoint.state, "digest": digest}
    path = folder / f"round-{checkpoint.round:06d}.safetensors"
    write_atomically(path, save(tensors, metadata={"fedblur": json.dumps(header)}))
    for old in _newest_first(folder)[KEEP:]:
        old.unlink(missing_ok=True)
    return path


def load_newest(folder: Path) -> tuple[Checkpoint, list[str]]:
    """Load the newest checkpoint that is whole, with a note for each that is not."""
    notes: list[str] = []
    kept = _newest_first(folder)
    for path in kept:
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {})["fedblur"])
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            if header["digest"] != _digest(tensors, header["state"]):
                raise ValueError("its checksum does not match")
            return Checkpoint(header["round"], tensors, header["state"]), notes
        except (SafetensorError, ValueError, KeyError, OSError) as error:
            notes.append(f"{path.name} is corrupt ({str(error)[:80]}); falling back to the checkpoint before it")
    broken = ", ".join(path.name for path in kept)
    found = f": {broken} cannot be read; restore one from a copy, or" if broken else ";"
    raise RunError(f"{folder} has no usable checkpoint{found} start a new run")


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.safetensors"), reverse=True)


def _digest(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()
