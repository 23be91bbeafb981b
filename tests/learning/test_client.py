"""The one client code: loop equals vmap, methods compose, padding is the identity, nothing is read across clients."""

import math

import pytest
import torch
from torch import nn

from fedblur.core.config import LocalTraining
from fedblur.learning.batches import Work
from fedblur.learning.client import train_block
from fedblur.learning.methods.blur import Blur
from fedblur.learning.methods.lus import Lus
from fedblur.learning.methods.prox import Prox
from tests.worlds import SmallCnn, job_for, packed, work_for

SIZES = [1, 3, 8, 20, 33]
IDS = [0, 1, 2, 3, 4]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def deltas(job, population, ids, vectorise=True):
    shard, work = work_for(job, population, ids)
    return train_block(job, shard, work, vectorise)


METHODS = [
    (),
    (Blur(0.4),),
    (Blur(math.inf),),
    (Lus(0.7),),
    (Blur(0.4), Lus(0.5, score_on="last")),
    (Prox(0.5), Lus(0.3, scope="global")),
]


@pytest.mark.parametrize("methods", METHODS, ids=str)
@pytest.mark.parametrize("make", [linear, SmallCnn])
def test_client__vmap_equals_loop_on_unequal_clients(make, methods) -> None:
    torch.manual_seed(0)
    job = job_for(make(), methods, clip_norm=0.3)
    population = packed(SIZES)
    together, alone = deltas(job, population, IDS), deltas(job, population, IDS, vectorise=False)
    scale = float(alone.bounded.value.abs().max())
    torch.testing.assert_close(together.bounded.value, alone.bounded.value, atol=1e-5 * scale + 1e-6, rtol=1e-4)
    torch.testing.assert_close(together.norms, alone.norms, rtol=1e-4, atol=1e-6)


def test_client__update_does_not_depend_on_who_shares_the_block() -> None:
    torch.manual_seed(0)
    job = job_for(SmallCnn(), (Lus(0.5),))
    population = packed([8, 8, 8, 8])
    full = deltas(job, population, [0, 1, 2, 3]).bounded.value
    pair = deltas(job, population, [2, 0]).bounded.value
    torch.testing.assert_close(pair, full[[2, 0]], atol=1e-6, rtol=1e-5)


def test_client__other_clients_data_are_never_read() -> None:
    """Poison everybody else's samples with NaN: a client's update must not change."""
    job = job_for(linear(), (Lus(0.5),))
    population = packed(SIZES)
    clean = deltas(job, population, [1, 3]).bounded.value
    mine = torch.zeros(len(population.y), dtype=torch.bool)
    for i in (1, 3):
        mine[population.starts[i] : population.starts[i] + population.sizes[i]] = True
    population.x[~mine] = math.nan
    assert torch.equal(deltas(job, population, [1, 3]).bounded.value, clean)


def test_pin_a__blur_0_and_lus_0_equal_dp_fedavg_bit_for_bit() -> None:
    for make in (linear, SmallCnn):
        torch.manual_seed(0)
        module = make()
        population = packed(SIZES)
        plain = deltas(job_for(module), population, IDS).bounded.value
        both = deltas(job_for(module, (Blur(0.0), Lus(0.0))), population, IDS).bounded.value
        assert torch.equal(plain, both)


def test_client__plain_sgd_equals_torch_optim() -> None:
    """One client, full batches: against an ordinary PyTorch loop."""
    module = linear()
    local = LocalTraining(steps=5, batch_size=100, learning_rate=0.2, momentum=0.5, weight_decay=0.01)
    job = job_for(module, clip_norm=math.inf, local=local)
    population = packed([12])
    update = deltas(job, population, [0]).bounded.value[0]
    start = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.5, weight_decay=0.01)
    for _ in range(5):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(population.x), population.y).backward()
        optimiser.step()
    expected = nn.utils.parameters_to_vector(module.parameters()).detach() - start
    torch.testing.assert_close(update, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("methods", METHODS, ids=str)
def test_invariant_5__client_without_data_sends_zero(methods) -> None:
    job = job_for(linear(), methods, local=LocalTraining(steps=3, batch_size=4, weight_decay=0.1, momentum=0.9))
    population = packed([5, 5])
    padding = torch.full((2, 3, 4), -1)
    shard = population.fetch(torch.tensor([0, 1]))
    for vectorise in (True, False):
        block = train_block(job, shard, Work(padding, padding, torch.tensor([7, 8])), vectorise)
        assert bool((block.bounded.value == 0).all())


def test_invariant_5__non_finite_update_counts_as_zero() -> None:
    job = job_for(linear())
    population = packed([4, 4])
    population.x[:4] = 1e38  # client 0 overflows
    block = deltas(job, population, [0, 1])
    assert bool((block.bounded.value[0] == 0).all())
    assert bool((block.bounded.value[1] != 0).any())
    assert bool(torch.isfinite(block.bounded.value).all())


def test_client__dropout_is_seeded_per_client_and_really_drops() -> None:
    torch.manual_seed(0)
    module = SmallCnn(dropout=0.5)
    population = packed([8, 8])
    with_dropout = deltas(job_for(module), population, [0, 1]).bounded.value
    again = deltas(job_for(module), population, [0, 1]).bounded.value
    assert torch.equal(with_dropout, again)
    module.drop.p = 0.0
    assert not torch.allclose(with_dropout, deltas(job_for(module), population, [0, 1]).bounded.value)


def test_client__lus_scores_use_the_gradient_at_the_end_point_of_all_local_data() -> None:
    module = linear()
    population = packed([20])
    plain = job_for(module, clip_norm=math.inf)
    delta = deltas(plain, population, [0]).bounded.value[0]
    vector = nn.utils.parameters_to_vector(module.parameters()).detach() + delta
    nn.utils.vector_to_parameters(vector, module.parameters())
    nn.functional.cross_entropy(module(population.x), population.y).backward()
    gradient = nn.utils.parameters_to_vector([p.grad for p in module.parameters()])
    nn.utils.vector_to_parameters(vector - delta, module.parameters())
    layout = plain.layout
    expected = layout.flatten(Lus(0.6).shape_update(layout.unflatten(delta), layout.unflatten(gradient), layout))
    got = deltas(job_for(module, (Lus(0.6),), clip_norm=math.inf), population, [0]).bounded.value[0]
    assert float(((got != 0) == (expected != 0)).float().mean()) > 0.99  # rounding may swap near-equal scores
    torch.testing.assert_close(got.norm(), expected.norm(), rtol=1e-3, atol=0)


def test_client__works_on_uint8_images() -> None:
    population = packed([6, 6])
    images = (population.x.clamp(0, 1) * 255).to(torch.uint8)
    bytes_ = type(population)(images, population.y, population.starts, population.sizes, 10)
    floats = type(population)(images.float() / 255, population.y, population.starts, population.sizes, 10)
    job = job_for(linear())
    assert torch.equal(deltas(job, bytes_, [0, 1]).bounded.value, deltas(job, floats, [0, 1]).bounded.value)
