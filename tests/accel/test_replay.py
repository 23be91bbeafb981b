"""Traced local steps give the bits that untraced ones give, for every method, also when threads share them."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedblur.accel import replay as tracing
from fedblur.accel.replay import Traced, simplify
from fedblur.core.config import LocalTraining
from fedblur.core.rng import Seeded
from fedblur.engines import LocalEngine
from fedblur.engines.local import numbered
from fedblur.learning.batches import Work
from fedblur.learning.client import LocalProgram, Steps, batched_step, local_update, many_clients, run_steps
from fedblur.learning.methods.blur import Blur
from fedblur.learning.methods.lus import Lus
from fedblur.learning.methods.sam import Sam
from tests.worlds import CPU, SmallCnn, job_for, packed, work_for

SIZES = [1, 3, 8, 20, 8, 5]


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 10))


def steps_of(job):
    program = LocalProgram(job.forward, job.layout, job.local, job.methods)
    plain, step = many_clients(program), Traced(batched_step(program))
    return plain, Steps(partial(run_steps, numbered(step), job.local), Traced(plain.score), plain.shape)


@pytest.mark.parametrize("make", [dense, SmallCnn])
@pytest.mark.parametrize("methods", [(), (Blur(0.4), Lus(0.5)), (Sam(0.05), Lus(0.5, score_on="last"))], ids=str)
def test_traced__steps_are_untraced_ones_bit_for_bit(make, methods) -> None:
    local = LocalTraining(steps=3, batch_size=8, momentum=0.5, weight_decay=0.01)
    job = job_for(make(), methods, clip_norm=0.3, local=local)
    plain, traced = steps_of(job)
    shard, work = work_for(job, packed(SIZES), list(range(len(SIZES))))
    expected, got = (local_update(job, steps, shard, work) for steps in (plain, traced))
    assert torch.equal(expected.update, got.update)
    assert len(traced.train.args[0].args[0].graphs) == 1  # step number, clip norm and seeds are tensors


def test_traced__the_first_call_is_traced_so_no_count_of_calls_decides() -> None:
    function = Traced(lambda a: {"twice": 2 * a})
    for size in (1, 2, 2):
        assert torch.equal(function(torch.ones(size))["twice"], torch.full((size,), 2.0))
    assert len(function.graphs) == 2


def test_traced__labels_do_not_decide_which_graph_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    agree = tracing._agree

    def spied(one, other, leaves):
        def run(*values: torch.Tensor):
            seen.extend(value for value in values if not value.is_floating_point())
            return one(*values)

        return agree(run, other, leaves)

    monkeypatch.setattr(tracing, "_agree", spied)
    labels = torch.tensor([3, 1])
    Traced(lambda a, y: [a + a.gather(1, y[:, None])])(torch.ones(2, 4), labels)
    assert seen
    assert all(not bool(value.any()) for value in seen)


def test_traced__threads_share_graphs() -> None:
    job = job_for(dense(), (Blur(0.4),))
    plain, traced = steps_of(job)
    shard, work = work_for(job, packed([8] * 6), list(range(6)))
    parts = [Work(work.plan[i : i + 2], work.samples[i : i + 2], work.seeds[i : i + 2]) for i in (0, 2, 4)] * 3
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(lambda part: local_update(job, traced, shard, part).update, parts))
    assert len(traced.train.args[0].args[0].graphs) == 1
    for part, update in zip(parts, got, strict=True):
        assert torch.equal(update, local_update(job, plain, shard, part).update)


def test_simplify__leaves_code_alone_that_writes_in_place() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = torch.zeros_like(x), torch.zeros_like(x)
        first.add_(x)
        return first + second

    module = make_fx(function)(torch.ones(3))
    simplify(module)
    assert torch.equal(module(torch.ones(3)), torch.ones(3))


def test_engine__traced_blocks_are_filled_up_and_give_the_same_clients() -> None:
    job, population = job_for(dense(), (Blur(0.4), Lus(0.5))), packed([8] * 33 + [3])
    one, other = (
        [*LocalEngine(population, CPU, True, 64, how).map_clients(job, torch.arange(33), Seeded.root(0))]
        for how in ("plain", "traced")
    )
    assert [len(block.norms) for block in other] == [33]  # 31 empty clients filled it up
    assert torch.equal(one[0].bounded.value, other[0].bounded.value)


def test_engine__a_traced_step_may_be_followed_by_an_untraced_score() -> None:
    local = LocalTraining(steps=20, batch_size=8, learning_rate=0.1, momentum=0.5)
    job, population = job_for(dense(), (Blur(0.4), Lus(0.5)), local=local), packed([8] * 4)
    one, other = (
        [*LocalEngine(population, CPU, True, 64, how).map_clients(job, torch.arange(4), Seeded.root(0))]
        for how in ("plain", "traced")
    )
    assert torch.equal(one[0].bounded.value, other[0].bounded.value)
