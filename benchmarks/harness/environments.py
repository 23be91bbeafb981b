"""A virtual environment for each peer under `.envs/`, made from its pinned requirements with pip by package name."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
ENVIRONMENTS = BENCHMARKS / ".envs"


class Unavailable(Exception):
    """A system that cannot be measured; the message says why, in one line."""


def python_of(name: str) -> Path:
    """The Python that runs a system: its own environment's, or this one where it needs nothing more than we do."""
    found = _prepared(name)
    if isinstance(found, Unavailable):
        raise found
    return found


@cache  # a peer that cannot be installed is tried once a run
def _prepared(name: str) -> Path | Unavailable:
    try:
        return _install(name)
    except Unavailable as reason:
        return reason


def _install(name: str) -> Path:
    requirements = BENCHMARKS / "peers" / f"{name}.txt"
    if not requirements.exists():
        return Path(sys.executable)
    folder = ENVIRONMENTS / name
    stamp, wanted = folder / ".installed", requirements.read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {name}: {', '.join(wanted.split())}", flush=True)
        _call(name, [sys.executable, "-m", "venv", "--clear", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _call(name, [*pip, "-r", str(requirements)])
        stamp.write_text(wanted)
    return folder / "bin" / "python"


def _call(name: str, command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"installing {name} took more than 30 minutes") from None
    if result.returncode:
        raise Unavailable(f"installing {name} failed: {last_line(result.stderr)}")


def last_line(text: str) -> str:
    """What a program said last, which is mostly why it stopped; an error's line where there is one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1][:300]
