"""Data sets in our own compact form, for machines without the hub, its library or an image decoder.

`fedblur data export NAME DIR` writes DIR/NAME/packed-SPLIT-00.xz and so on: each holds some of a split's samples, as
safetensors, compressed by xz. All parts must be there; each says how many there are. Needs the standard library only.
"""

from __future__ import annotations

import lzma
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedblur.core.decompression import unxz
from fedblur.core.errors import DataError
from fedblur.core.files import read_bytes, write_atomically
from fedblur.data.source import Split, Stored, data_folder, fingerprint

_PART_BYTES = 2**25  # of samples before compression
_MOST = 2**28  # of a part without its compression, with labels and writers
_FAST = 1  # of xz: a tenth larger than its usual 6, in a tenth of the time (colour images: a quarter)
_NAME = re.compile(r"packed-(train|test)-(\d+)-of-(\d+)-classes-(\d+)\.xz")


@dataclass(frozen=True)
class PackedFolder:
    """A folder of parts that `export` has written."""

    folder: Path
    local: bool = True

    @property
    def key(self) -> str:
        return f"packed:{fingerprint(self.folder.glob('packed-*.xz'))}"

    def read(self) -> Stored:
        names = {path: _NAME.fullmatch(path.name) for path in sorted(self.folder.glob("packed-*.xz"))}
        known = {path: match.groups() for path, match in names.items() if match}
        classes = {int(groups[3]) for groups in known.values()}
        splits: dict[str, Split] = {}
        for split in sorted({groups[0] for groups in known.values()}, reverse=True):
            parts = [path for path, groups in known.items() if groups[0] == split]
            wanted = {int(known[path][2]) for path in parts}
            if wanted != {len(parts)}:
                raise DataError(
                    f"{self.folder} has {len(parts)} of {max(wanted)} parts of the {split} samples; copy the others too"
                )
            splits[split] = _joined([_part(path) for path in parts])
        if not splits or len(classes) != 1:
            raise DataError(f"{self.folder} has no parts of one data set; write them with fedblur data export")
        return Stored(splits, classes.pop())


def packed_folder(name: str, data_dir: Path | None) -> PackedFolder | None:
    """Return DIR/name if it holds exported parts."""
    folder = data_folder(data_dir)
    if folder is None or not any((folder / name).glob("packed-*.xz")):
        return None
    return PackedFolder(folder / name)


def export(stored: Stored, folder: Path) -> list[Path]:
    """Write all that a source holds; the files that this made."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("packed-*.xz"):
        old.unlink()
    written = []
    for split, samples in stored.splits.items():
        size, parts = len(samples.y), max(1, -(-samples.x.nbytes // _PART_BYTES))
        for number in range(parts):
            path = folder / f"packed-{split}-{number:02d}-of-{parts}-classes-{stored.classes}.xz"
            part = samples.take(torch.arange(size * number // parts, size * (number + 1) // parts))
            write_atomically(path, _compressed(part))
            written.append(path)
    return written


def _compressed(part: Split) -> bytes:
    """Compress, channels last; in colour each byte is the difference to the previous pixel: a tenth smaller."""
    tensors = {"x": part.x.permute(0, 2, 3, 1).contiguous(), "y": part.y}
    tensors |= {} if part.writers is None else {"writers": part.writers}
    tensors |= {} if part.people is None else {"people": part.people}
    channels = part.x.shape[1]
    delta = [{"id": lzma.FILTER_DELTA, "dist": channels}] if channels > 1 else []  # grey: a seventh larger by it
    filters = [*delta, {"id": lzma.FILTER_LZMA2, "preset": _FAST}]
    return lzma.compress(save(tensors), format=lzma.FORMAT_XZ, filters=filters)


def _part(path: Path) -> Split:
    try:
        tensors = load(unxz(read_bytes(path, _MOST), _MOST))
        x: Tensor = tensors["x"].permute(0, 3, 1, 2).contiguous()
        return Split(x, tensors["y"], tensors.get("writers"), tensors.get("people"))
    except (lzma.LZMAError, EOFError, SafetensorError, KeyError, ValueError, RuntimeError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path} is damaged ({reason}); copy it again") from None


def _joined(parts: list[Split]) -> Split:
    writers = [part.writers for part in parts if part.writers is not None]
    return Split(
        torch.cat([part.x for part in parts]),
        torch.cat([part.y for part in parts]),
        torch.cat(writers) if len(writers) == len(parts) else None,
        parts[0].people,  # each part has all of them
    )
