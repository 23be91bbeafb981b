"""A user's own parts in a file: `--plugin my_method.py`, or `plugins = ["my_method.py"]` in a TOML file.

The file is executed, so it must be the user who names it: never a run folder, a checkpoint or a ledger.
Installed packages use the entry-point group `fedblur.parts` instead (registry.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedblur.config import read_toml
from fedblur.errors import ConfigError
from fedblur.methods import Method
from fedblur.registry import KINDS, parts

_PREFIX = "fedblur_plugin_"  # of such a file as a module
_LOADED: dict[str, str] = {}  # file name -> the first digits of its SHA-256, for a run's record


def read_config(path: Path) -> dict[str, Any]:
    """A TOML file without its `plugins`, which are loaded first; their paths start at the file's folder."""
    table = read_toml(path)
    names = table.pop("plugins", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f'{path}: plugins={names!r} must be a list of files, like plugins = ["my_method.py"]')
    load_plugins(path.parent / name for name in names)
    return table


def load_plugins(paths: Iterable[Path]) -> None:
    """Import each file once, so that its parts can be named like any other."""
    for path in paths:
        _load(path)


def loaded() -> dict[str, str]:
    """What was loaded in this process, for a run's record: `{"my_method.py": "sha256 1f0c…"}`."""
    return dict(_LOADED)


def blame(error: BaseException) -> str:
    """Where an error came out of a user's own file, in words; nothing if it did not."""
    files = {module.__file__ for name, module in sys.modules.items() if name.startswith(_PREFIX)}
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if not own:
        return ""
    said = (str(error).splitlines() or [""])[0]
    return f"plugin {own[-1].filename}, line {own[-1].lineno}, {own[-1].name}: {type(error).__name__}: {said}"


def _load(path: Path) -> None:
    try:
        code = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"plugin {path} cannot be read: {error.strerror}; give the path of a Python file") from None
    if path.suffix != ".py":
        raise ConfigError(f"plugin {path} must be a Python file (.py) that registers parts")
    digest = hashlib.sha256(code).hexdigest()[:16]
    name = f"{_PREFIX}{digest}"
    if name not in sys.modules:
        before = _registered()
        _import(path, name)
        _check(path, _registered() - before)
    _LOADED[path.name] = f"sha256 {digest}"


def _import(path: Path, name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # type hints of its dataclasses are looked up here
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(
            f"plugin {path} cannot be imported: {_where(path, error)}{type(error).__name__}: {error}; mend the file"
        ) from error


def _where(path: Path, error: Exception) -> str:
    """The line of the user's file, not of ours."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: "
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == path.name
    ]
    return f"line {lines[-1]}: " if lines else ""


def _registered() -> set[tuple[str, type]]:
    return {(kind, part) for kind in KINDS for part in parts(kind).values()}  # type: ignore[arg-type]


def _check(path: Path, new: set[tuple[str, type]]) -> None:
    if not new:
        raise ConfigError(
            f'plugin {path} registers no part; put @fedblur.register("method", "NAME") above a frozen dataclass'
        )
    for kind, part in new:
        if kind == "method" and not issubclass(part, Method):
            raise ConfigError(f"plugin {path}: {part.__name__} must derive from fedblur.methods.Method to be a method")
