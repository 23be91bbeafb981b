"""CUDA graphs of local training: not used on a CPU, checked before use, and equal to the plain calls on a GPU."""

import pytest
import torch

from fedblur.accel.cuda_graph import Captured, agree


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
