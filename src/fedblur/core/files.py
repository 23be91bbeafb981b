"""Files: the one writer, the one reader, locks between processes, and the cache folder.

All that a run, a table, a search or an audit keeps is written and read here.

    write       all of a file or none of it: a temporary file, fsync, rename, fsync of the folder
    append      one line at the end of a file of diagnostics
    read        at most so many bytes, of a regular file; damage is one line that says what to do
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from fedblur.core.errors import RunError

try:
    import fcntl
except ImportError:  # no such locks on Windows: there, keep to one command for each folder
    fcntl = None  # type: ignore[assignment]

MOST_BYTES = 256 * 2**20  # of a JSON file: the largest that we write are a table's results, of a few megabytes
RESTORE = "restore it from a copy"
_PRIVATE, _SHARED = 0o600, 0o666  # less what the umask takes away
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_BINARY = getattr(os, "O_BINARY", 0)  # bytes as they are, on Windows too


def write_atomically(path: Path, data: bytes, private: bool = False) -> None:
    """Write all of the file or none of it, even if the process is killed or the disk is full.

    When this returns, the file and its name are on disk. `private`: only this user may read it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            _write(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, data, private, sync=True)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise _cannot(path, "be written", error, "free space or choose another folder") from None


def write_in_place(path: Path, pieces: Iterable[tuple[int, bytes]]) -> None:
    """Write pieces of a file at their offsets, and force them to the disk. Only this user may read it.

    A kill may leave a part of it: whoever needs the old content has written it elsewhere first.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | _BINARY, _PRIVATE)
        try:
            for offset, data in pieces:
                os.lseek(handle, offset, os.SEEK_SET)
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise _cannot(path, "be written", error, "free space and resume") from None


def append(path: Path, data: bytes, private: bool = False) -> None:
    """Append to a file. A kill may leave a part of it: for diagnostics, whose reader skips such a line."""
    try:
        _write(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, data, private, sync=False)
    except OSError as error:
        raise _cannot(path, "be written", error, "free space and resume") from None


def _write(path: Path, flags: int, data: bytes, private: bool, sync: bool) -> None:
    handle = os.open(path, flags | _BINARY, _PRIVATE if private else _SHARED)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest) :]
        if sync:
            os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Force what was appended to a file to the disk, with its name; nothing happens where there is none."""
    try:
        handle = os.open(path, os.O_RDWR | _BINARY)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _cannot(path, "be written", error, RESTORE) from None
    try:
        os.fsync(handle)
    except OSError as error:
        raise _cannot(path, "be written", error, "free space and rerun the command") from None
    finally:
        os.close(handle)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder: a new file is on disk only when its name is."""
    with contextlib.suppress(OSError):  # not every file system can
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_folder(folder: Path, private: bool = False, way_out: str = "choose another folder") -> None:
    """Make a folder and those above it, unless they are there. When this returns, their names are on disk."""
    above = missing_folders(folder)
    try:
        folder.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
        for path in reversed(above):  # or a power failure takes the folder, and the ledger in it
            sync_folder(path.parent)
    except OSError as error:
        raise _cannot(folder, "be made", error, way_out) from None


def missing_folders(folder: Path) -> list[Path]:
    """Return the folders that `make_folder` would make, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def drop_empty(folders: Iterable[Path]) -> None:
    """Remove folders that nothing came of, innermost first, up to the first that holds something."""
    with contextlib.suppress(OSError):
        for folder in folders:
            os.rmdir(folder)


def remove(*paths: Path) -> None:
    """Remove files, if they are there."""
    for path in paths:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        except OSError as error:
            raise _cannot(path, "be removed", error, "remove it by hand") from None


def remove_folder(folder: Path) -> None:
    """Remove a folder and all in it, if it is there; links are removed, never followed."""
    if not folder.is_symlink() and folder.is_dir():
        for path in sorted(folder.iterdir()):
            remove_folder(path)
        try:
            os.rmdir(folder)
        except OSError as error:
            raise _cannot(folder, "be removed", error, "remove it by hand") from None
    else:
        remove(folder)


def clear_temporaries(folder: Path) -> None:
    """Remove what writers left that were killed. Call it under a lock: no other process writes here."""
    remove(*sorted(path for path in folder.glob(".*.tmp") if path.is_file()))


def read_bytes(path: Path, most: int = MOST_BYTES, way_out: str = RESTORE) -> bytes:
    """Read a regular file of at most so many bytes; a missing one raises FileNotFoundError."""
    try:
        handle = os.open(path, os.O_RDONLY | _BINARY | getattr(os, "O_NONBLOCK", 0))  # a pipe must not block
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _cannot(path, "be read", error, way_out) from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise RunError(f"{path} cannot be read: it is not a regular file; {way_out}")
        if found.st_size > most:
            raise RunError(f"{path} is larger than {most // 2**20} MiB, which fedblur never writes; {way_out}")
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    except OSError as error:
        raise _cannot(path, "be read", error, way_out) from None
    finally:
        os.close(handle)


def parse_json(data: bytes, name: object, way_out: str = RESTORE) -> dict[str, Any]:
    """Parse a JSON object. `name`: where it was read, for the error."""
    try:
        value = json.loads(data, object_pairs_hook=each_key_once)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise RunError(f"{name} cannot be read: {_reason(error)}; {way_out}") from None
    if not isinstance(value, dict):
        raise RunError(f"{name} holds a {type(value).__name__}, where fedblur writes an object; {way_out}")
    return value


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object of its pairs. A key that is there twice is an error: people may read the other value."""
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)[:80]!r} is there twice")
    return table


def read_json(path: Path, way_out: str = RESTORE) -> dict[str, Any]:
    """Read a file that holds a JSON object; a missing one raises FileNotFoundError."""
    return parse_json(read_bytes(path, way_out=way_out), path, way_out)


def read_json_if_there(path: Path, way_out: str = RESTORE) -> dict[str, Any] | None:
    """Read a file that holds a JSON object; None where there is none."""
    try:
        return read_json(path, way_out)
    except (FileNotFoundError, NotADirectoryError):
        return None


def with_digest(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of JSON values with the hash of all of it: no ledger covers what lies in such a file."""
    return {**table, "digest": _digest(table)}


def demand_digest(table: Mapping[str, Any], name: object, way_out: str = RESTORE, required: bool = False) -> None:
    """Refuse a table that is not what was written. Earlier versions wrote no digest, so some tables have none."""
    if ("digest" in table or required) and table.get("digest") != _digest(table):
        raise RunError(f"{name} was damaged or edited: its digest does not match; {way_out}")


def _digest(table: Mapping[str, Any]) -> str:
    content = {key: value for key, value in table.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Read a file of JSON objects, a line each; return them, and how many lines are damaged. For diagnostics."""
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        return [], 0
    found, damaged = [], 0
    for line in data.split(b"\n"):
        if line.strip():
            try:
                found.append(parse_json(line, path))
            except RunError:
                damaged += 1
    return found, damaged


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error)


def _cannot(path: Path, what: str, error: OSError, way_out: str) -> RunError:
    if error.errno in _FULL:  # another folder would be full too, and what was paid for lies in this one
        way_out = "free space and rerun the command"
    return RunError(f"{path} cannot {what}: {error.strerror or error}; {way_out}")


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
    try:
        file = open(path, "ab", opener=_unblocked)  # noqa: SIM115, closed below
    except OSError as error:
        raise _cannot(path, "be locked", error, "choose another folder") from None
    with file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed when the file is closed
            taken = True
        except (BlockingIOError, PermissionError):  # systems differ in which
            taken = False
        yield taken and _still(path, file)


def open_lock(path: Path, way_out: str) -> int:
    """Open a file to lock it, for its owner alone; return the descriptor."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | _BINARY | getattr(os, "O_NONBLOCK", 0), _PRIVATE)
    except OSError as error:
        raise _cannot(path, "be written", error, way_out) from None


def _unblocked(path: str, flags: int) -> int:
    """Open without waiting for whoever reads a pipe: there it is an error."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), _SHARED)


def _still(path: Path, file: IO[bytes]) -> bool:
    """Return whether others will find the locked file; its owner may just have deleted it."""
    try:
        return fcntl is None or os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
