"""One process at a time: two that go on with one run would release twice what is paid for once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # no such locks on Windows: there, keep to one command for each folder
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Whether this process has the file for itself until the end of the block; False where another one has it.

    The system frees it when its process ends, however it ends: a killed command leaves nothing to clean up.
    """
    with path.open("ab") as file:
        yield _taken(file) and _still(path, file)


def _taken(file: IO[bytes]) -> bool:
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed when the file is closed
    except (BlockingIOError, PermissionError):  # systems differ in which
        return False
    return True


def _still(path: Path, file: IO[bytes]) -> bool:
    """Whether the file that was locked is the one that others will find; its owner may just have deleted it."""
    try:
        return fcntl is None or os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
