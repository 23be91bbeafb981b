"""Kernels in C for this machine's CPU, compiled when they are first needed and kept in the cache.

In: a C file of this package and the constants to compile it for. Out: the loaded library, or None where there is no C
compiler (`CC` names one, else `cc`), where it fails, and on any system but Linux on x86-64, the only one we measured.
torch's own operators then do the same, more slowly. FEDBLUR_NATIVE=off switches these kernels off.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

from fedblur.core.cache_files import keep, own_folder, read_kept
from fedblur.core.errors import FedBlurError
from fedblur.core.files import cache_folder
from fedblur.core.switches import switched_on

_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
_SECONDS = 120  # until a compiler that hangs is stopped
_LOCK = threading.Lock()


def wanted() -> bool:
    """Return whether kernels in C are switched on."""
    return switched_on("FEDBLUR_NATIVE")


def library(name: str, **constants: int) -> ctypes.CDLL | None:
    """Return the file `name`.c compiled for these constants."""
    with _LOCK:  # workers ask at the same time
        return _library(name, tuple(sorted(constants.items())))


@cache
def _library(name: str, constants: tuple[tuple[str, int], ...]) -> ctypes.CDLL | None:
    compiler = _compiler()
    if compiler is None:
        return None
    source = Path(__file__).with_name(f"{name}.c")
    command = [*compiler, *_FLAGS, *(f"-D{key}={value}" for key, value in constants)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        key = hashlib.sha256(b"\0".join([source.read_bytes(), repr(command).encode(), _target(compiler)]))
        return _load(f"{name}-{key.hexdigest()[:16]}.so", [*command, str(source)])
    return None


def _compiler() -> list[str] | None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    return command if shutil.which(command[0]) else None


def _target(compiler: list[str]) -> bytes:
    """Return the compiler's macros, which identify it and this CPU: machines may share a cache."""
    command = [*compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, check=True, timeout=_SECONDS).stdout


def _load(file: str, command: list[str]) -> ctypes.CDLL:
    """Return the library from the cache, or compile it now and cache it if that is possible."""
    folder = cache_folder()
    if folder is None or not own_folder(folder):
        with tempfile.TemporaryDirectory() as temporary:
            return _loaded(_compile(command, Path(temporary)).read_bytes(), None)
    content = read_kept(folder / file)
    if content is None:
        with tempfile.TemporaryDirectory() as temporary:
            content = _compile(command, Path(temporary)).read_bytes()
        with contextlib.suppress(OSError, FedBlurError):
            keep(folder / file, content)
    with contextlib.suppress(OSError):
        return _loaded(content, folder)
    return _loaded(content, None)  # a cache that may not be written, or whose files may not be executed


def _loaded(content: bytes, folder: Path | None) -> ctypes.CDLL:
    """Load a library from a folder that only this process knows: the bytes that were checked, whole."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as private:  # a loaded library outlives its file
        path = Path(private) / "library.so"
        path.write_bytes(content)
        return ctypes.CDLL(str(path))


def _compile(command: list[str], folder: Path) -> Path:
    output = folder / "library.so"
    subprocess.run([*command, "-o", str(output)], capture_output=True, check=True, timeout=_SECONDS)
    return output
