"""The command line as tests call it, in this process: starting one costs seconds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from typer.testing import CliRunner

from fedblur.cli.app import app
from fedblur.core import plugins, registry


def invoke(*words: object, status: int = 0) -> str:
    """What a command prints; its exit status must be the expected one."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == status, result.output
    return result.output


@contextlib.contextmanager
def forgotten_parts() -> Iterator[None]:
    """Forget afterwards what was registered and which plugins were loaded, as a process that ends does."""
    parts = {kind: dict(registry.parts(kind)) for kind in registry.KINDS}  # type: ignore[arg-type]
    modules, loaded = set(sys.modules), dict(plugins._LOADED)
    try:
        yield
    finally:
        for kind, before in parts.items():
            registry._PARTS[kind].clear()
            registry._PARTS[kind].update(before)
        for name in set(sys.modules) - modules:
            if name.startswith("fedblur_plugin_"):
                del sys.modules[name]
        plugins._LOADED.clear()
        plugins._LOADED.update(loaded)
