"""The first seconds: what a command imports before it does anything. tools/cpu_seconds.py measures the time."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
import typer

from fedblur.cli.app import COMMANDS, app

HEAVY = {
    "torch", "sklearn", "matplotlib", "scipy.stats", "scipy.optimize", "scipy.signal", "scipy.integrate",
    "scipy.linalg", "scipy.sparse",
}  # fmt: skip


def imported(code: str) -> set[str]:
    """Return the modules that a new process has imported after this code."""
    code = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def command(words: str) -> str:
    return f"from fedblur.cli.app import app\napp({words.split()!r}, standalone_mode=False)"


@pytest.mark.parametrize("words", ["--version", "--help"])
def test_command__starts_light(words: str) -> None:
    assert imported(command(words)).isdisjoint({*HEAVY, "scipy", "numpy", "pydantic", "fedblur.experiments"})


def test_plan__starts_without_torch_and_the_heavy_parts_of_scipy() -> None:
    found = imported(command("plan --clients 3400 --sample-rate 0.04 --rounds 1000 --epsilon 2 --json"))
    assert found.isdisjoint({*HEAVY, "pydantic", "fedblur.data", "fedblur.learning", "fedblur.training"})
    assert "dp_accounting" in found


def test_import__is_lazy() -> None:
    assert imported("import fedblur\nassert fedblur.__all__ == dir(fedblur)").isdisjoint({*HEAVY, "scipy", "numpy"})


@pytest.mark.parametrize("name", COMMANDS)
def test_help__lists_each_command_with_the_first_line_of_its_own_help(name: str) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    own = " ".join((group.commands[name].help or "").split("\n\n")[0].split())
    assert own == COMMANDS[name][1]
    assert group.commands[name].name == name
