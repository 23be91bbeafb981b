"""Commands that run one table at once share its cells."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from fedblur.claims import claim
from fedblur.errors import RunError
from fedblur.experiments import pending, run_cells, run_table
from fedblur.results import Results
from fedblur.setup import Machine
from fedblur.spec import read_spec

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fcntl")

KEY = "9ecad0b0a9a4"
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


def _hold(cells: Path, key: str, held: Event) -> None:
    with claim(cells, key) as mine:
        assert mine
        held.set()
        time.sleep(60)  # it is ended before


@pytest.fixture
def elsewhere(tmp_path: Path):
    """Another process that has the cell of a key until it is ended."""
    spawn = multiprocessing.get_context("spawn")
    started = []

    def take(key: str) -> multiprocessing.process.BaseProcess:
        held = spawn.Event()
        process = spawn.Process(target=_hold, args=(tmp_path / "cells", key, held))
        process.start()
        started.append(process)
        assert held.wait(60)
        return process

    yield take
    for process in started:
        process.kill()
        process.join(60)


def test_claim__one_process_has_a_cell_and_another_cell_is_free(tmp_path: Path, elsewhere) -> None:
    elsewhere(KEY)
    with claim(tmp_path / "cells", KEY) as mine:
        assert not mine
    with claim(tmp_path / "cells", KEY[::-1]) as mine:
        assert mine


def test_claim__is_free_again_when_its_process_is_killed(tmp_path: Path, elsewhere) -> None:
    process = elsewhere(KEY)
    process.kill()
    process.join()
    with claim(tmp_path / "cells", KEY) as mine:
        assert mine


def test_cells__that_another_process_computes_are_left_to_it(spec_file: Path, tmp_path: Path, elsewhere) -> None:
    cells = read_spec(spec_file).cells
    elsewhere(cells[1].key)
    results = Results(tmp_path / "results")
    left = run_cells(cells, results, tmp_path / "cells", Machine())
    assert left == [cells[1]]
    assert {cell.key for cell in cells} - set(results.found) == {cells[1].key}


def test_table__that_another_process_computes_says_so(spec_file: Path, tmp_path: Path, elsewhere) -> None:
    spec = read_spec(spec_file)
    elsewhere(spec.cells[0].key)
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
    command = [sys.executable, "-m", "fedblur", "table", str(spec_file), "--out", str(tmp_path / "out")]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) for _ in range(2)]
    told = "".join(process.communicate(timeout=200)[1] for process in both)
    assert [process.returncode for process in both] == [0, 0], told
    assert len(list((tmp_path / "out" / "results").glob("*.json"))) == 4
    rounds = [path.read_text().count("\n") for path in (tmp_path / "out" / "cells").glob("*/rounds.jsonl")]
    assert rounds == [2, 2, 2, 2]  # a cell that ran twice would have more, or would have been refused
