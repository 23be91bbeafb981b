"""Processes that spend a population's budget without training: forks of one that has imported everything.

`race` starts them through this file as a script, which kills some at random moments and starts those again.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from fedblur.core.errors import PrivacyError
from fedblur.privacy.events import Gaussian
from fedblur.privacy.ledger import Budget, Ledger
from fedblur.privacy.population_account import Account
from fedblur.privacy.populations import Population

EVENT, DELTA, ROUNDS = Gaussian(20.0), 1e-3, 5


def race(folder: Path, processes: int, kills: int) -> dict[str, int]:
    """Let so many processes spend, kill this often, and return how they ended."""
    command = [sys.executable, "-m", "tests.e2e.spenders", str(folder), str(processes), str(kills)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    facts: dict[str, int] = json.loads(done.stdout)
    return facts


def released(folder: Path) -> int:
    """Return how many results have left a process."""
    path = folder / "released"
    return path.stat().st_size if path.exists() else 0


def _spend(folder: Path, run: int) -> int:
    """Make all releases of one run, from where it was; the status: 0 complete, 3 refused."""
    own = folder / f"run-{run}"
    own.mkdir(exist_ok=True)
    budget = Budget(math.inf, DELTA, "rdp", ROUNDS)
    try:
        account = Account(Population("crowd", folder / "state"), EVENT, ROUNDS, "run", DELTA, "operating system")
        ledger = Ledger(own / "ledger.jsonl", budget, "about", "operating system", account)
        for round_ in range(len(ledger.spends()) + 1, ROUNDS + 1):
            ledger.demand_room(round_, EVENT, replay=False)
            ledger.spend(round_, EVENT, replay=False)
            with (own / "released").open("ab", buffering=0) as file:
                file.write(b".")
        ledger.settle()
    except PrivacyError:
        return 3
    return 0


def _start(folder: Path, run: int) -> int:
    pid = os.fork()
    if pid == 0:
        status = 4
        try:
            status = _spend(folder, run)
        finally:
            os._exit(status)
    return pid


def main(folder: Path, processes: int, kills: int) -> None:
    dice, killed = random.Random(0), 0
    running = {_start(folder, run): run for run in range(processes)}
    ends: dict[int, int] = {}
    left = set(range(processes))
    while left or killed < kills:
        if killed < kills:
            time.sleep(0.02 * dice.random())  # somewhere between a lock, a note, a row and a result
            pid = dice.choice(sorted(running)) if running else _again(folder, dice, processes, running)
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            run = running.pop(pid)
            if os.WIFSIGNALED(status):
                killed += 1
                running[_start(folder, run)] = run
            else:
                ends[run] = os.WEXITSTATUS(status)
                left.discard(run)
            continue
        pid, status = os.wait()
        run = running.pop(pid)
        ends[run] = os.WEXITSTATUS(status)
        left.discard(run)
    counts = {status: sum(end == status for end in ends.values()) for status in (0, 3, 4)}
    assert counts[4] == 0, "a process failed"
    print(json.dumps({"killed": killed, "complete": counts[0], "refused": counts[3]}))


def _again(folder: Path, dice: random.Random, processes: int, running: dict[int, int]) -> int:
    """Start one more run, when all have ended before they could be killed."""
    run = processes + dice.randrange(10**6)
    pid = _start(folder, run)
    running[pid] = run
    return pid


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
