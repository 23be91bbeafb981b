"""The rows of clients' personal parts in a simulation: what each client keeps from one of its rounds to the next.

    personal/rows.json          what a row holds, and how many clients there are
    personal/rows.bin           a record for each client: its last round, a checksum, k numbers; sparse, zeros: never
    personal/before-000010.bin  what records held at the checkpoint of round 10, of those that changed since

A round's rows are written when the next round begins or a checkpoint is saved, and before any record changes, what it
held goes to the disk. So a run that falls back to a checkpoint finds the rows of that checkpoint, whenever and however
the process ended. Records are private data: only this user can read the folder, and nothing of it is ever released.

`RowsOnDisk` is for runs; `RowsInMemory` for audits, which keep nothing.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedblur.core.errors import ConfigError, RunError
from fedblur.core.files import (
    make_folder,
    read_bytes,
    read_json,
    remove,
    remove_folder,
    sync_folder,
    write_atomically,
    write_in_place,
)
from fedblur.learning.module_function import Params
from fedblur.learning.personal import CohortRows, Personal

_HEAD = struct.Struct("<4sIQI")  # of a block of old records: a mark, the round that changed them, how many, a checksum
_MARK = b"FBPR"
_MOST_BYTES = 2**40
_RESTORE = "restore the folder personal/ from a copy, or start a new run"


class ClientRows(Protocol):
    """Keeps the rows of clients between rounds, for this process's own simulation."""

    def fetch(self, ids: Tensor, round_: int) -> CohortRows:
        """Return the rows with which these clients begin this round."""

    def stage(self, round_: int, rows: CohortRows) -> None:
        """Take the rows with which clients ended this round."""

    def read(self, ids: Tensor) -> Tensor:
        """Return these clients' rows as they are now: [clients, k]."""


class RowsInMemory:
    """Rows that nobody asks for after the process has ended."""

    def __init__(self, initial: Tensor) -> None:
        self.initial = initial
        self.known: dict[int, Tensor] = {}

    def fetch(self, ids: Tensor, round_: int) -> CohortRows:
        return CohortRows(ids.cpu(), self.read(ids))

    def stage(self, round_: int, rows: CohortRows) -> None:
        self.known |= dict(zip(rows.ids.tolist(), rows.values, strict=True))

    def read(self, ids: Tensor) -> Tensor:
        rows = [self.known.get(client, self.initial) for client in ids.tolist()]
        return torch.stack(rows) if rows else self.initial.new_empty(0, len(self.initial))


class RowsOnDisk:
    """Rows in a run folder, as many as there are clients; only those that trained take up space."""

    def __init__(self, folder: Path, personal: Personal, clients: int) -> None:
        self.folder, self.personal, self.clients = folder, personal, clients
        self.file = folder / "rows.bin"
        self.record = _record(personal.layout.total)
        self.base = 0  # the round of the last checkpoint
        self.saved: set[int] = set()  # whose records of that checkpoint are on disk
        self.end = 0  # of the file that holds them
        self.pending: tuple[int, CohortRows] | None = None  # what the last round changed

    # --- a run begins, or goes on ---

    def begin(self) -> None:
        """Make empty rows for a new run."""
        remove_folder(self.folder)
        make_folder(self.folder, private=True)
        layout = self.personal.layout
        about = {
            "clients": self.clients,
            "parameters": list(self.personal.parameters),
            "names": list(layout.names),
            "shapes": [list(shape) for shape in layout.shapes],
        }
        write_atomically(self.folder / "rows.json", json.dumps(about, indent=2).encode(), private=True)
        last = self.clients * self.record.itemsize - 1
        write_in_place(self.file, [(last, b"\0")])  # sparse: no block is taken up before a client trains
        sync_folder(self.folder)

    def restore(self, round_: int) -> None:
        """Bring the rows back to what they were at the checkpoint of this round."""
        demand_fit(self.folder, self.personal, self.clients)
        for base, path in sorted(self._earlier().items(), reverse=True):
            if base >= round_:
                for ids, records in reversed([*self._blocks(path)]):
                    self._write(ids, records)
        if int(self._records()["round"].max(initial=0)) > round_:
            raise RunError(f"{self.file} holds rows of rounds after {round_}, the last whole checkpoint; {_RESTORE}")
        for base, path in sorted(self._earlier().items(), reverse=True):
            if base >= round_:
                remove(path)  # the newest first, so that what is left after a crash can be repeated
                sync_folder(self.folder)
        self.base, self.saved, self.end, self.pending = round_, set(), 0, None

    # --- rounds ---

    def fetch(self, ids: Tensor, round_: int) -> CohortRows:
        self._apply(round_ - 1)
        return CohortRows(ids.cpu(), self.read(ids))

    def stage(self, round_: int, rows: CohortRows) -> None:
        self.pending = (round_, rows)

    def read(self, ids: Tensor) -> Tensor:
        """Return these clients' rows. One that never trained has the first row; a damaged one is an error."""
        found = self._records()[ids.cpu().numpy()]
        trained = found["round"] > 0
        checks = np.array([_checksum(record) for record in found], dtype=np.uint32)
        damaged = np.flatnonzero(checks != found["check"])
        if len(damaged):
            raise RunError(f"{self.file}: the row of client {int(ids[int(damaged[0])])} is damaged; {_RESTORE}")
        values = torch.from_numpy(np.ascontiguousarray(found["values"]).astype(np.float32))
        return torch.where(torch.from_numpy(trained)[:, None], values, self.personal.initial)

    # --- checkpoints ---

    def settle(self, round_: int) -> None:
        """Bring the rows to the end of this round, before its checkpoint is written."""
        self._apply(round_)

    def checkpointed(self, round_: int, oldest: int) -> None:
        """Note that the checkpoint of this round is on disk; `oldest` is the one that a run may still fall back to."""
        self.base, self.saved, self.end = round_, set(), 0
        remove(*(path for base, path in self._earlier().items() if base < oldest))

    def _apply(self, round_: int) -> None:
        """Write what is pending of rounds up to this one. A later round was cut off: it did not happen."""
        if self.pending is None:
            return
        changed, rows = self.pending
        if changed <= round_:
            ids = rows.ids.numpy()
            new = ids[[client not in self.saved for client in ids.tolist()]]
            if len(new):
                self._save_old(changed, new)
            records = np.zeros(len(ids), self.record)
            records["round"], records["values"] = changed, rows.values.numpy()
            records["check"] = [_checksum(record) for record in records]
            self._write(ids, records)
        self.pending = None

    def _save_old(self, round_: int, ids: NDArray[np.int64]) -> None:
        """Put what these records held at the last checkpoint on disk, before they change."""
        content = ids.astype("<i8").tobytes() + self._records()[ids].tobytes()
        block = _HEAD.pack(_MARK, round_, len(ids), zlib.crc32(content)) + content
        write_in_place(self.folder / f"before-{self.base:06d}.bin", [(self.end, block)])
        sync_folder(self.folder)
        self.end += len(block)  # an interrupted block is written again, over what there is of it
        self.saved |= set(ids.tolist())

    def _blocks(self, path: Path) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        """Yield (ids, old records) of each whole block. What a crash cut short is the last one: nothing had changed."""
        data, at = read_bytes(path, most=_MOST_BYTES), 0
        while at + _HEAD.size <= len(data):
            mark, _, count, check = _HEAD.unpack_from(data, at)
            begin, end = at + _HEAD.size, at + _HEAD.size + count * (8 + self.record.itemsize)
            if mark != _MARK or zlib.crc32(data[begin:end]) != check or end > len(data):
                return
            ids = np.frombuffer(data, "<i8", count, begin).astype(np.int64)
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.clients:
                return
            yield ids, np.frombuffer(data, self.record, count, begin + 8 * count)
            at = end

    def _earlier(self) -> dict[int, Path]:
        """Return the files of old records, by the round of their checkpoint."""
        found = {path: re.fullmatch(r"before-(\d+)\.bin", path.name) for path in self.folder.glob("before-*.bin")}
        return {int(match.group(1)): path for path, match in found.items() if match}

    def _records(self) -> NDArray[Any]:
        return _records(self.file, self.record, self.clients)

    def _write(self, ids: NDArray[np.int64], records: NDArray[Any]) -> None:
        """Write records, neighbours in one piece."""
        order = np.argsort(ids)
        ids, records = ids[order], records[order]
        runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(ids) != 1) + 1)
        pieces = ((int(ids[run[0]]) * self.record.itemsize, records[run].tobytes()) for run in runs if len(run))
        write_in_place(self.file, pieces)


def demand_fit(folder: Path, personal: Personal, clients: int) -> None:
    """Refuse rows of another model or of other clients."""
    about = _about(folder)
    layout = personal.layout
    if (about["names"], about["shapes"]) != (list(layout.names), [list(shape) for shape in layout.shapes]):
        raise RunError(f"{folder / 'rows.json'} is of other personal parameters than this run's; {_RESTORE}")
    if about["clients"] != clients:
        raise RunError(f"{folder / 'rows.json'} is of {about['clients']} clients, this run has {clients}; {_RESTORE}")


def read_personal(folder: Path, client: int) -> Params | None:
    """Return a client's personal parameters as a run keeps them; None for a client that never trained."""
    about = _about(folder)
    if not 0 <= client < about["clients"]:
        raise ConfigError(f"client={client} must be one of 0..{about['clients'] - 1}, the clients of this run")
    sizes = [int(np.prod(shape)) for shape in about["shapes"]]
    record = _records(folder / "rows.bin", _record(sum(sizes)), about["clients"])[client]
    if _checksum(record) != record["check"]:
        raise RunError(f"{folder / 'rows.bin'}: the row of client {client} is damaged; {_RESTORE}")
    if not record["round"]:
        return None
    values = np.split(record["values"].astype(np.float32), np.cumsum(sizes)[:-1])
    about_each = zip(about["names"], values, about["shapes"], strict=True)
    tensors = {name: torch.from_numpy(value.reshape(shape)) for name, value, shape in about_each}
    return {name: tensors[name] for name in about["parameters"]}


def _about(folder: Path) -> Mapping[str, Any]:
    """Read what a folder's rows hold."""
    try:
        about = read_json(folder / "rows.json", _RESTORE)
    except FileNotFoundError:
        raise RunError(f"{folder / 'rows.json'} is missing; {_RESTORE}") from None
    lists = all(isinstance(about.get(key), list) for key in ("names", "shapes", "parameters"))
    if not lists or type(about.get("clients")) is not int or len(about["names"]) != len(about["shapes"]):
        raise RunError(f"{folder / 'rows.json'} is not what fedblur writes; {_RESTORE}")
    return about


def _record(columns: int) -> np.dtype[Any]:
    return np.dtype([("round", "<u4"), ("check", "<u4"), ("values", "<f4", (columns,))])


def _records(path: Path, record: np.dtype[Any], clients: int) -> NDArray[Any]:
    """Return the records of all clients, mapped into memory and read only."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; {_RESTORE}") from None
    if not path.is_file() or size != clients * record.itemsize:
        raise RunError(f"{path} has {size} bytes in place of {clients * record.itemsize}; {_RESTORE}")
    return np.memmap(path, record, mode="r", shape=(clients,))


def _checksum(record: Any) -> int:
    """Return the checksum of a record; 0 for one that was never written."""
    return zlib.crc32(record["values"].tobytes(), int(record["round"])) if record["round"] else 0
