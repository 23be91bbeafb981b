"""Files: atomic writes, locks between processes, and the cache folder."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fedblur.core.errors import RunError

try:
    import fcntl
except ImportError:  # no such locks on Windows: there, keep to one command for each folder
    fcntl = None  # type: ignore[assignment]


def write_atomically(path: Path, data: bytes) -> None:
    """Write all of the file or none of it, even if the process is killed or the disk is full."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"{path} cannot be written: {error.strerror}; free space or choose another folder") from None


def cache_folder() -> Path | None:
    """Return where packed samples are kept; None if the user has no home."""
    given = os.environ.get("FEDBLUR_CACHE")
    if given:
        return Path(given).expanduser()
    try:
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "fedblur"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "fedblur"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedblur"
    except RuntimeError:  # no home folder
        return None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Lock a file until the end of the block; yield whether this process has it, False if another one does.

    The system releases the lock when the process ends, however it ends: a killed command leaves nothing to clean up.
    """
    with path.open("ab") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed when the file is closed
            taken = True
        except (BlockingIOError, PermissionError):  # systems differ in which
            taken = False
        yield taken and _still(path, file)


def _still(path: Path, file: IO[bytes]) -> bool:
    """Return whether others will find the locked file; its owner may just have deleted it."""
    try:
        return fcntl is None or os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
