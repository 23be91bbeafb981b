"""A dense layer's update in one operator: the kernel against float64 (with a GPU), and steps that use it (anywhere)."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fedblur.accel import compile as compiling
from fedblur.accel.compile import Compiled
from fedblur.accel.kernels.dense_update import fuse_updates
from fedblur.accel.kernels.operators import TILE, client_dense_update
from fedblur.core.config import LocalTraining
from fedblur.engines.local import numbered
from fedblur.learning.client import LocalProgram, batched_step, local_update, many_clients, run_steps
from fedblur.learning.methods import Method
from fedblur.learning.methods.blur import Blur
from fedblur.learning.module_function import as_function
from tests.worlds import job_for, packed, work_for

SHAPES = [(37, 64, 128, 7744), (2, 29, 128, 7744), (18, 10, 128, 1000), (5, 70, 62, 1100), (1, 1, 200, 523)]


class Dense(nn.Module):
    """One layer that is large enough, and one that is not."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, hidden)
        self.second = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.relu(self.first(x.flatten(1))))
        return y


def given(shape: tuple[int, ...], device: torch.device, half: torch.dtype) -> list[Tensor]:
    clients, batch, outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(clients, batch, outputs), (clients, batch, inputs), (clients, outputs, inputs), (clients,)]
    slope, x, delta, decay = (torch.randn(size, generator=generator).to(device) for size in sizes)
    start = torch.randn(outputs, inputs, generator=generator).to(device)
    return [slope.to(half).transpose(1, 2), x.to(half), delta, decay, start]


def errors(shape: tuple[int, ...], device: torch.device, half: torch.dtype) -> list[float]:
    """Relative, of the new Δ, the next step's weights and Σ Δ²."""
    tensors = given(shape, device, half)
    slope, x, delta, decay, start = (tensor.double() for tensor in tensors)
    new = delta * (1 - decay)[:, None, None] + slope @ x
    expected = new, start + new, new.square().sum((1, 2))
    got_new, got_half, parts = client_dense_update(*tensors, TILE)
    got = got_new, got_half, parts.sum((1, 2))
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True)]


@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
def test_dense_update__of_torch_s_operations_agrees_with_float64(shape: tuple[int, ...]) -> None:
    new, half, squares = errors(shape, torch.device("cpu"), torch.float32)
    assert max(new, squares) < 1e-5
    assert half < 4e-3  # bf16 has 8 bits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernels need a CUDA device")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_update__of_the_kernel_agrees_with_float64(shape: tuple[int, ...]) -> None:
    new, half, squares = errors(shape, torch.device("cuda"), torch.bfloat16)
    assert max(new, squares) < 1e-5  # products of bf16 numbers are summed in float32
    assert half < 4e-3


@pytest.mark.parametrize(
    ("methods", "hidden", "momentum", "batch", "fused"),
    [
        ((Blur(0.4),), 1100, 0.0, 8, 1),
        ((), 1100, 0.0, 8, 1),
        ((), 64, 0.0, 8, 0),  # a small layer
        ((Blur(0.4),), 1100, 0.5, 8, 0),  # with momentum the gradient is kept
        ((), 1100, 0.0, 129, 0),  # more samples than the kernel holds
    ],
    ids=["blur", "plain", "small", "momentum", "batch"],
)
def test_dense_update__steps_that_use_it_are_the_same_steps(
    methods: tuple[Method, ...], hidden: int, momentum: float, batch: int, fused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = Dense(hidden)
    job = job_for(module, methods, local=LocalTraining(steps=3, batch_size=batch, momentum=momentum))
    job = replace(job, forward=as_function(module, half=True))
    shard, work = work_for(job, packed([batch] * 3), [0, 1, 2])
    program = LocalProgram(job.forward, job.layout, job.local, job.methods)
    plain, counts = many_clients(program), []
    monkeypatch.setattr(compiling, "fuse_updates", lambda graph: counts.append(fuse_updates(graph)))
    monkeypatch.setattr(compiling, "_on_gpu", lambda tensors: True)
    loop = Compiled(batched_step(program), "aot_eager", state=(1, 2), invariant=(0, 3))
    train = partial(run_steps, numbered(loop), job.local)
    expected, got = (local_update(job, steps, shard, work) for steps in (plain, plain._replace(train=train)))
    assert counts == [fused]
    assert float((got.update - expected.update).norm() / expected.update.norm()) < 2e-3  # one rounding to bf16 less
    torch.testing.assert_close(got.trained_norm, expected.trained_norm, rtol=2e-3, atol=0)
