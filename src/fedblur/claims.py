"""Commands that run the same table at once share its cells: each takes those that no other has taken.

A claim is a lock on one byte of a file beside the cells, at a place that the cell's key names. The system frees it when
its process ends, however it ends, so that a killed command leaves nothing to clean up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # no such locks on Windows: there, run a table by one command at a time
    fcntl = None  # type: ignore[assignment]

_HEX_DIGITS = 15  # of a key: 60 bits, so that two cells of a table do not share a place


@contextlib.contextmanager
def claim(cells: Path, key: str) -> Iterator[bool]:
    """Whether this process has the cell for itself until the end of the block; False where another one has it."""
    cells.mkdir(parents=True, exist_ok=True)
    with (cells / "claims").open("ab") as file:
        yield _taken(file, int(key[:_HEX_DIGITS], 16))  # freed when the file is closed


def _taken(file: IO[bytes], place: int) -> bool:
    try:
        if fcntl is not None:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except (BlockingIOError, PermissionError):  # systems differ in which
        return False
    return True
