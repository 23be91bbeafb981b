"""CUDA graphs of local training: not used on a CPU, checked before use, and equal to the plain calls on a GPU."""

from dataclasses import replace

import pytest
import torch

from fedblur.capturing import Captured, agree
from fedblur.engines.local import LocalEngine
from fedblur.functional import as_function
from fedblur.methods.blur import Blur
from fedblur.methods.lus import Lus
from fedblur.rng import Seeded
from tests.worlds import SmallCnn, job_for, packed


def test_captured__is_a_plain_call_on_a_cpu() -> None:
    function = Captured(lambda a, b: {"sum": a + b})
    assert torch.equal(function(torch.ones(3), torch.ones(3))["sum"], torch.full((3,), 2.0))
    assert not function.recordings


def test_captured__other_numbers_are_noticed() -> None:
    right = {"a": torch.ones(10), "b": torch.zeros(3)}
    assert agree({"a": torch.ones(10) * (1 + 1e-5), "b": torch.zeros(3)}, right)
    assert not agree({"a": torch.ones(10) * 1.01, "b": torch.zeros(3)}, right)
    assert not agree({"a": torch.ones(10), "b": torch.full((3,), 1e-6)}, right)
    assert not agree({"a": torch.full((10,), torch.nan), "b": torch.zeros(3)}, right)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_captured__replays_follow_their_inputs() -> None:
    data = torch.arange(6.0, device="cuda")
    function = Captured(lambda index, data: data[index] * 2, resident=(1,))
    for first in (0, 3):
        index = torch.arange(first, first + 3, device="cuda")
        assert torch.equal(function(index, data), data[index] * 2)
    assert len(function.recordings) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.filterwarnings("error:.*CUDA graph")
def test_captured__recorded_steps_are_the_plain_ones(half: bool) -> None:
    """Two rounds, so that the second is a replay on other clients from another start."""
    cuda, module = torch.device("cuda"), SmallCnn().cuda()
    job = job_for(module, (Blur(0.4), Lus(0.5)))
    job = replace(job, forward=as_function(module, half))
    population = packed([8] * 6).to(cuda)
    later = replace(job, start={name: 1.1 * tensor for name, tensor in job.start.items()})
    engines = [LocalEngine(population, cuda, True, 16, how) for how in ("plain", "recorded")]
    for given, ids in ((job, torch.arange(3)), (later, torch.arange(3, 6))):
        (plain,), (recorded,) = (list(engine.map_clients(given, ids, Seeded.root(0))) for engine in engines)
        torch.testing.assert_close(recorded.bounded.value, plain.bounded.value, rtol=1e-4, atol=1e-6)
