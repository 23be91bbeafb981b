"""The gate is one: style and types are part of the suite. Functions and files stay short."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize(
    "command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join
)
def test_style__passes(command: list[str]) -> None:
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_source__is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says its stage and contract"
    assert text.count("\n") <= 320
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= 50, f"{node.name} has {lines} lines"


def test_only_accounting_imports_dp_accounting() -> None:
    importers = [
        path.name
        for path in SOURCES
        if "dp_accounting" in path.read_text() and "import dp_accounting" in path.read_text()
    ]
    assert set(importers) == {"accountants.py"}


def test_all__is_what_the_package_offers() -> None:
    import fedblur

    offered = {name for name, value in vars(fedblur).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert offered <= set(fedblur.__all__)
    assert set(dir(fedblur)) == set(fedblur._HOMES) == set(fedblur.__all__)  # the rest is imported when it is used
    for name in fedblur.__all__:
        assert getattr(fedblur, name).__doc__, name
