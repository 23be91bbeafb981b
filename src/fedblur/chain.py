"""An append-only file of JSON lines, each bound by a hash to all before it: the form of the ledger on disk.

    line n:  {"body": {...}, "hash": sha256(hash of line n − 1, body)}

Formal guarantees. A line is accepted only if it is, byte for byte, what `append` writes after the lines before it; so
any changed, moved, dropped or inserted byte in front of the last line's end is found, except that a file which was cut
at the end of a line is a shorter chain that looks whole: whoever kept a later `hash` (an anchor) finds that too.
`append` returns when the line is on disk. A crash leaves at most one line without its end; `torn` says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedblur.errors import RunError

try:
    import fcntl
except ImportError:  # no such locks on Windows: two writers at once break the chain there, which is found and refused
    fcntl = None  # type: ignore[assignment]

START = "0" * 64


class ChainError(RunError):
    """A file whose lines do not follow from each other."""


@dataclass(frozen=True)
class Link:
    """One line that follows from those before it."""

    body: dict[str, Any]
    hash: str


class Chain:
    """A file that only grows. What was read once is remembered; each look reads only what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.links: list[Link] = []
        self.torn = b""  # what stands after the last whole line
        self._size = 0  # of the whole lines

    @property
    def head(self) -> str:
        """The hash of the last line: it stands for the whole file."""
        return self.links[-1].hash if self.links else START

    def read(self) -> list[Link]:
        """All lines, those that others wrote meanwhile included."""
        with _opened(self.path, os.O_RDONLY) as file:
            self._catch_up(file)
        return self.links

    @contextlib.contextmanager
    def writing(self) -> Iterator[Chain]:
        """The chain as it is now, and nobody else's to write until the end of the block."""
        new = not self.path.exists()
        with _opened(self.path, os.O_RDWR | os.O_CREAT) as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)  # freed when the file is closed
            self._catch_up(file)
            self._file = file
            yield self
        if new:
            _sync_folder(self.path.parent)

    def append(self, body: Mapping[str, Any]) -> None:
        """One more line, on disk before this returns. Inside `writing` only. It takes the place of a torn one."""
        link = _link(self.head, body)
        line = _line(link)
        os.lseek(self._file, self._size, os.SEEK_SET)
        if os.write(self._file, line) != len(line):
            raise OSError("only a part of a line could be written")
        os.ftruncate(self._file, self._size + len(line))
        os.fsync(self._file)
        self.links.append(link)
        self.torn = b""
        self._size += len(line)

    def _catch_up(self, file: int) -> None:
        if os.fstat(file).st_size < self._size:
            raise ChainError(f"{self.path} became shorter while it was in use; restore it from a copy")
        os.lseek(file, self._size, os.SEEK_SET)
        with open(file, "rb", closefd=False) as stream:
            *lines, self.torn = stream.read().split(b"\n")
        for line in lines:
            self.links.append(self._checked(line + b"\n"))
            self._size += len(line) + 1

    def _checked(self, line: bytes) -> Link:
        try:
            link = _link(self.head, json.loads(line)["body"])
            if _line(link) == line:
                return link
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        number = len(self.links) + 1
        after = f"line {number - 1}" if number > 1 else "an empty file"
        raise ChainError(
            f"{self.path}: line {number} does not follow from {after}; it was edited, moved or replaced: "
            "restore the file from a copy"
        )


def _link(head: str, body: Mapping[str, Any]) -> Link:
    content = dict(body)
    return Link(content, hashlib.sha256(f"{head} {_json(content)}".encode()).hexdigest())


def _line(link: Link) -> bytes:
    return (_json({"body": link.body, "hash": link.hash}) + "\n").encode()


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    try:
        file = os.open(path, flags, 0o644)
    except OSError as error:
        raise RunError(f"the ledger {path} cannot be opened: {error.strerror}") from None
    try:
        yield file
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"the ledger {path} cannot be used: {reason}; free space or restore it") from None
    finally:
        os.close(file)


def _sync_folder(folder: Path) -> None:
    """A new file is on disk only when its name is."""
    with contextlib.suppress(OSError):  # not every file system can
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
