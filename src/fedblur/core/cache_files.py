"""Files of the cache: what is read from it is what this user once wrote. In: a path. Out: its content, or nothing.

Others may write to a shared folder, and a library or an image file of theirs would run or train here. So a folder and
a file must be this user's own (or root's), and writable by nobody else; the file's SHA-256, recorded beside it when it
was written, must be that of what is read. What fails is not used, with a warning that says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import warnings
from io import BufferedReader
from pathlib import Path

from fedblur.core.errors import FedBlurError
from fedblur.core.files import write_atomically

_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def own_folder(folder: Path) -> bool:
    """Make the folder, for this user alone, if there is none; return whether it may be used as a cache."""
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        reason = _reason(folder.stat())
    except OSError:
        return False  # it cannot be made or seen: that only costs time
    if reason:
        _warn(folder, reason)
    return not reason


def open_kept(path: Path, adopt: bool = False) -> BufferedReader | None:
    """Return the file opened for reading, once its owner and its digest are checked; None if there is none to use.

    With `adopt`, a file without a digest (of version 0.2) gets one.
    """
    if not path.is_symlink() and not path.exists():
        return None
    if not own_folder(path.parent):
        return None
    try:
        file = os.fdopen(os.open(path, _FLAGS), "rb")
    except OSError as error:
        _warn(path, f"it cannot be opened ({error.strerror})")
        return None
    reason = _reason(os.fstat(file.fileno())) or _changed(file, path, adopt)
    if reason:
        file.close()
        _warn(path, reason)
        return None
    file.seek(0)
    return file


def read_kept(path: Path) -> bytes | None:
    """Return the content of a small file, checked; None if there is none to use."""
    file = open_kept(path)
    if file is None:
        return None
    with file:
        content = file.read()
    digest = _digest_file(path)  # of the very bytes that are returned
    with contextlib.suppress(OSError):
        if digest.read_text(encoding="ascii").strip() == hashlib.sha256(content).hexdigest():
            return content
    return None


def keep(path: Path, content: bytes | Path) -> None:
    """Put the content, or a finished file beside it, into the cache. A folder that is not this user's is left alone."""
    if not own_folder(path.parent):
        return
    if isinstance(content, bytes):
        _record(path, hashlib.sha256(content).hexdigest())
        write_atomically(path, content)
        path.chmod(0o600)
    else:
        content.chmod(0o600)
        with content.open("rb") as file:
            _record(path, hashlib.file_digest(file, "sha256").hexdigest())
        content.replace(path)


def _digest_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _record(path: Path, digest: str) -> None:
    write_atomically(_digest_file(path), f"{digest}\n".encode())


def _changed(file: BufferedReader, path: Path, adopt: bool) -> str:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        recorded = _digest_file(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        recorded = ""
    if recorded == digest:
        return ""
    if not recorded and adopt:
        with contextlib.suppress(FedBlurError):
            _record(path, digest)
        return ""
    return "its content is not what was written" if recorded else "no digest of it was recorded"


def _reason(status: os.stat_result) -> str:
    if os.name != "posix":
        return ""
    if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
        return "it is no regular file"
    if status.st_uid not in _trusted():
        return "it belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it"
    return ""


def _trusted() -> set[int]:
    return {0, os.geteuid()}


def _warn(path: Path, reason: str) -> None:
    warnings.warn(f"the cache's {path} is not used: {reason}; remove it, or set FEDBLUR_CACHE", stacklevel=3)
