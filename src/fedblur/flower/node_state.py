"""The state of a node: personal parameters of its client, from round to round, which never leave it (docs/personal.md).

    STATE/personal-NODE/CONFIG/round-000007.safetensors     as they were after round 7; only this user can read them

STATE is `state` in the node's configuration (`--node-config 'state="/var/lib/fedblur"'`), or `fedblur` in Flower's own
folder (FLWR_HOME). CONFIG is the configuration's hash. A server that crashed repeats rounds since its last checkpoint,
so a node keeps the rows of so many rounds, and begins a round with the newest row of an earlier one. A new run of the
same configuration begins with round 1, and so with the model's initial values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedblur.core.config import Config, config_digest
from fedblur.core.files import make_folder, read_bytes, remove, write_atomically
from fedblur.flower.wire import Refused
from fedblur.learning.personal import Personal
from fedblur.training.checkpoint import KEEP


def state_folder(node: Mapping[str, Any], node_id: int, config: Config) -> Path:
    """Return where this node keeps what is personal: a folder of its own, also where nodes share a machine."""
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "fedblur"
    base = Path(str(node["state"])) if "state" in node else home
    return base / f"personal-{node_id}" / config_digest(config)[:16]


class NodeRows:
    """The rows of one client, on its own machine, in one round."""

    def __init__(self, folder: Path, personal: Personal, round_: int, checkpoint_every: int) -> None:
        self.folder, self.personal, self.round_ = folder, personal, round_
        self.window = KEEP * checkpoint_every  # rounds that a server may go back

    def read(self, ids: Tensor) -> Tensor:
        """Return the client's row after its last round before this one; the first row if there is none."""
        earlier = [round_ for round_ in self._kept() if round_ < self.round_]
        if not earlier:
            return self.personal.initial[None].clone()
        return self._load(self._kept()[max(earlier)])[None]

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Keep the client's row. Those of rounds that did not happen, or are too old to go back to, are removed."""
        for folder in (self.folder.parent, self.folder):
            make_folder(folder, private=True)
        tensors = {name: tensor.contiguous() for name, tensor in self.personal.layout.unflatten(rows[0]).items()}
        write_atomically(self.folder / f"round-{self.round_:06d}.safetensors", save(tensors), private=True)
        kept = self._kept()
        last = max((round_ for round_ in kept if round_ <= self.round_ - self.window), default=0)
        remove(*(path for round_, path in kept.items() if round_ > self.round_ or round_ < last))

    def _kept(self) -> dict[int, Path]:
        found = {path: re.fullmatch(r"round-(\d+)", path.stem) for path in self.folder.glob("round-*.safetensors")}
        return {int(match.group(1)): path for path, match in found.items() if match}

    def _load(self, path: Path) -> Tensor:
        layout = self.personal.layout
        try:
            tensors = load(read_bytes(path))
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        except (SafetensorError, ValueError) as error:
            raise Refused(f"{path} cannot be read ({error}); remove it to go on with older values") from None
        if shapes != dict(zip(layout.names, layout.shapes, strict=True)):
            raise Refused(f"{path} is of other personal parameters; remove its folder")
        return layout.flatten(tensors).to(torch.float32)
