"""A run killed with SIGKILL at random moments and resumed ends with the same bytes as one never killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedblur.privacy.ledger import Chain, read_spends
from fedblur.training.verify_ledger import verify

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


def kill_often(forker: Forker, broken: Path, flags: list[str], deaths: int, check: Callable[[], None]) -> None:
    """Start a run and kill it at random moments, so many times or until it began; resume it in between."""
    dice = random.Random(0)
    kills = 0
    words = ["run", "--out", str(broken), *flags]
    while kills < deaths or not released(broken):
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
        check()
        if any((broken / "checkpoints").glob("round-*")):
            words = ["resume", str(broken), "--quiet"]
        else:  # killed before the run began: nothing was spent
            assert spends(broken) == 0  # and the same command starts it again


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

    kill_often(forker, broken, flags, deaths, lambda: None)
    forker.start("resume", str(broken), "--quiet")
    assert forker.status() == 0

    for name in ("model.safetensors", "personal/rows.bin"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    summaries = [json.loads((run / "summary.json").read_text()) for run in (whole, broken)]
    assert summaries[0]["accuracy"] == summaries[1]["accuracy"]
    assert summaries[0]["privacy"]["epsilon"] == summaries[1]["privacy"]["epsilon"]
    assert spends(broken) == spends(whole) == rounds


SEPARATED = [
    "--sample-rate", "0.1", "--quiet", "--set", "checkpoint_every=3", "--set", "eval_every=100",
    "--set", 'sampling={ name = "min_separation", rounds = 8 }',
]  # fmt: skip


def demand_separated(run: Path) -> int:
    """Check the record against the ledger, as they lie there after a kill; return how many cohorts it has."""
    ledger, record = Chain(run / "ledger.jsonl"), Chain(run / "local_only" / "participation.jsonl")
    if not record.path.exists():
        assert spends(run) == 0
        return 0
    rows, lines = len(read_spends(ledger.read())), [link.body for link in record.read()[1:]]
    assert rows <= len(lines) <= rows + 1  # who trains is on disk before, and paid for after
    last: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        assert line["number"] == number
        assert len(line["clients"]) == 36
        for client in line["clients"]:
            assert number - last.get(client, -8) >= 8  # as the ledger accounts for, release by release
            last[client] = number
    return len(lines)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("deaths", "rounds", "seed", "mechanism"),
    [
        (2, 40, None, '{ name = "blt", buffers = 2 }'),
        *(
            pytest.param(20, *rest, marks=pytest.mark.long)
            for rest in (
                (200, 5, '"gaussian"'), (400, None, '"gaussian"'), (200, 5, '"blt"'), (400, None, '"banded"'),
                (200, 5, '"tree"'), (400, None, '"tree"'),
            )
        ),
    ],
)  # fmt: skip
def test_run__killed_at_random_moments_lets_nobody_take_part_too_early(
    deaths: int, rounds: int, seed: int | None, mechanism: str, tmp_path: Path, forker: Forker
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    flags = [*SEPARATED, "--rounds", str(rounds), *([] if seed is None else ["--seed", str(seed)])]
    flags += ["--set", f"mechanism={mechanism}"]
    kill_often(forker, broken, flags, deaths, lambda: demand_separated(broken) and None)
    forker.start("resume", str(broken), "--quiet")
    status = os.waitstatus_to_exitcode(forker.status())
    assert demand_separated(broken) == rounds == len(read_spends(Chain(broken / "ledger.jsonl").read()))
    assert verify(broken) == []
    if seed is None:  # rounds that were paid for and repeated are not there at the end
        assert status == (0 if released(broken) == rounds else 2)
        return
    assert status == 0
    forker.start("run", "--out", str(whole), *flags)
    assert forker.status() == 0
    assert (broken / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    cohorts = [
        [link.body for link in Chain(run / "local_only" / "participation.jsonl").read()[1:]] for run in (whole, broken)
    ]
    assert cohorts[0] == cohorts[1]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGHUP, pytest.param(signal.SIGINT, marks=pytest.mark.long)],
    ids=lambda it: it.name,
)
def test_signal__sigterm_and_sighup_save_what_was_paid_for_as_ctrl_c_does(
    number: signal.Signals, tmp_path: Path, forker: Forker
) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as nohup has it: runs go on then")
    run = tmp_path / "run"
    settings = ("noise_multiplier=1.0", "accountant=rdp", "checkpoint_every=5000")
    pid = forker.start(
        "run", "--out", str(run), *FLAGS, "--rounds", "5000", *(word for each in settings for word in ("--set", each))
    )
    while length(run / "rounds.jsonl") == 0:
        time.sleep(0.01)
    os.kill(pid, number)
    assert os.waitstatus_to_exitcode(forker.status()) == 130
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == f"stopped after {released(run)} of 5000 rounds"
    assert (run / "checkpoints" / f"round-{summary['rounds']:06d}.safetensors").exists()
    assert spends(run) == summary["privacy"]["releases"]
