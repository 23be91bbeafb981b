"""`fedblur data`: figures that agree with the data, pictures that open, one line for bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from fedblur.cli.data import app
from fedblur.core.errors import FedBlurError
from fedblur.core.registry import parts
from fedblur.data.federation import federation_from_arrays
from fedblur.data.summary import label_counts, summarise


def call(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def said(*words: str) -> str:
    result = call(*words)
    assert result.exception is None, result.exception
    return result.output


def refused(*words: str) -> str:
    error = call(*words).exception
    assert isinstance(error, FedBlurError)
    assert "\n" not in str(error)
    return str(error)


def test_list__names_every_data_set_and_where_it_is() -> None:
    output = said("list")
    for name in parts("dataset"):
        assert name in output
    assert "built in" in output
    assert "needs fetch" in output


def test_list__a_data_dir_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert "is not a folder" in refused("list", "--data-dir", str(tmp_path / "nowhere"))


def test_show__digits_in_words() -> None:
    output = said("show", "digits")
    assert "training clients    359" in output
    assert "synthetic users" in output
    assert "min 3, median 4, mean 3.6, max 4" in output


def test_show__json_is_one_object_with_every_figure() -> None:
    figures = json.loads(said("show", "digits", "--clients", "100", "--json"))
    assert (figures["train_clients"], figures["validation_clients"]) == (100, 11)
    assert figures["samples_min"] <= figures["samples_median"] <= figures["samples_max"]
    assert figures["test_samples"] == 360
    assert 0 < figures["label_distance"] < 1


def test_show__settings_of_data_set_and_partition() -> None:
    def distance(alpha: str) -> float:
        words = ("show", "digits", "--clients", "50", "--partition", "dirichlet", "--json")
        return float(json.loads(said(*words, "--set", f"partition.alpha={alpha}"))["label_distance"])

    assert distance("0.05") > distance("100") + 0.2
    dealt = json.loads(said("show", "digits", "--set", "partition.samples_per_client=2", "--json"))
    assert dealt["samples_max"] == 2
    sizes = json.loads(said("show", "synthetic", "--set", "dataset.max_samples=60", "--json"))
    assert sizes["samples_max"] == 60
    whole = json.loads(said("show", "digits", "--set", "validation_share=0", "--json"))
    assert whole["validation_clients"] == 0


def test_show__of_generated_clients_looks_at_200_and_says_so() -> None:
    output = said("show", "synthetic", "--clients", "1000000")
    assert "1,000,000" in output
    assert "200 training clients; the figures per client are of these" in output


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_show__plot_is_written_in_the_format_of_its_name(suffix: str, start: bytes, tmp_path: Path) -> None:
    file = tmp_path / "new" / f"digits.{suffix}"
    assert str(file) in said("show", "digits", "--plot", str(file)).replace("\n", "")
    assert file.read_bytes().startswith(start)
    assert file.stat().st_size > 5000


def test_show__bad_input_is_one_line(tmp_path: Path) -> None:
    assert "did you mean 'digits'" in refused("show", "digitz")
    assert ".png, .svg, .pdf" in refused("show", "digits", "--plot", str(tmp_path / "x.gif"))
    assert "unknown key 'partition.iid.alpha'" in refused("show", "digits", "--set", "partition.alpha=1")
    assert "unknown key 'rounds'" in refused("show", "digits", "--set", "rounds=3")
    assert "must look like key=value" in refused("show", "digits", "--set", "clients")
    assert "clients=5000" in refused("show", "digits", "--clients", "5000")
    assert "femnist is not in a data dir" in refused("show", "femnist")


def test_fetch__what_is_built_in_needs_no_fetching() -> None:
    assert "nothing to fetch" in said("fetch", "digits")
    assert "nothing to fetch" in said("fetch", "synthetic")


def test_fetch__missing_data_say_how_to_get_them() -> None:
    assert "FEDBLUR_DATA" in refused("fetch", "cifar10")
    assert "matlab.zip" in refused("fetch", "emnist", "--set", "dataset.split=letters")


@pytest.mark.long
@pytest.mark.xdist_group("real data")
def test_fetch__packs_the_real_mnist_and_says_where(hub: Callable[[str], Path], own_cache: Path) -> None:
    folder = hub("mnist")
    output = said("fetch", "mnist", "--data-dir", str(folder))
    assert "mnist: 60,000 training and 10,000 test samples, 539 natural clients" in output
    assert str(own_cache) in output.replace("\n", "")
    assert "cached" in said("list", "--data-dir", str(folder))


def test_summary__figures_agree_with_hand_counting() -> None:
    """Client 0 has labels 0, 0; client 1 has 0, 1, 1, 1: distances 1/2 and 1/4 from the mix (1/2, 1/2)."""
    federation = federation_from_arrays(
        x=np.zeros((6, 2)),
        y=np.array([0, 0, 0, 1, 1, 1]),
        owners=np.array([0, 0, 1, 1, 1, 1]),
        test_x=np.zeros((1, 2)),
        test_y=np.array([0]),
        classes=2,
    )
    counts = label_counts(federation.train, torch.arange(2))
    assert counts.tolist() == [[2, 0], [1, 3]]
    summary = summarise(federation, counts)
    assert (summary.samples_min, summary.samples_median, summary.samples_max) == (2, 3.0, 4)
    assert summary.classes_per_client == 1.5
    assert summary.label_distance == pytest.approx((0.5 + 0.25) / 2)
