"""Workers on a CPU: the same updates as the vectorised engine, the same bits for any number of workers."""

import math

import pytest
import torch
from torch import nn

from fedblur.core.config import LocalTraining
from fedblur.core.rng import Seeded
from fedblur.engines import LocalEngine, WorkerEngine
from fedblur.engines import workers as engine_file
from fedblur.engines.workers import _in_order, channels_last
from fedblur.learning.methods.blur import Blur
from fedblur.learning.methods.lus import Lus
from fedblur.learning.methods.prox import Prox
from fedblur.learning.methods.sam import Sam
from fedblur.learning.module_function import ModuleFunction
from tests.worlds import CPU, SmallCnn, job_for, packed

SIZES = [1, 3, 8, 20, 33, 8, 5]
METHODS = [
    (),
    (Blur(0.4), Lus(0.5)),
    (Blur(math.inf), Lus(0.5, score_on="last")),
    (Prox(0.5), Lus(0.3, scope="global")),
    (Sam(0.05),),
    (Sam(0.05, adaptive=True), Lus(0.7)),
]


def outcome(engine, job):
    """Rows by client; engines train small clients first."""
    order = torch.argsort(torch.tensor(SIZES), stable=True)
    blocks = list(engine.map_clients(job, torch.arange(len(SIZES)), Seeded.root(0)))
    rows = torch.cat([block.bounded.value for block in blocks])
    return torch.empty_like(rows).index_copy(0, order, rows), torch.cat([block.norms for block in blocks])


def cnn(**changes) -> nn.Module:
    torch.manual_seed(0)
    return SmallCnn(**changes)


@pytest.mark.parametrize("methods", METHODS, ids=str)
def test_workers__equal_the_vectorised_engine_on_unequal_clients_with_dropout(methods) -> None:
    local = LocalTraining(steps=5, batch_size=8, learning_rate=0.1, momentum=0.5, weight_decay=0.01)
    job, population = job_for(cnn(), methods, clip_norm=0.3, local=local), packed(SIZES)
    together, _ = outcome(LocalEngine(population, CPU, True, 16), job)
    alone, _ = outcome(WorkerEngine(population, 3, workers=2), job)
    assert float((together - alone).norm() / together.norm()) < 1e-5
    assert bool(((together - alone).norm(dim=1) <= 1e-5 * together.norm(dim=1)).all())


def test_workers__same_bits_for_any_number_of_workers() -> None:
    job, population = job_for(cnn(), (Blur(0.4), Lus(0.5))), packed(SIZES)
    first, norms = outcome(WorkerEngine(population, 3, workers=1), job)
    for workers in (2, 5):
        again, same_norms = outcome(WorkerEngine(population, 3, workers=workers), job)
        assert torch.equal(first, again)
        assert torch.equal(norms, same_norms)


def test_workers__blocks_have_the_size_that_was_asked_for() -> None:
    blocks = WorkerEngine(packed(SIZES), 3, workers=2).map_clients(job_for(cnn()), torch.arange(7), Seeded.root(0))
    assert [len(block.bounded.value) for block in blocks] == [3, 3, 1]


def test_workers__empty_cohort_gives_no_block() -> None:
    engine = WorkerEngine(packed(SIZES), 3, workers=2)
    assert not list(engine.map_clients(job_for(cnn()), torch.arange(0), Seeded.root(0)))


class Witness(SmallCnn):
    """Notes the strides that its convolution sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.stride())
        self.seen.append(self.conv.weight.stride())
        self.seen.append(self.conv(x).stride())
        return super().forward(x)


def test_channels_last__is_real_for_one_channel() -> None:
    job = job_for(Witness())
    engine = WorkerEngine(packed([8]), 1, workers=1)
    list(engine.map_clients(job, torch.arange(1), Seeded.root(0)))
    assert isinstance(job.forward, ModuleFunction)
    tried = job.forward.evaluating.module  # workers have their own modules
    assert tried.seen == [(64, 1, 8, 1), (9, 1, 3, 1), (256, 1, 32, 4)]
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(channels_last(x), x)


class Viewer(SmallCnn):
    """Relies on NCHW memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.max_pool2d(x, 2)
        return self.head(self.drop(x.view(x.shape[0], -1)))


def test_channels_last__a_model_that_needs_nchw_gets_it() -> None:
    torch.manual_seed(0)
    job, population = job_for(Viewer()), packed(SIZES)
    together, _ = outcome(LocalEngine(population, CPU, True, 16), job)
    alone, _ = outcome(WorkerEngine(population, 3, workers=2), job)
    assert float((together - alone).norm() / together.norm()) < 1e-5


class Stumbler(SmallCnn):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 5:
            raise ZeroDivisionError("client of five")
        return super().forward(x)


def test_workers__an_error_in_a_client_reaches_the_caller_and_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    engine = WorkerEngine(packed(SIZES), 3, workers=2)
    with pytest.raises(ZeroDivisionError, match="client of five"):
        list(engine.map_clients(job_for(Stumbler()), torch.arange(7), Seeded.root(0)))
    assert torch.get_num_threads() == before


def test_workers__memory_does_not_grow_with_the_cohort() -> None:
    """No more work is handed out than a block ahead of what was taken."""
    from concurrent.futures import ThreadPoolExecutor

    taken = []
    with ThreadPoolExecutor(2) as pool:
        results = _in_order(pool, lambda i: i, (taken.append(i) or i for i in range(100)), ahead=4)  # type: ignore
        for i, result in enumerate(results):
            assert result == i
            assert len(taken) <= i + 5


def test_workers__free_memory_goes_back_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept memory falls into pieces: a round of 1000 clients of CNN-B took up to 6.5 GiB instead of 2.4."""
    calls = []
    monkeypatch.setattr(engine_file, "return_freed_memory", lambda: calls.append(1))
    monkeypatch.setattr(engine_file, "_PLANNED", 3)
    job, population = job_for(cnn()), packed(SIZES)
    outcome(WorkerEngine(population, 2, workers=2), job)
    assert len(calls) == 2  # 7 clients, after 3 and after 6
