"""The cost of a round is that of its cohort: a population of a million costs what one of a thousand does."""

import tracemalloc
from pathlib import Path

import pytest

from fedblur.training.machine import Machine
from fedblur.training.round import run_round
from fedblur.training.setup import prepare
from tests.worlds import calls

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_round__cost_does_not_grow_with_the_population(tmp_path: Path) -> None:
    from scaling import configured

    work, memory = [], []
    for population in (1_000, 1_000_000):
        setup = prepare(configured(population, 100, 64), tmp_path / str(population), Machine(device="cpu"))
        state = setup.protocol.server.init(setup.initial)
        for number in range(4):  # until a step has been recorded, after 128 calls at most
            run_round(setup.protocol, state, setup.rng.child("round", number))
        tracemalloc.start()
        work.append(calls(run_round, setup.protocol, state, setup.rng.child("round", 9)))
        memory.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert work[1] < 1.1 * work[0]
    assert memory[1] - memory[0] < 20 * 1_000_000  # bytes: the ids that a cohort is drawn from, nothing more a client


def test_line__finds_fixed_and_single_costs() -> None:
    from scaling import Point, line

    points = [Point(0, cohort, 0, 0.0, 0.002 + 0.001 * cohort) for cohort in (1, 10, 100)]
    found = line(points, "cohort")
    assert found["fixed_ms"] == pytest.approx(2)
    assert found["ms_each"] == pytest.approx(1)
    assert found["worst_deviation"] < 1e-6


def test_memory__a_round_of_many_clients_holds_few_of_them() -> None:
    """The full measurement is `benchmarks/memory.py`: 1000 clients of CNN-B stay under 6 GiB."""
    import subprocess
    import sys

    command = [sys.executable, str(BENCHMARKS / "memory.py"), "--clients", "60", "--batch", "4"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert float(said.split("at most ")[1].split(" GiB")[0]) < 1.5  # 60 updates and as many gradients alone are 0.5
