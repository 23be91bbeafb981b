"""Generated clients: the law of the literature, and a cost that does not depend on how many there are."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from fedblur.core.errors import ConfigError
from fedblur.core.registry import build
from fedblur.data.federation import load_federation
from fedblur.data.population import Shard
from fedblur.data.synthetic import Synthetic
from tests.worlds import calls


def client_of(shard: Shard, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    start, size = int(shard.starts[row]), int(shard.sizes[row])
    return shard.x[start : start + size], shard.y[start : start + size]


def test_synthetic__a_million_clients_cost_no_more_than_a_thousand() -> None:
    load_federation("synthetic")  # what is imported late is imported now
    few, many = (calls(load_federation, "synthetic", clients=clients) for clients in (1000, 1_000_000))
    assert many < 1.1 * few
    tracemalloc.start()
    federation = load_federation("synthetic", clients=1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert federation.train.clients == 1_000_000
    assert peak < 100e6  # the held-out samples; one entry per client and feature would be 240 MB


def test_synthetic__a_cohort_costs_a_few_calls_a_client_whatever_its_samples() -> None:
    """A hundred clients in 20 ms on an idle machine: a loop over their 20,000 samples would show here."""
    work = []
    for most in (60, 500):
        train = load_federation(Synthetic(max_samples=most)).train
        train.fetch(torch.arange(100))
        work.append(calls(train.fetch, torch.arange(100)))
    assert work[0] == work[1] < 50 * 100


def test_synthetic__a_client_is_the_same_in_every_cohort() -> None:
    train = load_federation("synthetic", clients=10**6, seed=3).train
    alone = train.fetch(torch.tensor([123_456]))
    among = train.fetch(torch.tensor([7, 999_999, 123_456]))
    for one, other in zip(client_of(alone, 0), client_of(among, 2)):
        assert torch.equal(one, other)


def test_synthetic__seeds_give_other_clients() -> None:
    first, second = (load_federation("synthetic", seed=seed).train.fetch(torch.tensor([0])) for seed in (0, 1))
    assert not torch.equal(first.x[:10], second.x[:10])


def test_synthetic__an_empty_cohort_is_an_empty_shard() -> None:
    shard = load_federation("synthetic").train.fetch(torch.tensor([], dtype=torch.int64))
    assert shard.x.shape == (0, 60)
    assert len(shard.y) == len(shard.starts) == len(shard.sizes) == 0


def test_synthetic__unknown_client_is_refused() -> None:
    with pytest.raises(IndexError, match="population of 5"):
        load_federation("synthetic", clients=5).train.fetch(torch.tensor([5]))


def test_synthetic__held_out_samples_are_nobodys() -> None:
    federation = load_federation("synthetic", clients=50, validation_share=0.2)
    assert federation.validation is not None
    assert federation.validation_clients == 12
    train = federation.train.fetch(torch.arange(50)).x
    held = torch.cat([federation.validation.x, federation.test.x])
    assert len(torch.unique(torch.cat([train, held]), dim=0)) == len(train) + len(held)


def test_synthetic__without_validation_there_is_none() -> None:
    federation = load_federation("synthetic", clients=50, validation_share=0)
    assert federation.validation is None
    assert federation.validation_clients == 0


def test_synthetic__sizes_keep_to_their_bounds() -> None:
    data = Synthetic(min_samples=3, max_samples=40)
    sizes = load_federation(data, clients=300).train.fetch(torch.arange(300)).sizes
    assert sizes.min() >= 3
    assert sizes.max() == 40  # lognormal(4, 2) is above 37 more often than not


def test_synthetic__features_have_the_law_of_the_literature() -> None:
    """Within a client the variance of feature j is j^-1.2; between clients v_k has variance 1 + β²."""
    data = Synthetic(beta=2.0, min_samples=200, max_samples=200)
    x = load_federation(data, clients=400).train.fetch(torch.arange(400)).x.double().reshape(400, 200, 60)
    expected = torch.arange(1, 61, dtype=torch.float64) ** -1.2
    torch.testing.assert_close(x.var(dim=1).mean(dim=0), expected, rtol=0.05, atol=0)
    assert float(x.mean(dim=1).var(dim=0).mean()) == pytest.approx(1 + 2.0**2, rel=0.15)


def test_synthetic__labels_are_linear_in_a_clients_features() -> None:
    """y = argmax(W_k x + b_k): within a client the classes are separable by a linear rule."""
    from sklearn.linear_model import LogisticRegression

    shard = load_federation("synthetic").train.fetch(torch.arange(40))
    pairs = [client_of(shard, row) for row in range(40)]
    x, y = next((x.numpy(), y.numpy()) for x, y in pairs if len(np.unique(y)) >= 3)
    assert LogisticRegression(C=1e6, max_iter=5000).fit(x, y).score(x, y) > 0.99


def test_synthetic__moves_with_its_device() -> None:
    train = load_federation("synthetic").train.to(torch.device("meta"))
    assert train.fetch(torch.tensor([1])).x.device.type == "meta"


@pytest.mark.parametrize(
    ("key", "value"),
    [("alpha", -1), ("beta", float("inf")), ("min_samples", 0), ("max_samples", 49), ("held_out_clients", 0)],
)
def test_synthetic__bad_setting_is_one_line(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key):
        build("dataset", {"name": "synthetic", key: value})


def test_synthetic__other_partitions_are_refused() -> None:
    with pytest.raises(ConfigError, match="generates its own clients"):
        load_federation("synthetic", partition="iid")
    assert load_federation("synthetic", partition="natural").train.clients == 1000
