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
from fedblur.privacy.ledger import Budget, Chain, Ledger
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


def _die_around(owner: type, name: str) -> None:
    """Be killed right before or right after a step, one time in 15: few kills from outside hit these moments."""
    real = getattr(owner, name)

    def deadly(*given: object) -> object:
        for step in (lambda: None, lambda: real(*given)):
            result = step()
            if random.random() < 1 / 30:
                os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


def _spend(folder: Path, run: int, deadly: bool) -> int:
    """Make all releases of one run, from where it was; the status: 0 complete, 3 refused."""
    random.seed(os.urandom(8))
    if deadly:
        _die_around(Chain, "append")
        _die_around(Population, "write")
    own = folder / f"run-{run}"
    own.mkdir(exist_ok=True)
    budget = Budget(math.inf, DELTA, "rdp", ROUNDS)
    try:
        account = Account(Population("crowd", folder / "state"), EVENT, ROUNDS, "run", DELTA, "operating system")
        ledger = Ledger(own / "ledger.jsonl", budget, "about", "operating system", account=account)
        for round_ in range(len(ledger.spends()) + 1, ROUNDS + 1):
            ledger.demand_room(round_, EVENT, replay=False)
            ledger.spend(round_, EVENT, replay=False)
            with (own / "released").open("ab", buffering=0) as file:
                file.write(b".")
        ledger.settle()
    except PrivacyError:
        return 3
    return 0


def _start(folder: Path, run: int, deadly: bool) -> int:
    pid = os.fork()
    if pid == 0:
        status = 4
        try:
            status = _spend(folder, run, deadly)
        finally:
            os._exit(status)
    return pid


def main(folder: Path, processes: int, kills: int) -> None:
    """Run all; until enough were killed, from outside at random moments or by themselves, start most of those again."""
    dice, killed, ends, number = random.Random(), 0, {0: 0, 3: 0}, processes
    running = {_start(folder, run, True): run for run in range(processes)}
    while running:
        if killed < kills and dice.random() < 0.2:
            time.sleep(0.01 * dice.random())
            os.kill(dice.choice(sorted(running)), signal.SIGKILL)
        pid, status = os.wait()
        run = running.pop(pid)
        if os.WIFSIGNALED(status):
            killed += 1
            if dice.random() < 0.75:  # else for good: what it reserved stays reserved
                running[_start(folder, run, killed < kills)] = run
        else:
            ends[os.WEXITSTATUS(status)] += 1  # a status that is not known is an error
        if killed < kills and not running:
            running[_start(folder, number, True)] = number
            number += 1
    print(json.dumps({"killed": killed, "complete": ends[0], "refused": ends[3]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
