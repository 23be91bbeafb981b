"""Generalised cross-entropy: the gradient is that of (1 − p^q)/q, on every engine."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedblur.core.config import LocalTraining
from fedblur.core.errors import ConfigError
from fedblur.core.registry import build
from fedblur.learning.client import LocalProgram, many_clients, one_client
from fedblur.learning.methods import Method
from fedblur.learning.methods.gce import GeneralisedCrossEntropy
from fedblur.learning.models import make_model
from fedblur.learning.module_function import as_function
from tests.worlds import job_for, packed, work_for

LOGITS = 3 * torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


def update(*methods: Method, vectorised: bool = False) -> Tensor:
    """One step of one client, from weights that already tell classes apart."""
    module = make_model(build("model", "mlp"), (1, 4, 4), 10, seed=0)
    job = job_for(module, methods, local=LocalTraining(steps=1, batch_size=8, learning_rate=1.0))
    shard, work = work_for(job, packed([5, 8], (1, 4, 4)), [0, 1])
    program = LocalProgram(as_function(module), job.layout, job.local, job.methods)
    given = (job.start, torch.tensor(job.clip_norm), shard.x, shard.y)
    if vectorised:
        return job.layout.flatten(many_clients(program).train(*given, work.plan, work.seeds))
    rows = [one_client(program).train(*given, *row) for row in zip(work.plan, work.seeds, strict=True)]
    return torch.stack([job.layout.flatten(row) for row in rows])


@pytest.mark.parametrize("power", [0.2, 0.7, 1.0])
def test_gce__weights_give_the_gradient_of_its_loss(power: float) -> None:
    logits = LOGITS.clone().requires_grad_()
    p = F.softmax(logits, 1).gather(1, LABELS[:, None])[:, 0]
    (expected,) = torch.autograd.grad(((1 - p**power) / power).sum(), logits)
    weights = GeneralisedCrossEntropy(power).weigh(LOGITS, LABELS, torch.ones(6))
    plain = F.softmax(LOGITS, 1) - F.one_hot(LABELS, 4)
    torch.testing.assert_close(weights[:, None] * plain, expected)


def test_gce__power_zero_is_cross_entropy_and_padding_stays_out() -> None:
    weights = torch.tensor([0.5, 0.25, 0.25, 0.0, 0.0, 0.0])
    assert torch.equal(GeneralisedCrossEntropy(0.0).weigh(LOGITS, LABELS, weights), weights)
    assert GeneralisedCrossEntropy(0.5).weigh(LOGITS, LABELS, weights)[3:].tolist() == [0, 0, 0]
    torch.testing.assert_close(update(GeneralisedCrossEntropy(0.0)), update())


def test_gce__one_client_after_another_and_all_at_once_agree() -> None:
    method = GeneralisedCrossEntropy(0.7)
    torch.testing.assert_close(update(method, vectorised=True), update(method), rtol=1e-5, atol=1e-7)
    assert not torch.allclose(update(method), update(), rtol=1e-3)
    assert method.steers_steps


@pytest.mark.parametrize("power", [-0.1, 1.5])
def test_gce__settings_out_of_range_are_named(power: float) -> None:
    with pytest.raises(ConfigError, match=rf"method.gce.power={power} must be in \[0, 1\]"):
        GeneralisedCrossEntropy(power)
