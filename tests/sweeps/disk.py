"""A simulated disk: every operation that writes below a folder is counted, and the n-th one fails in a chosen way.

The functions of `os` through which files change are replaced while a `Disk` is active. After a kill each of them only
raises, so that no `finally` can tidy up: what lies in the folder is what a killed process leaves. File descriptors are
still closed, as the system closes them.

    before, after    the process is killed before the operation, or after it
    torn             killed when half of the bytes are written
    power            the power fails before it: what was not synced is gone from the files
    names            the power fails before it: new, renamed and removed names that were not synced are as they were
    full             no space is left: this operation and all later ones of the command fail
    full once        only this one fails: somebody freed space
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

MODES = ("before", "torn", "after", "power", "names", "full", "full once")
_WRITES = os.O_WRONLY | os.O_RDWR
_GROWS = ("create", "write", "mkdir", "replace")  # what needs space


class Killed(BaseException):
    """The process is dead: nothing that it still does reaches the disk."""


@dataclass(frozen=True)
class Operation:
    """One operation that changes files."""

    kind: str
    path: str  # below the folder

    def modes(self) -> tuple[str, ...]:
        """Return in which ways it can fail."""
        left_out = set() if self.kind == "write" else {"torn"}
        left_out |= set() if self.kind in _GROWS else {"full", "full once"}
        return tuple(mode for mode in MODES if mode not in left_out)


@dataclass
class Disk:
    """The disk below a folder. `at` is the number of the operation that fails, from 0; None: none does."""

    folder: Path
    at: int | None = None
    mode: str = "before"
    operations: list[Operation] = field(default_factory=list)
    dead: bool = False
    full: bool = False
    reached: bool = False
    _files: dict[int, str] = field(default_factory=dict)  # by descriptor
    _unsynced: dict[str, int] = field(default_factory=dict)  # file: how many of its bytes are on disk
    _names: dict[str, list[Callable[[], None]]] = field(default_factory=dict)  # folder: how to undo, oldest first
    _real: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def active(self) -> Iterator[Disk]:
        """Stand in for the operating system's functions until the end of the block."""
        names = ("open", "write", "fsync", "replace", "rename", "unlink", "remove", "mkdir", "rmdir", "ftruncate")
        self._real = {name: getattr(os, name) for name in names} | {"io": io.open}
        alike = {"rename": "replace", "remove": "unlink"}
        ours = {name: getattr(self, f"_{alike.get(name, name)}") for name in names}
        try:
            with (
                mock.patch.multiple(os, **ours),
                mock.patch.object(io, "open", self._io_open),
                mock.patch.object(builtins, "open", self._io_open),
            ):
                yield self
        finally:
            if self.dead and self.mode in ("power", "names"):
                self._lose()

    def _below(self, path: Any) -> str | None:
        try:
            text = os.path.abspath(os.fsdecode(path))
        except TypeError:  # a descriptor
            return None
        return text if f"{text}/".startswith(f"{self.folder}/") else None

    def _step(self, kind: str, path: str, act: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        """Do one operation, or fail."""
        if self.dead:
            raise Killed
        number = len(self.operations)
        self.operations.append(Operation(kind, os.path.relpath(path, self.folder)))
        now = number == self.at
        self.reached |= now
        if now and self.mode in ("before", "power", "names"):
            self.dead = True
            raise Killed
        if now and self.mode == "torn":
            if half is not None:  # a search draws its trials: this command may have another operation here
                half()
            self.dead = True
            raise Killed
        if (now and self.mode.startswith("full")) or (self.full and kind in _GROWS):
            self.full = self.mode == "full"
            if half is not None and now and (written := half()):
                return written  # a short write; the next one finds no space
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        result = act()
        if now:
            self.dead = True
            raise Killed
        return result

    # --- what changes files ---

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        below = self._below(path) if dir_fd is None else None
        if below is None:
            return int(self._real["open"](path, flags, mode, dir_fd=dir_fd))
        new = bool(flags & os.O_CREAT) and not os.path.lexists(below)
        cuts = bool(flags & os.O_TRUNC) and not new and flags & _WRITES
        if self.dead and (new or cuts or flags & _WRITES):
            raise Killed

        def act() -> int:
            handle = int(self._real["open"](path, flags, mode))
            if new:
                self._undo(below, lambda: self._forget(below))
            if new or cuts:
                self._unsynced[below] = 0
            return handle

        handle = int(self._step("create", below, act) if new or cuts else act())
        self._files[handle] = below
        return handle

    def _io_open(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        below = None if isinstance(file, int) else self._below(file)
        if below is None or not set(mode) & set("wax+"):
            return self._real["io"](file, mode, *args, **options)
        flags = {"w": os.O_TRUNC | os.O_CREAT, "a": os.O_APPEND | os.O_CREAT, "x": os.O_EXCL | os.O_CREAT}
        chosen = next((flags[letter] for letter in mode if letter in flags), 0)
        handle = self._open(file, chosen | (os.O_RDWR if "+" in mode else os.O_WRONLY), 0o666)
        raw = _Raw(handle, mode.replace("b", "").replace("t", ""), self)
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, options.get("encoding"), newline=options.get("newline"))

    def _write(self, handle: int, data: Any) -> int:
        below = self._files.get(handle)
        if below is None:
            return int(self._real["write"](handle, data))
        view = memoryview(data)

        def act() -> int:
            self._unsynced.setdefault(below, os.fstat(handle).st_size)
            return int(self._real["write"](handle, view))

        def half() -> int:
            self._unsynced.setdefault(below, os.fstat(handle).st_size)
            return int(self._real["write"](handle, view[: len(view) // 2])) if len(view) > 1 else 0

        return int(self._step("write", below, act, half))

    def _fsync(self, handle: int) -> None:
        below = self._files.get(handle)
        if below is None:
            return self._real["fsync"](handle)

        def act() -> None:
            self._unsynced.pop(below, None)
            self._names.pop(below, None)

        return self._step("fsync", below, act)

    def _ftruncate(self, handle: int, size: int) -> None:
        below = self._files.get(handle)
        if below is None:
            return self._real["ftruncate"](handle, size)
        return self._step("truncate", below, lambda: self._real["ftruncate"](handle, size))

    def _replace(self, old: Any, new: Any, **options: Any) -> None:
        source, target = self._below(old), self._below(new)
        if target is None or source is None:
            return self._real["replace"](old, new, **options)

        def act() -> None:
            kept, before = self._content(source), self._content(target)
            self._real["replace"](old, new)
            if source in self._unsynced:
                self._unsynced[target] = self._unsynced.pop(source)

            def undo() -> None:
                self._put(target, before)
                self._put(source, kept)

            self._undo(target, undo)

        return self._step("replace", target, act)

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        below = self._below(path) if dir_fd is None else None
        if below is None:
            return self._real["unlink"](path, dir_fd=dir_fd)
        if not os.path.lexists(below) and not self.dead:
            return self._real["unlink"](path)  # FileNotFoundError

        def act() -> None:
            kept = self._content(below)
            self._real["unlink"](path)
            self._undo(below, lambda: self._put(below, kept))

        return self._step("unlink", below, act)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        below = self._below(path) if dir_fd is None else None
        if below is None or (os.path.isdir(below) and not self.dead):
            return self._real["mkdir"](path, mode, dir_fd=dir_fd)

        def act() -> None:
            self._real["mkdir"](path, mode)
            self._undo(below, lambda: shutil.rmtree(below, ignore_errors=True))

        return self._step("mkdir", below, act)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        below = self._below(path) if dir_fd is None else None
        if below is None or (os.path.isdir(below) and os.listdir(below) and not self.dead):
            return self._real["rmdir"](path, dir_fd=dir_fd)

        def act() -> None:
            self._real["rmdir"](path)
            self._undo(below, lambda: os.makedirs(below, exist_ok=True))

        return self._step("rmdir", below, act)

    # --- what a power failure takes ---

    def _undo(self, path: str, act: Callable[[], None]) -> None:
        self._names.setdefault(os.path.dirname(path), []).append(act)

    def _lose(self) -> None:
        """Take back what was never synced: the ends of files, or names in folders."""
        if self.mode == "names":
            for acts in self._names.values():
                for act in reversed(acts):
                    act()
        for path, size in self._unsynced.items():
            if os.path.isfile(path):
                os.truncate(path, min(size, os.path.getsize(path)))

    @staticmethod
    def _content(path: str) -> bytes | None:
        if not os.path.isfile(path):
            return None
        with open(path, "rb") as file:
            return file.read()

    def _put(self, path: str, content: bytes | None) -> None:
        if content is None:
            return self._forget(path)
        if os.path.isdir(os.path.dirname(path)):
            Path(path).write_bytes(content)
        return None

    @staticmethod
    def _forget(path: str) -> None:
        if os.path.lexists(path):
            os.unlink(path)


class _Raw(io.FileIO):
    """A file that was opened with `open`: what is written to it passes the disk."""

    def __init__(self, handle: int, mode: str, disk: Disk) -> None:
        super().__init__(handle, mode if "+" in mode or mode != "x" else "w")
        self._disk = disk

    def write(self, data: Any) -> int:
        if self._disk.dead:
            return len(memoryview(data))  # a buffer that is flushed as it is closed
        return os.write(self.fileno(), data)


def snapshot(folder: Path) -> dict[str, Any]:
    """Return what lies below a folder: the content of files, None for folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
