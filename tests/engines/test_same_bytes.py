"""Seeded runs end with the same bytes wherever clients' messages agree: workers, ranks, blocks; engines where they do.

Two ranks against one: `test_two_processes__give_the_round_of_one`.
"""

from pathlib import Path

import pytest
import torch

import fedblur
from fedblur.core.rng import Seeded
from fedblur.engines import LocalEngine, WorkerEngine, workers
from fedblur.privacy.mechanisms.base import Release
from fedblur.privacy.mechanisms.gaussian import Gaussian
from fedblur.training.machine import Machine
from tests.engines.neighbours import METHODS, messages, same_bits
from tests.worlds import CPU, SmallCnn, job_for, packed


def model_of(folder: Path, engine: str, model: str) -> bytes:
    config = fedblur.Config(
        dataset="digits", model=model, method="blur+lus", rounds=2, seed=1, sample_rate=0.05, epsilon=4.0
    )
    run = fedblur.train(config, out=folder, machine=Machine(engine=engine))
    return (run.path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("model", ["logistic", "gn_cnn"])
def test_same_bytes__any_number_of_workers(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for count in (1, 2, 4):
        monkeypatch.setattr(workers, "usable_cores", lambda count=count: count)
        found.append(model_of(tmp_path / str(count), "sequential", model))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("how", ["plain", "traced"])
def test_same_bytes__any_order_and_division_of_the_cohort(how) -> None:
    """The sum is of whole numbers: the order of clients and the blocks that they share do not matter."""
    population = packed([1, 3, 9, 1, 20, 30, 2])
    job, ids = job_for(SmallCnn(), METHODS[1], 0.1), torch.arange(7)
    release = Release(job.layout.total, 0.1, 1.0, 7, CPU)
    sums = []
    for order, size in ((ids, 32), (ids.flip(0), 32), (ids[torch.tensor([3, 0, 6, 2, 5, 1, 4])], 64)):
        engine = LocalEngine(population, CPU, True, size, how)
        blocks = engine.map_clients(job, order, Seeded.root(0))
        sums.append(Gaussian().accumulate((block.bounded for block in blocks), release, Seeded.root(0)))
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


def test_same_bytes__traced_steps_are_plain_steps_and_one_worker_is_the_sequential_engine() -> None:
    """Vectorised and sequential engines multiply matrices in another order: they agree to rounding, not to the bit."""
    population = packed([8, 8, 8, 8])
    torch.manual_seed(0)
    job, ids = job_for(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))), torch.arange(4)
    plain, traced, alone, worker = (
        messages(engine, job, population, ids, Seeded.root(0))
        for engine in (
            LocalEngine(population, CPU, True, 32),
            LocalEngine(population, CPU, True, 32, "traced"),
            LocalEngine(population, CPU, False, 4),
            WorkerEngine(population, 4, workers=2),
        )
    )
    assert all(same_bits(plain[i], traced[i]) for i in range(4))
    assert all(same_bits(alone[i], worker[i]) for i in range(4))
    for i in range(4):
        torch.testing.assert_close(plain[i], alone[i], rtol=1e-4, atol=1e-6)
