"""A run killed with SIGKILL at random moments and resumed ends with the same bytes as one never killed."""

import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

KILLS = 20
FLAGS = [
    "--seed", "5", "--rounds", "400", "--sample-rate", "0.2", "--method", "blur+lus",
    "--set", "checkpoint_every=3", "--set", "eval_every=50", "--set", "averaging=ema",
    "--set", "server=momentum", "--quiet",
]  # fmt: skip


def fedblur(*words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fedblur", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()


def spends(run: Path) -> int:
    if not (run / "ledger.sqlite").exists():
        return 0
    with sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True) as db:
        try:
            return int(db.execute("SELECT COUNT(DISTINCT round) FROM spends").fetchone()[0])
        except sqlite3.OperationalError:  # killed while the tables were being made
            return 0


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
def test_run__killed_at_random_moments_ends_with_the_same_bytes(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    began = time.monotonic()
    finish(fedblur("run", "--out", str(whole), *FLAGS))
    duration = time.monotonic() - began

    dice = random.Random(0)
    kills = 0
    process = fedblur("run", "--out", str(broken), *FLAGS)
    while kills < KILLS:
        # Start-up is most of the time: aim at the time after it, so that kills fall into rounds, writes and loads.
        startup = 0.6 * duration
        time.sleep(startup + dice.random() * 0.08 * duration)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        assert spends(broken) >= released(broken)
        if (broken / "checkpoints").exists() and any((broken / "checkpoints").glob("round-*")):
            process = fedblur("resume", str(broken), "--quiet")
        else:  # killed before the run began: nothing was spent, nothing is there
            assert spends(broken) == 0
            (broken / "config.json").unlink(missing_ok=True)
            process = fedblur("run", "--out", str(broken), *FLAGS)
    finish(process)

    assert (broken / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    summaries = [json.loads((run / "summary.json").read_text()) for run in (whole, broken)]
    assert summaries[0]["accuracy"] == summaries[1]["accuracy"]
    assert summaries[0]["privacy"]["epsilon"] == summaries[1]["privacy"]["epsilon"]
    assert spends(broken) == spends(whole) == 400
