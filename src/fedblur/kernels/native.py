"""Kernels in C for this machine's CPU, compiled when they are first needed and kept in the cache.

In: a C file of this package and the constants to compile it for. Out: the loaded library, or None where there is no C
compiler (`CC` names one, else `cc`), the compiler fails, or this is not Linux on x86-64, where nothing was measured.
Then torch's own operators do the same, slower. FEDBLUR_NATIVE=off does without.
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

from fedblur.data.cache import cache_folder

_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
_SECONDS = 120  # for a compiler that hangs
_LOCK = threading.Lock()


def wanted() -> bool:
    return os.environ.get("FEDBLUR_NATIVE") != "off"


def library(name: str, **constants: int) -> ctypes.CDLL | None:
    """The file `name`.c, compiled for these constants."""
    with _LOCK:  # workers ask at the same moment
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
    """What the compiler says of itself and of this CPU: a cache that machines share must not mix them up."""
    command = [*compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, check=True, timeout=_SECONDS).stdout


def _load(file: str, command: list[str]) -> ctypes.CDLL:
    """From the cache, or compiled now and kept there where that is possible."""
    folder = cache_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            if not (folder / file).exists():
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=folder, prefix=".") as beside:
                    os.replace(_compile(command, Path(beside)), folder / file)
            return ctypes.CDLL(str(folder / file))
    with tempfile.TemporaryDirectory() as passing:  # a loaded library stays when its file goes
        return ctypes.CDLL(str(_compile(command, Path(passing))))


def _compile(command: list[str], folder: Path) -> Path:
    output = folder / "library.so"
    subprocess.run([*command, "-o", str(output)], capture_output=True, check=True, timeout=_SECONDS)
    return output
