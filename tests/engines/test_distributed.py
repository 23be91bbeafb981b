"""Runs under torchrun on two gloo processes: the round of one process, one ledger, and an orderly end when one dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch.nn.utils import parameters_to_vector

import fedblur
from fedblur.core.errors import ConfigError, PrivacyError
from fedblur.engines.cohort_sum import Task
from fedblur.engines.distributed import ForeignLedger, Ranks, demand_one_process, launched, own_device, rank, together
from fedblur.privacy.events import Gaussian as GaussianEvent
from fedblur.privacy.ledger import Ledger, Payment, read_spends
from fedblur.privacy.ledger_file import open_ledger
from fedblur.privacy.mechanisms.base import Release
from fedblur.privacy.mechanisms.gaussian import Gaussian
from tests.engines.ranks import CASES, case, given
from tests.worlds import CPU, job_for

TORCHRUN = [sys.executable, str(Path(__file__).with_name("torchrun.py"))]
FLAGS = ["--seed", "5", "--rounds", "80", "--method", "blur+lus", "--set", "checkpoint_every=4", "--quiet"]
PATIENCE = 600  # seconds until a hang is called one

Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def launch() -> Iterator[Launch]:
    """Starts torchrun; what is still there at the end of the test is ended, by its id."""
    started = []

    def start(*words: str) -> subprocess.Popen[str]:
        quiet = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen([*TORCHRUN, *words], env=quiet, text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> Path:
    """All cases of `ranks.py`, run on two processes."""
    folder = tmp_path_factory.mktemp("both")
    finished(launch(str(Path(__file__).with_name("ranks.py")), str(folder)))
    return folder


def finished(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    return output


def rank_process(torchrun: subprocess.Popen[str], wanted: int) -> psutil.Process:
    """The process of a rank: they are started in their order."""
    return sorted(psutil.Process(torchrun.pid).children(), key=lambda child: child.pid)[wanted]


def wait_for_rounds(torchrun: subprocess.Popen[str], run: Path, rounds: int) -> None:
    while not (run / "rounds.jsonl").exists() or (run / "rounds.jsonl").read_text().count("\n") < rounds:
        assert torchrun.poll() is None, "the run does not start"
        time.sleep(0.005)


def spent_rounds(run: Path) -> list[int]:
    return [round_ for round_, _ in read_spends(open_ledger(run / "ledger.jsonl").links)]


def vector(run: fedblur.Run) -> torch.Tensor:
    return parameters_to_vector(run.module.parameters()).detach()


def alike(a: object, b: object) -> bool:
    """Equal to float tolerance, through lists and dictionaries; times aside."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a if key != "seconds")
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == pytest.approx(b, rel=1e-5) if isinstance(a, float) else a == b


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes__agree_on_the_model_and_write_one_ledger(both: Path, name: str) -> None:
    """Without a seed too: cohorts and noise are drawn once."""
    assert torch.equal(*(torch.load(both / f"{name}.{i}.pt") for i in (0, 1)))
    assert (both / f"{name}.0.json").read_text() == (both / f"{name}.1.json").read_text()
    assert spent_rounds(both / name) == list(range(1, case(name).rounds + 1))
    assert "2 processes" in json.loads((both / name / "summary.json").read_text())["machine"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, table in CASES.items() if "seed" in table])
def test_two_processes__give_the_round_of_one(both: Path, name: str, tmp_path: Path) -> None:
    """The model byte for byte, as sums are whole numbers; figures in rounds.jsonl to float tolerance."""
    one = fedblur.train(case(name), out=tmp_path / "one", **given(name))
    model = torch.load(both / f"{name}.0.pt")
    assert torch.equal(model, vector(one))
    assert alike(json_rows(both / name), one.rounds)
    if name == "personal":  # what other ranks trained has come back to rank 0
        two, alone = ((run / "personal" / "rows.bin").read_bytes() for run in (both / name, one.path))
        assert two == alone
    assert name != "few" or {0, 1} <= {row["local_only"]["cohort"] for row in one.rounds}


def json_rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_processes__resume_a_run_that_lost_its_end_with_the_same_bytes(both: Path) -> None:
    models = [(both / name / "model.safetensors").read_bytes() for name in ("whole", "resumed")]
    assert models[0] == models[1]
    assert alike(json_rows(both / "resumed"), json_rows(both / "whole"))
    assert spent_rounds(both / "resumed") == list(range(1, 81))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_rank__stops_the_other_and_the_run_goes_on(
    victim: int, tmp_path: Path, both: Path, launch: Launch
) -> None:
    """SIGKILL of either rank. Resumed on two processes: the bytes of an undisturbed run; on one: to float tolerance."""
    whole, broken = both / "whole", tmp_path / f"without-{victim}"
    torchrun = launch("-m", "fedblur", "run", "--out", str(broken), *FLAGS)
    wait_for_rounds(torchrun, broken, 3)
    rank_process(torchrun, victim).kill()
    output, _ = torchrun.communicate(timeout=PATIENCE)
    assert torchrun.returncode != 0
    (line,) = (line for line in output.splitlines() if "error:" in line and "stops too" in line)
    assert f"rank {victim} stopped or died in round" in line
    assert f"rank {1 - victim} stops too" in line
    assert f"fedblur resume {broken}" in line
    assert spent_rounds(broken) == list(range(1, len(spent_rounds(broken)) + 1))
    if victim == 1:
        finished(launch("-m", "fedblur", "resume", str(broken), "--quiet"))
        assert (broken / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    else:
        fedblur.resume(broken)
    assert alike(json_rows(broken), json_rows(whole))
    assert spent_rounds(broken) == list(range(1, 81))


@pytest.mark.slow
def test_a_silent_rank__stops_the_run_within_the_time_limit(tmp_path: Path, launch: Launch) -> None:
    run = tmp_path / "run"
    torchrun = launch("-m", "fedblur", "run", "--out", str(run), *FLAGS, "--rank-timeout", "6")
    wait_for_rounds(torchrun, run, 3)
    leader, silent = rank_process(torchrun, 0), rank_process(torchrun, 1)
    silent.send_signal(signal.SIGSTOP)
    ended, _ = psutil.wait_procs([leader], timeout=PATIENCE)  # by itself, while the other is silent
    silent.send_signal(signal.SIGCONT)
    output, _ = torchrun.communicate(timeout=PATIENCE)
    assert torchrun.returncode != 0
    assert ended == [leader]
    assert "rank 1 stopped or died in round" in output
    assert "no answer within 6 s" in output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"].startswith("stopped after")


@pytest.mark.slow
def test_an_error_on_rank_0__ends_all_ranks(tmp_path: Path, launch: Launch) -> None:
    fedblur.train(fedblur.Config(rounds=1, seed=0), out=tmp_path / "taken")
    torchrun = launch("-m", "fedblur", "run", "--seed", "0", "--rounds", "1", "--out", str(tmp_path / "taken"))
    output, _ = torchrun.communicate(timeout=PATIENCE)
    assert torchrun.returncode != 0
    assert f"error: {tmp_path / 'taken'} holds a run of this very configuration" in output
    assert spent_rounds(tmp_path / "taken") == [1]


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)


def test_one_process__is_not_distributed() -> None:
    assert not launched()
    assert rank() == 0
    assert own_device("cuda") == "cuda"
    demand_one_process("anything")
    with together(lambda: CPU, 1.0) as ranks:
        assert (ranks.rank, ranks.world, ranks.connected) == (0, 1, False)
        assert ranks.tell("a message") == "a message"  # to nobody else


def test_ranks__have_a_gpu_each(second_of_two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (own_device("auto"), own_device("cuda"), own_device("cpu")) == ("cuda:1", "cuda:1", "cpu")
    with pytest.raises(ConfigError, match="'cuda:0' is one device for 2 processes"):
        own_device("cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="no GPU of its own, there are 1; .*--nproc-per-node 1"):
        own_device("auto")


def test_ranks__what_runs_in_one_process_is_refused(second_of_two: None) -> None:
    with pytest.raises(ConfigError, match="a table runs in one process; start it without torchrun"):
        demand_one_process("a table")


def test_ranks__a_time_limit_must_be_positive(second_of_two: None) -> None:
    with pytest.raises(ConfigError, match="rank_timeout=0 must be above 0"), together(lambda: CPU, 0):
        pass


def test_ranks__parts_are_disjoint_and_whole() -> None:
    """Numbers in the round name the streams of noise shares: each is used by one rank, whatever the cohort's size."""
    job = job_for(torch.nn.Linear(2, 2))
    for world, size in ((1, 5), (2, 0), (2, 1), (3, 10), (4, 3)):
        task = Task(job, Gaussian(), Release(6, 1.0, 1.0, size, CPU, 7), torch.arange(100, 100 + size))
        parts = [Ranks(i, world, CPU, 1.0)._part(task) for i in range(world)]
        assert sorted(n for part in parts for n in part.release.numbers) == list(range(size))
        for part in parts:
            assert [100 + n for n in part.release.numbers] == part.cohort.tolist()
            assert part.release.cohort == size


def test_other_ranks__cannot_touch_the_ledger() -> None:
    """Whatever they ask of it: `ForeignLedger` has all that `Ledger` offers, and refuses each."""
    event, ledger = GaussianEvent(1.0), ForeignLedger()
    asked: list[Callable[[], object]] = [
        lambda: ledger.demand_room(1, event, replay=False),
        lambda: ledger.spend(1, event, replay=False),
        Payment(ledger, 1, event, replay=False).settle,
        ledger.spends,
        ledger.epsilon,
        ledger.anchor,
        ledger.settle,
        ledger.population,
        lambda: ledger.count_torn(event),
    ]
    for ask in asked:
        with pytest.raises(PrivacyError, match="only rank 0 keeps the ledger"):
            ask()
    offered = {name for name in vars(Ledger) if not name.startswith("_")}
    assert offered == {name for name in vars(ForeignLedger) if not name.startswith("_")}
