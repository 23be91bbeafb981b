"""Compiled local steps give what uncompiled ones give, with dropout, convolutions and BLUR inside."""

import pytest
import torch

from fedblur.client import LocalProgram, Trained, clip_block, local_update, many_clients
from fedblur.compiling import Compiled
from fedblur.config import LocalTraining
from fedblur.methods.blur import Blur
from fedblur.methods.lus import Lus
from tests.worlds import SmallCnn, job_for, packed, work_for


@pytest.mark.parametrize("half", [False, True])
def test_compiled__steps_equal_uncompiled_ones(half: bool) -> None:
    from dataclasses import replace

    from fedblur.functional import as_function

    torch.manual_seed(0)
    module = SmallCnn()
    job = job_for(module, (Blur(0.4), Lus(0.5)), local=LocalTraining(steps=3, batch_size=8, momentum=0.5))
    job = replace(job, forward=as_function(module, half))
    shard, work = work_for(job, packed([8, 8, 8]), [0, 1, 2])
    program = LocalProgram(job.forward, job.layout, job.local, job.methods)
    plain = many_clients(program)
    traced = plain._replace(step=Compiled(plain.step, "aot_eager"), score=Compiled(plain.score, "aot_eager"))
    expected, got = (local_update(job, steps, shard, work) for steps in (plain, traced))
    torch.testing.assert_close(Trained(*got), Trained(*expected), rtol=1e-4, atol=1e-6)
    assert len(traced.step.graphs) == 1  # the step's number and the clip norm are tensors
    assert torch.isfinite(clip_block(got, job).bounded.value).all()


def test_compiled__makes_one_graph_per_shape() -> None:
    function = Compiled(lambda a, b: {"sum": a + b, "twice": 2 * a}, "aot_eager")
    for _ in range(3):
        out = function(torch.ones(3), torch.ones(3))
    assert torch.equal(out["sum"], torch.full((3,), 2.0))
    assert len(function.graphs) == 1
    function(torch.ones(4), torch.ones(4))
    assert len(function.graphs) == 2
