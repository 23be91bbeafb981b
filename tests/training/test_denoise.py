"""Post-processing of the noisy mean: closed forms, and never a look at anything but released values."""

import json

import pytest
import torch
from torch import nn

from fedblur.core.config import Config, config_hash, from_dict, to_dict
from fedblur.core.errors import ConfigError
from fedblur.core.registry import parts
from fedblur.learning.module_function import Layout
from fedblur.training.denoise import Laplacian, Shrink, Threshold
from fedblur.training.loop import train

LAYOUT = Layout.of(nn.Linear(40, 20))  # 800 weights and 20 biases
MEAN = torch.randn(LAYOUT.total, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", sorted(parts("denoise")))
def test_denoise__strength_0_is_the_identity(name: str) -> None:
    torch.testing.assert_close(parts("denoise")[name](strength=0.0).clean(MEAN, 0.3, LAYOUT), MEAN)


@pytest.mark.parametrize("part", [Threshold(), Shrink()])
def test_denoise__without_noise_nothing_is_taken_away(part) -> None:
    torch.testing.assert_close(part.clean(MEAN, 0.0, LAYOUT), MEAN)


def test_threshold__moves_every_coordinate_towards_0() -> None:
    cleaned = Threshold(strength=2.0).clean(torch.tensor([3.0, -3.0, 0.5, -1.0]), 0.5, LAYOUT)
    assert torch.equal(cleaned, torch.tensor([2.0, -2.0, 0.0, 0.0]))


def test_shrink__a_tensor_of_pure_noise_stands_still_and_a_strong_one_moves_on() -> None:
    weights, biases = 0.1 * MEAN[:800], torch.full((20,), 5.0)
    cleaned = Shrink(strength=1.2).clean(torch.cat([weights, biases]), 0.1, LAYOUT)
    assert float(cleaned[:800].norm()) == 0
    torch.testing.assert_close(cleaned[800:], biases, rtol=1e-3, atol=0)


def test_laplacian__solves_its_linear_system_on_a_circle() -> None:
    cleaned = Laplacian(strength=0.7).clean(MEAN.double(), 0.1, LAYOUT)
    laplace = cleaned.roll(1) - 2 * cleaned + cleaned.roll(-1)
    torch.testing.assert_close(cleaned - 0.7 * laplace, MEAN.double())


@pytest.mark.parametrize("name", sorted(parts("denoise")))
def test_denoise__a_run_costs_what_it_costs_without(name: str, tmp_path) -> None:
    table = {"epsilon": 2.0, "rounds": 2, "seed": 1}
    plain = train(from_dict(table), out=tmp_path / "plain")
    cleaned = train(from_dict(table | {"denoise": name}), out=tmp_path / "cleaned")
    assert cleaned.summary["privacy"]["epsilon"] == plain.summary["privacy"]["epsilon"]
    assert cleaned.summary["loss"] != plain.summary["loss"]
    assert json.loads((tmp_path / "cleaned" / "config.json").read_text())["denoise"]["name"] == name


def test_denoise__does_not_go_with_a_mask() -> None:
    with pytest.raises(ConfigError, match="denoise takes every coordinate to be noisy"):
        Config(mask="random", denoise="threshold")


def test_config_hash__keys_that_came_later_do_not_orphan_old_results() -> None:
    assert "denoise" in to_dict(Config())
    assert config_hash(Config()) != config_hash(Config(denoise="threshold"))
    assert config_hash(Config(rounds=7, seed=3)) == "4ed6925a172f"
