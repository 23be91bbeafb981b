"""One process at a time in a run folder; commands that run one table at once share its cells."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedblur.core import files
from fedblur.core.config import Config
from fedblur.core.errors import RunError
from fedblur.core.files import locked
from fedblur.experiments.result_store import Results
from fedblur.experiments.table import pending, run_cells, run_table
from fedblur.experiments.table_spec import read_spec
from fedblur.training.loop import train
from fedblur.training.machine import Machine
from fedblur.training.resume import resume
from fedblur.training.run_folder import FolderInUse, RunFolder
from tests.commandline import invoke

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fcntl")

SPEC = """
[base]
dataset = "synthetic"
clients = 20
model = "logistic"
rounds = 2
sample_rate = 0.5
epsilon = 8
delta = 0.01

[axes]
seed = [0, 1, 2, 3]

[[rows]]
label = "DP-FedAvg"
"""


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SPEC)
    return path


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Another process that has a folder until it is ended; without our imports, which take seconds."""
    started: list[subprocess.Popen[str]] = []

    def take(folder: Path) -> subprocess.Popen[str]:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", HOLD, str(RunFolder(folder).lock)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield take
    for process in started:
        process.kill()
        process.communicate()


def test_folder__one_process_at_a_time(tmp_path: Path, elsewhere) -> None:
    folder = RunFolder(tmp_path / "run")
    assert not folder.in_use()
    process = elsewhere(folder.path)
    assert folder.in_use()
    with pytest.raises(FolderInUse, match="is in use by another process"), folder.held():
        pass
    process.kill()  # whose lock goes with it
    process.wait()
    assert not folder.in_use()
    with folder.held():
        pass


def test_folder__nothing_is_left_of_a_run_that_was_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("made", "there"):
        with pytest.raises(RunError), RunFolder(tmp_path / name).held():
            raise RunError("no")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_folder__a_lock_that_was_deleted_is_nobodys(tmp_path: Path) -> None:
    """Who waits for a lock whose owner deletes it must not go on beside the next, who makes a new one."""
    path = tmp_path / "lock"
    with locked(path) as mine:
        assert mine
        path.unlink()
        with locked(path) as other:
            assert other
    path.write_bytes(b"")
    kept = os.open(path, os.O_RDWR)
    path.unlink()
    with os.fdopen(kept, "ab") as file:
        assert not files._still(path, file)


@pytest.mark.parametrize("how", ["train", "resume"])
def test_run__that_another_process_goes_on_with_is_refused(how: str, tmp_path: Path, elsewhere) -> None:
    config = Config(rounds=2, seed=1)
    if how == "resume":
        train(config, out=tmp_path / "run")
    elsewhere(tmp_path / "run")
    with pytest.raises(FolderInUse):
        train(config, out=tmp_path / "run") if how == "train" else resume(tmp_path / "run")


def test_run__that_was_killed_before_it_began_begins_anew(tmp_path: Path, monkeypatch) -> None:
    """While data are loaded: there is a configuration and no checkpoint."""
    config = Config(rounds=2, seed=1)
    train(config, out=tmp_path / "whole")
    written = RunFolder(tmp_path / "whole").config.read_bytes()
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").config.write_bytes(written)
    assert train(config, out=tmp_path / "run").summary["status"] == "complete"
    with pytest.raises(RunError, match="holds a run of this very configuration"):
        train(config, out=tmp_path / "run")


def test_run__does_not_take_a_folder_in_which_something_was_paid(tmp_path: Path) -> None:
    ledger = tmp_path / "run" / "ledger.jsonl"
    ledger.parent.mkdir()
    ledger.write_text("a search's\n")
    with pytest.raises(RunError, match="holds a ledger and no run"):
        train(Config(rounds=2, seed=1), out=ledger.parent)
    assert ledger.read_text() == "a search's\n"


def test_cells__that_another_process_computes_are_left_to_it(spec_file: Path, tmp_path: Path, elsewhere) -> None:
    cells = read_spec(spec_file).cells
    elsewhere(tmp_path / "cells" / cells[1].key)
    results = Results(tmp_path / "results")
    left = run_cells(cells, results, tmp_path / "cells", Machine())
    assert left == [cells[1]]
    assert {cell.key for cell in cells} - set(results.found) == {cells[1].key}


def test_table__that_another_process_computes_says_so(spec_file: Path, tmp_path: Path, elsewhere) -> None:
    spec = read_spec(spec_file)
    elsewhere(tmp_path / "cells" / spec.cells[0].key)
    with pytest.raises(RunError, match="1 cells of .* are being computed by another process"):
        run_table(spec, tmp_path, Machine())


def test_cells__with_a_result_that_appeared_since_are_not_run_again(spec_file: Path, tmp_path: Path) -> None:
    spec = read_spec(spec_file)
    early = Results(tmp_path / "results")
    waiting = pending([spec], early.found)
    run_cells(spec.cells, Results(tmp_path / "results"), tmp_path / "cells", Machine())
    started: list[int] = []
    assert run_cells(waiting, early, tmp_path / "others", Machine(), lambda cell, index: started.append(index)) == []
    assert started == []
    assert len(early.found) == 4


def test_commands__side_by_side_compute_every_cell_once(spec_file: Path, tmp_path: Path) -> None:
    words = ["table", str(spec_file), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "fedblur", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as other:
        while other.poll() is None and not list((tmp_path / "out" / "cells").glob("*/config.json")):
            time.sleep(0.002)  # until it computes its first cell
        invoke(*words)
        told = other.communicate(timeout=300)[1]
    assert other.returncode == 0, told
    assert len(list((tmp_path / "out" / "results").glob("*.json"))) == 4
    rounds = [path.read_text().count("\n") for path in (tmp_path / "out" / "cells").glob("*/rounds.jsonl")]
    assert rounds == [2, 2, 2, 2]  # a cell that ran twice would have more, or would have been refused
