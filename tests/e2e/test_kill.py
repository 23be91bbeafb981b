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

from fedblur.privacy.ledger import Chain, read_spends

FLAGS = [
    "--seed", "5", "--sample-rate", "0.1", "--method", "blur+lus", "--quiet",
    "--set", "checkpoint_every=3", "--set", "eval_every=50", "--set", "averaging=ema", "--set", "server=momentum",
    "--set", 'personal=["*bias"]',
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


@pytest.fixture(scope="module")
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


def length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


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
@pytest.mark.parametrize(("deaths", "rounds"), [(4, 50), pytest.param(20, 200, marks=pytest.mark.long)])
def test_run__killed_at_random_moments_ends_with_the_same_bytes(
    deaths: int, rounds: int, tmp_path: Path, forker: Forker
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    flags = [*FLAGS, "--rounds", str(rounds)]
    forker.start("run", "--out", str(whole), *flags)
    assert forker.status() == 0

    dice = random.Random(0)
    kills = 0
    words = ["run", "--out", str(broken), *flags]
    while kills < deaths:
        pid = forker.start(*words)
        if dice.random() < 0.25:
            time.sleep(dice.random())  # while it loads, calibrates, makes its folder
        else:
            before = length(broken / "ledger.jsonl")
            for _ in range(10_000):  # a run that ends by itself spends no more
                if length(broken / "ledger.jsonl") > before > 0 or length(broken / "rounds.jsonl") > 0 == before:
                    break
                time.sleep(0.005)
            time.sleep(0.05 * dice.random())  # somewhere in the next rounds and their writes
        os.kill(pid, signal.SIGKILL)
        kills += forker.status() == signal.SIGKILL
        assert spends(broken) >= released(broken)
        if any((broken / "checkpoints").glob("round-*")):
            words = ["resume", str(broken), "--quiet"]
        else:  # killed before the run began: nothing was spent
            assert spends(broken) == 0  # and the same command starts it again
    assert released(broken) > 0
    forker.start("resume", str(broken), "--quiet")
    assert forker.status() == 0

    for name in ("model.safetensors", "personal/rows.bin"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    summaries = [json.loads((run / "summary.json").read_text()) for run in (whole, broken)]
    assert summaries[0]["accuracy"] == summaries[1]["accuracy"]
    assert summaries[0]["privacy"]["epsilon"] == summaries[1]["privacy"]["epsilon"]
    assert spends(broken) == spends(whole) == rounds


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_signal__sigterm_and_sighup_save_what_was_paid_for_as_ctrl_c_does(tmp_path: Path, forker: Forker) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        run = tmp_path / number.name
        pid = forker.start(
            "run",
            "--out",
            str(run),
            *FLAGS,
            "--rounds",
            "5000",
            "--set",
            "noise_multiplier=1.0",
            "--set",
            "accountant=rdp",
            "--set",
            "checkpoint_every=5000",
        )
        while length(run / "rounds.jsonl") == 0:
            time.sleep(0.01)
        os.kill(pid, number)
        assert os.waitstatus_to_exitcode(forker.status()) == 130
        summary = json.loads((run / "summary.json").read_text())
        assert summary["status"] == f"stopped after {released(run)} of 5000 rounds"
        assert (run / "checkpoints" / f"round-{summary['rounds']:06d}.safetensors").exists()
        assert spends(run) == summary["privacy"]["releases"]
