"""A round stays readable: how many files one enters, counted on a real `fedblur run`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST = 18


def test_round__enters_at_most_18_files() -> None:
    run = ["--dataset", "digits", "--rounds", "3", "--seed", "1", "--device", "cpu", "--quiet"]
    command = [sys.executable, str(ROOT / "tools" / "trace_round.py"), *run]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, *files = done.stdout.splitlines()
    assert count == f"{len(files)} files"
    assert {"training/round.py", "privacy/ledger.py", "learning/client.py", "privacy/clipping.py"} <= set(files)
    assert len(files) <= MOST, files
