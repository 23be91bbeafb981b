"""A run killed with SIGKILL at random moments and resumed ends with the same bytes as one never killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedblur.chain import Chain
from fedblur.ledger import read_spends

KILLS, ROUNDS = 20, 200
FLAGS = [
    "--seed", "5", "--rounds", str(ROUNDS), "--sample-rate", "0.1", "--method", "blur+lus", "--quiet",
    "--set", "checkpoint_every=3", "--set", "eval_every=50", "--set", "averaging=ema", "--set", "server=momentum",
]  # fmt: skip


class Forker:
    """Real processes, started quickly."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("forker.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, *words: str) -> int:
        assert self.process.stdin is not None
        print(json.dumps(words), file=self.process.stdin, flush=True)
        return self._answer()

    def status(self) -> int:
        """Waits for the end of the one that was started."""
        return self._answer()

    def _answer(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@pytest.fixture
def forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.process.kill()
    forker.process.communicate()


def spends(run: Path) -> int:
    if not (run / "ledger.jsonl").exists():
        return 0
    chain = Chain(run / "ledger.jsonl")  # refuses lines that do not follow from each other
    return len({round_ for round_, _ in read_spends(chain.read())})


def released(run: Path) -> int:
    """The last round of which anything was written outside the ledger."""
    rounds = [int(p.stem.split("-")[1]) for p in (run / "checkpoints").glob("round-*.safetensors")]
    if (run / "rounds.jsonl").exists():
        for line in (run / "rounds.jsonl").read_text().splitlines():
            try:
                rounds.append(json.loads(line)["round"])
            except ValueError:
                break
    return max(rounds, default=0)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_run__killed_at_random_moments_ends_with_the_same_bytes(tmp_path: Path, forker: Forker) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    forker.start("run", "--out", str(whole), *FLAGS)
    assert forker.status() == 0

    dice = random.Random(0)
    kills = 0
    words = ["run", "--out", str(broken), *FLAGS]
    while kills < KILLS:
        pid = forker.start(*words)
        if dice.random() < 0.25:
            time.sleep(dice.random())  # while it loads, calibrates, makes its folder
        else:
            before, patience = spends(broken), time.monotonic() + 60
            while spends(broken) == before and time.monotonic() < patience:
                time.sleep(0.005)
            time.sleep(0.05 * dice.random())  # somewhere in the next rounds and their writes
        os.kill(pid, signal.SIGKILL)
        kills += forker.status() == signal.SIGKILL
        assert spends(broken) >= released(broken)
        if any((broken / "checkpoints").glob("round-*")):
            words = ["resume", str(broken), "--quiet"]
        else:  # killed before the run began: nothing was spent
            assert spends(broken) == 0
            (broken / "config.json").unlink(missing_ok=True)
    assert released(broken) > 0
    forker.start("resume", str(broken), "--quiet")
    assert forker.status() == 0

    assert (broken / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    summaries = [json.loads((run / "summary.json").read_text()) for run in (whole, broken)]
    assert summaries[0]["accuracy"] == summaries[1]["accuracy"]
    assert summaries[0]["privacy"]["epsilon"] == summaries[1]["privacy"]["epsilon"]
    assert spends(broken) == spends(whole) == ROUNDS
