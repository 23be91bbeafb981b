"""The facts of the real data sets, through the code that a user's download goes through.

They are for `make test-long`: packing and decoding 300,000 pictures takes most of a minute. In `make test` the layout
of each is read from small folders (test_hub.py) and archives (test_emnist_archives.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedblur.core.errors import ConfigError
from fedblur.data.emnist import Emnist
from fedblur.data.federation import load_federation
from fedblur.data.femnist import Femnist

pytestmark = pytest.mark.xdist_group("real data")  # one worker unpacks and decodes, the others go on


@pytest.mark.long
def test_real__femnist_has_799_writers_of_20_images_or_more(hub: Callable[[str], Path]) -> None:
    raw = Femnist().load(hub("femnist"))
    assert raw.owners is not None
    sizes = torch.bincount(raw.owners)
    assert len(sizes) == 799
    assert sizes.min() >= 18  # 20 less the held-out tenth
    assert (raw.train.x.shape[1:], raw.classes) == ((1, 28, 28), 62)
    assert len(raw.train) + len(raw.test) == 117_250
    assert 0.09 < len(raw.test) / 117_250 <= 0.1
    assert float(raw.train.x.float().mean()) < 60  # background 0


@pytest.mark.long
def test_real__femnist_federation_takes_a_hundred_writers(hub: Callable[[str], Path]) -> None:
    federation = load_federation("femnist", clients=100, data_dir=hub("femnist"))
    assert (federation.train.clients, federation.validation_clients) == (100, 66)
    with pytest.raises(ConfigError, match="799 natural clients here, 733 of them for training"):
        load_federation("femnist", clients=3400, data_dir=hub("femnist"))


@pytest.mark.long
def test_real__mnist_is_natural_by_writer(hub: Callable[[str], Path]) -> None:
    federation = load_federation("mnist", data_dir=hub("mnist"))
    assert federation.train.clients + federation.validation_clients == 539
    assert len(federation.test) == 10_000


@pytest.mark.long
def test_real__emnist_has_3400_synthetic_users(hub: Callable[[str], Path]) -> None:
    federation = load_federation("emnist", data_dir=hub("emnist"))
    assert (federation.train.clients, federation.train.classes) == (3400, 62)
    assert federation.note.startswith("synthetic users, not writers; the test split only, 10%")
    assert len(federation.test) == 11_632
    assert Emnist().load(hub("emnist")).owners is None


@pytest.mark.long
def test_real__cifar10_has_a_thousand_equal_users(hub: Callable[[str], Path]) -> None:
    federation = load_federation("cifar10", data_dir=hub("cifar10"))
    assert (federation.train.clients, federation.train.shape) == (1000, (3, 32, 32))
    assert federation.train.fetch(torch.arange(1000)).sizes.unique().tolist() == [45]
    exact = load_federation("cifar10", clients=1000, validation_share=0, data_dir=hub("cifar10"))
    assert exact.train.fetch(torch.arange(1000)).sizes.unique().tolist() == [50]
