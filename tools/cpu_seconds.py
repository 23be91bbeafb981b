"""CPU seconds of the commands that should start at once: `python tools/cpu_seconds.py`, the best of five runs each."""

from __future__ import annotations

import resource
import subprocess
import sys

COMMANDS = {
    "--version": 0.3,
    "--help": 0.6,
    "plan --clients 3400 --sample-rate 0.04 --rounds 1000 --epsilon 2": 1.2,
}


def spent() -> float:
    """Return the CPU time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def once(words: list[str]) -> float:
    before = spent()
    subprocess.run([sys.executable, "-m", "fedblur", *words], stdout=subprocess.DEVNULL, check=True)
    return spent() - before


if __name__ == "__main__":
    for command, target in COMMANDS.items():
        seconds = min(once(command.split()) for _ in range(5))
        print(f"{seconds:6.3f} s of {target} s  fedblur {command}")
