"""Every name of fedblur that a script or a test imports is there, also where the import runs on a GPU only."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("audits", "benchmarks", "examples", "papers", "tests", "tools")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if "fixtures" not in path.parts]


def imported(text: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each import from fedblur, wherever in the file it is; no name: the module itself."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "fedblur")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fedblur":
            yield from ((node.module or "", alias.name) for alias in node.names)


def missing(text: str) -> list[str]:
    """Return the imports from fedblur that would fail. Nothing of the file runs."""
    lost = []
    for module, name in imported(text):
        try:
            if name and not hasattr(importlib.import_module(module), name):
                importlib.import_module(f"{module}.{name}")
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "fedblur":  # another package's absence is not ours to judge
                lost.append(f"{module}: {name}")
    return lost


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports__of_fedblur_are_there(path: Path) -> None:
    assert missing(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        ("from fedblur.engines.local import LocalEngine", []),
        ("from fedblur.engines import local", []),
        ("import fedblur.engines.local", []),
        ("from fedblur import train", []),
        ("import fedbluring", []),
        ("def late():\n    from fedblur.engines.local import nothing", ["fedblur.engines.local: nothing"]),
        ("from fedblur.privacy import clipping, nothing", ["fedblur.privacy: nothing"]),
        ("import fedblur.nothing", ["fedblur.nothing: "]),
    ],
)
def test_imports__that_would_fail_are_found(line: str, lost: list[str]) -> None:
    assert missing(line) == lost
