"""N is exact, validation clients never train, and a user's own arrays are checked before they are used."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fedblur.core.errors import ConfigError, DataError
from fedblur.core.registry import parts, register
from fedblur.data.dataset import Dataset, Raw
from fedblur.data.federation import federation_from_arrays, load_federation
from fedblur.data.population import Federation, Packed, Samples


@dataclasses.dataclass(frozen=True)
class People(Dataset):
    """Forty people with three samples each; a sample is its own number, so that it can be followed."""

    with_writers: bool = True

    default_partition: ClassVar[str] = "natural"
    default_clients: ClassVar[int | None] = None
    summary: ClassVar[str] = "for tests"

    def load(self, data_dir: Path | None) -> Raw:
        x, y = torch.arange(120.0)[:, None], torch.arange(120) % 4
        owners = torch.arange(120) // 3 if self.with_writers else None
        return Raw(Samples(x, y), Samples(x[:5], y[:5]), owners, classes=4, note="a note", made_up_note="made up")


@pytest.fixture(autouse=True, scope="module")
def _people() -> Iterator[None]:
    """Known by name only while these tests run: contract tests look at everything that is registered."""
    register("dataset", "people")(People)
    yield
    parts("dataset").pop("people")  # type: ignore[attr-defined]


def seen(federation: Federation) -> tuple[set[float], set[float]]:
    """The samples of training and of validation clients."""
    assert isinstance(federation.train, Packed)
    train = federation.train.samples().x.flatten().tolist()
    held = [] if federation.validation is None else federation.validation.x.flatten().tolist()
    assert len(set(train)) == len(train)
    assert len(set(held)) == len(held)
    return set(train), set(held)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("clients", [1, 7, 30])
@pytest.mark.parametrize("partition", ["iid", "dirichlet", "dirichlet_classwise", "shards"])
def test_federation__made_up_clients_are_exactly_n(partition: str, clients: int, share: float) -> None:
    federation = load_federation(People(), partition, clients, validation_share=share)
    train, held = seen(federation)
    assert federation.train.clients == clients
    assert not train & held
    assert (federation.validation_clients > 0) == (share > 0) == bool(held)
    assert federation.note == "made up; a note"


def test_federation__natural_clients_are_divided_by_the_seed() -> None:
    federation = load_federation(People())
    train, held = seen(federation)
    assert (federation.train.clients, federation.validation_clients) == (34, 6)  # each drawn on its own
    assert train | held == set(range(120))
    assert {int(sample) // 3 for sample in train}.isdisjoint(int(sample) // 3 for sample in held)
    assert federation.note == "a note"
    assert seen(load_federation(People(), seed=1))[1] != held


def test_federation__a_cap_on_natural_clients_keeps_the_validation_clients() -> None:
    everyone, some = load_federation(People()), load_federation(People(), clients=10)
    assert some.train.clients == 10
    assert seen(some)[1] == seen(everyone)[1]
    assert seen(some)[0] < seen(everyone)[0]


def test_federation__only_training_samples_are_in_memory() -> None:
    train = load_federation(People(), clients=10).train
    assert isinstance(train, Packed)
    assert len(train.x) == 30


def test_federation__a_client_keeps_its_own_samples() -> None:
    train = load_federation(People()).train
    for client in range(train.clients):
        shard = train.fetch(torch.tensor([client]))
        mine = shard.x[shard.starts[0] : shard.starts[0] + shard.sizes[0]].flatten()
        assert len(torch.unique(mine // 3)) == 1


def test_federation__too_many_natural_clients_is_refused_with_the_number() -> None:
    with pytest.raises(ConfigError, match=r"clients=37 but .* 40 natural clients here, 34 of them for training"):
        load_federation(People(), clients=37)


def test_federation__natural_without_writers_is_refused() -> None:
    with pytest.raises(DataError, match="no writers; use 'dirichlet' or 'iid'"):
        load_federation(People(with_writers=False), "natural")


def test_federation__natural_by_default_becomes_dirichlet_without_writers() -> None:
    federation = load_federation(People(with_writers=False), clients=20)
    assert federation.train.clients == 20
    assert federation.note.startswith("made up")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition": "iid"}, "give clients=N"),
        ({"clients": 0}, "clients=0 must be at least 1"),
        ({"validation_share": 1.0}, r"validation_share=1.0 must be in \[0, 1\)"),
        ({"validation_share": -0.1}, "validation_share=-0.1"),
        ({"validation_share": 0.999}, "leaves none to train"),
        ({"partition": "iid", "clients": 120}, "clients=120 and 13 for validation are more than the 120"),
        ({"partition": "iidd", "clients": 12}, "did you mean 'iid'"),
    ],
)
def test_federation__bad_request_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_federation(People(), **settings)
    assert "\n" not in str(caught.value)


def test_digits__defaults_are_359_clients_of_8_by_8_floats() -> None:
    federation = load_federation("digits")
    train = federation.train
    assert isinstance(train, Packed)
    assert (train.clients, train.shape, train.classes) == (359, (1, 8, 8), 10)
    assert train.x.dtype == torch.float32
    assert 0 <= float(train.x.min()) < float(train.x.max()) == 1.0
    assert federation.note == "synthetic users"


def test_digits__test_share_is_stratified_and_the_same_for_every_seed() -> None:
    first, second = load_federation("digits", seed=0), load_federation("digits", seed=9)
    assert torch.equal(first.test.x, second.test.x)
    assert len(first.test) == 360
    assert torch.bincount(first.test.y).min() >= 34


def test_digits__same_seed_same_federation() -> None:
    one, two, other = (load_federation("digits", seed=seed).train for seed in (4, 4, 5))
    assert isinstance(one, Packed)
    assert isinstance(two, Packed)
    assert isinstance(other, Packed)
    assert torch.equal(one.x, two.x)
    assert not torch.equal(one.x, other.x)


def arrays(**changes: Any) -> dict[str, Any]:
    """Six samples of three clients, and two test samples."""
    base = {
        "x": np.arange(12, dtype=np.float64).reshape(6, 2),
        "y": np.array([0, 1, 2, 0, 1, 2]),
        "owners": np.array([2, 0, 1, 1, 0, 2]),
        "test_x": np.zeros((2, 2)),
        "test_y": np.array([0, 2]),
    }
    return base | changes


def test_arrays__numpy_and_tensors_give_the_same_federation() -> None:
    plain = federation_from_arrays(**arrays())
    tensors = federation_from_arrays(**{key: torch.as_tensor(value) for key, value in arrays().items()})
    for federation in (plain, tensors):
        assert isinstance(federation.train, Packed)
        assert federation.train.clients == 3
        assert federation.train.classes == 3
        assert federation.train.x.dtype == torch.float32
        assert federation.validation is None
    assert seen_rows(plain) == seen_rows(tensors) == [[2, 3], [8, 9], [4, 5], [6, 7], [0, 1], [10, 11]]


def seen_rows(federation: Federation) -> list[list[float]]:
    assert isinstance(federation.train, Packed)
    return federation.train.x.tolist()


def test_arrays__bytes_stay_bytes() -> None:
    images = np.zeros((6, 1, 4, 4), dtype=np.uint8)
    federation = federation_from_arrays(**arrays(x=images, test_x=images[:2]))
    assert federation.test.x.dtype == torch.uint8


@pytest.mark.parametrize("labels", [[0, 1, 2, 0, 1, 2], [0, 0, 0, 0, 0, 0], [2, 2, 2, 2, 2, 2]])
def test_arrays__classes_never_follow_from_clients_labels(labels: list[int]) -> None:
    """The model's shape shows their number to everyone: neighbours must have the same."""
    assert federation_from_arrays(**arrays(y=labels)).train.classes == 3  # as the test labels show
    assert federation_from_arrays(**arrays(y=labels, classes=7)).train.classes == 7


def test_arrays__minus_one_leaves_a_sample_out() -> None:
    federation = federation_from_arrays(**arrays(owners=[-1, 0, 1, 1, 0, -1]))
    assert federation.train.clients == 2
    assert len(seen_rows(federation)) == 4


def test_arrays__validation_clients_do_not_train() -> None:
    federation = federation_from_arrays(**arrays(), validation_share=0.3)
    assert (federation.train.clients, federation.validation_clients) == (1, 2)
    assert federation.validation is not None
    assert len(federation.validation) == 4
    assert len(seen_rows(federation)) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"owners": [0, 0, 0, 2, 2, 2]}, "client 1 has no samples"),
        ({"owners": [0, 1]}, "owners has 2 entries for 6 samples"),
        ({"owners": [-2, 0, 0, 0, 0, 0]}, "owners run from -2 to 0"),
        ({"owners": [-1] * 6}, "owners run from -1 to -1"),
        ({"owners": [0.5] * 6}, "owners has shape .* one whole number per sample"),
        ({"x": np.full((6, 2), np.nan)}, "x has NaN or infinite values, first in sample 0"),
        ({"x": np.full((6, 2), 1e300)}, "x has NaN or infinite values"),
        ({"test_x": np.array([[0, 0], [0, np.inf]])}, "test_x has NaN or infinite values, first in sample 1"),
        ({"x": np.zeros((5, 2))}, "x has 5 samples but y 6 labels"),
        ({"x": np.zeros(6)}, r"x has shape \[6\]"),
        ({"x": np.zeros((0, 2)), "y": np.array([], dtype=int)}, r"x has shape \[0, 2\]"),
        ({"test_x": np.zeros((2, 3))}, "they must agree"),
        ({"y": [0, 1, 2, 0, 1, 3], "classes": 3}, r"y runs from 0 to 3, must be in 0\.\.2"),
        ({"test_y": [0, -1]}, "test_y runs from -1 to 0"),
        ({"y": np.zeros(6)}, r"y has targets \[\] of torch.float32, test_y \[\] of torch.int64; they must agree"),
        ({"y": np.full(6, np.nan), "test_y": np.zeros(2)}, "y has NaN or infinite values, first in sample 0"),
        ({"y": np.zeros((6, 3))}, r"y has targets \[3\] of torch.float32, test_y \[\]"),
        ({"x": {"a": np.zeros((6, 2)), "b": np.zeros(5)}}, "x has 5 samples but y 6 labels"),
        ({"x": {"a b": np.zeros((6, 2))}}, "must be names of the model's arguments"),
        ({"x": {"a": np.zeros((6, 2))}}, "they must agree"),
        ({"owners": [0] * 6, "validation_share": 0.99}, "leaves none to train"),
        ({"y": [0, 1, 2, 0, 1, 3]}, r"the test labels show 3 classes: give classes=, .* without looking at y"),
    ],
)
def test_arrays__bad_input_is_named_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        federation_from_arrays(**arrays(**changes))
    assert "\n" not in str(caught.value)
