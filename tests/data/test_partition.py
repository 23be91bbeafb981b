"""Every partition: no sample twice, no client empty, one line for bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import betaln

from fedblur.core.errors import ConfigError, DataError
from fedblur.core.registry import build, parts
from fedblur.data.partition import Dirichlet, DirichletClasswise, Iid, Natural, Partition, Shards
from tests.worlds import calls

ALPHAS = st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 100.0, 1e6, 1e308])


def cut(partition: Partition, labels: Any, clients: int, seed: int = 0) -> torch.Tensor:
    return partition.owners(torch.as_tensor(labels), clients, np.random.default_rng(seed), None)


@st.composite
def made_up(draw: st.DrawFn) -> Partition:
    kind = draw(st.sampled_from(["iid", "dirichlet", "dirichlet_classwise", "shards"]))
    if kind == "iid":
        return Iid()
    if kind == "shards":
        return Shards(shards_per_client=draw(st.integers(1, 2)))
    return Dirichlet(draw(ALPHAS)) if kind == "dirichlet" else DirichletClasswise(draw(ALPHAS))


@given(made_up(), st.data(), st.integers(1, 12), st.integers(0, 3))
def test_partition__no_sample_twice_and_no_client_empty(
    partition: Partition, data: st.DataObject, classes: int, seed: int
) -> None:
    labels = data.draw(st.lists(st.integers(0, classes - 1), min_size=2, max_size=120))
    least = getattr(partition, "shards_per_client", 1)
    clients = data.draw(st.integers(1, len(labels) // least))
    owners = cut(partition, labels, clients, seed)
    assert owners.shape == (len(labels),)  # one owner each: no sample twice
    assert owners.dtype == torch.int64
    assert sorted(set(owners.tolist()) - {-1}) == list(range(clients))


@given(st.integers(1, 40), st.integers(1, 5), ALPHAS, st.integers(0, 3))
def test_dirichlet__clients_are_equal(clients: int, each: int, alpha: float, seed: int) -> None:
    labels = np.arange(clients * each + clients // 2) % 7
    for partition in (Dirichlet(alpha), Dirichlet(alpha, samples_per_client=each)):
        owners = cut(partition, labels, clients, seed)
        size = partition.samples_per_client or len(labels) // clients
        assert torch.bincount(owners[owners >= 0], minlength=clients).tolist() == [size] * clients


@given(st.integers(1, 30), st.integers(1, 6), ALPHAS, st.integers(0, 3))
def test_dirichlet_classwise__every_client_has_the_minimum(clients: int, least: int, alpha: float, seed: int) -> None:
    labels = np.arange(clients * least + seed) % 5
    owners = cut(DirichletClasswise(alpha, min_samples=least), labels, clients, seed)
    sizes = torch.bincount(owners, minlength=clients)
    assert sizes.sum() == len(labels)  # all samples are dealt
    assert sizes.min() >= least


@pytest.mark.parametrize("partition", [Dirichlet(0.1), DirichletClasswise(0.1)], ids=lambda p: p.part_name)
def test_dirichlet__cifar_shape_into_5000_clients_takes_a_few_calls_a_client(partition: Partition) -> None:
    labels = torch.arange(50_000) % 10
    assert calls(cut, partition, labels, 5000) < 50 * 5000
    owners = cut(partition, labels, 5000)
    assert torch.bincount(owners[owners >= 0], minlength=5000).min() >= 1


def classes_of_clients(partition: Partition, classes: int = 10, clients: int = 500) -> float:
    labels = torch.arange(200_000) % classes
    owners = cut(partition, labels, clients)
    kept = owners >= 0
    pairs = torch.unique(torch.stack([owners[kept], labels[kept]]), dim=1)
    return pairs.shape[1] / clients


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet__classes_per_client_agree_with_the_dirichlet_multinomial(alpha: float) -> None:
    """P(a client of n samples lacks a class) = B(α, 9α + n) / B(α, 9α); the pools here hardly shrink."""
    n = 20
    lacks = np.exp(betaln(9 * alpha + n, alpha) - betaln(9 * alpha, alpha))
    seen = classes_of_clients(Dirichlet(alpha, samples_per_client=n))
    assert seen == pytest.approx(10 * (1 - lacks), rel=0.05)


def test_dirichlet__an_empty_pool_leaves_the_mix_of_the_others() -> None:
    """All of a scarce class goes, and then clients are filled from what is left."""
    labels = np.array([0] * 3 + [1] * 97)
    owners = cut(Dirichlet(100.0), labels, 10)
    assert (owners >= 0).all()
    assert torch.bincount(owners).tolist() == [10] * 10


def test_dirichlet_classwise__small_alpha_is_more_unequal_than_large() -> None:
    labels = torch.arange(10_000) % 10
    spread = [torch.bincount(cut(DirichletClasswise(a), labels, 50)).double().std() for a in (0.1, 100.0)]
    assert spread[0] > 3 * spread[1]


def test_iid__all_samples_are_dealt_and_sizes_differ_by_one_at_most() -> None:
    sizes = torch.bincount(cut(Iid(), torch.zeros(1437, dtype=torch.int64), 399))
    assert sizes.sum() == 1437
    assert sizes.max() - sizes.min() == 1


def test_iid__samples_per_client_is_exact() -> None:
    owners = cut(Iid(samples_per_client=2), torch.zeros(100, dtype=torch.int64), 30)
    assert torch.bincount(owners[owners >= 0]).tolist() == [2] * 30


def test_shards__a_client_has_no_more_labels_than_shards_when_shards_are_pure() -> None:
    labels = torch.arange(1000) % 10  # 20 shards of 50 lie within one class each
    owners = cut(Shards(shards_per_client=2), labels, 10)
    assert all(len(torch.unique(labels[owners == client])) <= 2 for client in range(10))
    assert torch.bincount(owners).tolist() == [100] * 10


def test_natural__keeps_people_apart_and_drops_those_not_chosen() -> None:
    people = torch.tensor([7, 7, 3, 3, 3, 9])
    labels = torch.zeros(6, dtype=torch.int64)
    everyone = Natural().owners(labels, 3, np.random.default_rng(0), people)
    assert everyone.tolist() == [1, 1, 0, 0, 0, 2]
    two = Natural().owners(labels, 2, np.random.default_rng(0), people)
    assert sorted(set(two.tolist())) == [-1, 0, 1]
    assert all(len(set(two[people == person].tolist())) == 1 for person in (3, 7, 9))


@pytest.mark.parametrize("name", sorted(parts("partition")))
def test_partition__same_seed_same_owners(name: str) -> None:
    labels, people = torch.arange(300) % 10, torch.arange(300) // 10
    draws = [build("partition", name).owners(labels, 12, np.random.default_rng(s), people) for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("name", ["iid", "dirichlet", "dirichlet_classwise", "shards"])
def test_partition__more_clients_than_samples_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"11 clients .* but there are 10; lower clients"):
        cut(build("partition", name), torch.zeros(10, dtype=torch.int64), 11)


def test_partition__too_many_samples_per_client_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"30 clients .* need 1500, but there are 1000"):
        cut(Dirichlet(samples_per_client=50), torch.zeros(1000, dtype=torch.int64), 30)


def test_partition__no_clients_is_refused() -> None:
    with pytest.raises(ConfigError, match="clients=0 must be at least 1"):
        cut(Iid(), torch.zeros(10, dtype=torch.int64), 0)


def test_natural__without_writers_is_refused() -> None:
    with pytest.raises(DataError, match="needs samples with known writers"):
        cut(Natural(), [0, 1], 1)


def test_natural__more_clients_than_people_is_refused() -> None:
    people = torch.tensor([0, 1])
    with pytest.raises(ConfigError, match="clients=3 must be from 1 to 2"):
        Natural().owners(people, 3, np.random.default_rng(0), people)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "dirichlet", "alpha": 0}, "partition.dirichlet.alpha=0.0 must be above 0"),
        ({"name": "dirichlet", "alpha": float("nan")}, "alpha=nan must be above 0"),
        ({"name": "dirichlet_classwise", "alpha": -1}, "alpha=-1.0 must be above 0"),
        ({"name": "dirichlet_classwise", "min_samples": 0}, "min_samples=0 must be at least 1"),
        ({"name": "iid", "samples_per_client": 0}, "samples_per_client=0 must be at least 1"),
        ({"name": "shards", "shards_per_client": 0}, "shards_per_client=0 must be at least 1"),
        ({"name": "dirichlet", "alhpa": 1}, "did you mean 'alpha'"),
    ],
)
def test_partition__bad_setting_is_one_line(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build("partition", table)
    assert "\n" not in str(caught.value)
