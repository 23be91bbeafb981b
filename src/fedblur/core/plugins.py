"""Plugins, files with a user's own parts: `--plugin my_method.py`, or `plugins = ["my_method.py"]` in a TOML file.

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

from fedblur.core.config import read_toml
from fedblur.core.errors import ConfigError
from fedblur.core.registry import KINDS, base_of, parts

PLUGIN = "fedblur_plugin_"  # of such a file as a module
_LOADED: dict[str, str] = {}  # file name -> the first digits of its SHA-256, for a run's record


def read_config(path: Path) -> dict[str, Any]:
    """Read a TOML file without its `plugins`, which are loaded first; their paths start at the file's folder."""
    table = read_toml(path)
    names = table.pop("plugins", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f'{path}: plugins={names!r} must be a list of files, like plugins = ["my_method.py"]')
    load_plugins(path.parent / name for name in names)
    return table


def load_plugins(paths: Iterable[Path]) -> None:
    """Import each file once; its parts can then be named like any other."""
    for path in paths:
        try:
            code = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"plugin {path} cannot be read: {error.strerror}; give the path of a Python file"
            ) from None
        if path.suffix != ".py":
            raise ConfigError(f"plugin {path} must be a Python file (.py) that registers parts")
        digest = hashlib.sha256(code).hexdigest()[:16]
        name = f"{PLUGIN}{digest}"
        if name not in sys.modules:
            before = _registered()
            _import(path, name)
            _check(path, _registered() - before)
        _LOADED[path.name] = f"sha256 {digest}"


def loaded() -> dict[str, str]:
    """Return what was loaded in this process, for a run's record: `{"my_method.py": "sha256 1f0c…"}`."""
    return dict(_LOADED)


def blame(error: BaseException) -> str:
    """Return where in a user's own file an error arose, in words; nothing if it did not."""
    files = {module.__file__ for name, module in sys.modules.items() if name.startswith(PLUGIN)}
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if not own:
        return ""
    said = (str(error).splitlines() or [""])[0]
    return f"plugin {own[-1].filename}, line {own[-1].lineno}, {own[-1].name}: {type(error).__name__}: {said}"


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
        frames = traceback.extract_tb(error.__traceback__)  # the line of the user's file, not of ours
        lines = [frame.lineno for frame in frames if Path(frame.filename).name == path.name]
        lines += [error.lineno] if isinstance(error, SyntaxError) else []
        where = f"line {lines[-1]}: " if lines else ""
        raise ConfigError(
            f"plugin {path} cannot be imported: {where}{type(error).__name__}: {error}; fix the file"
        ) from error


def _registered() -> set[tuple[str, type]]:
    return {(kind, part) for kind in KINDS for part in parts(kind).values()}  # type: ignore[arg-type]


def _check(path: Path, new: set[tuple[str, type]]) -> None:
    if not new:
        raise ConfigError(
            f'plugin {path} registers no part; put @fedblur.register("method", "NAME") above a frozen dataclass'
        )
    for kind, part in new:
        base = base_of(kind)  # type: ignore[arg-type]
        if base is not None and not issubclass(part, base):
            raise ConfigError(f"plugin {path}: {part.__name__} must derive from fedblur.{base.__name__} to be a {kind}")
