"""DP-FedSAM: the gradient at the worst point nearby, by one global norm, against the closed form on a quadratic."""

import math

import pytest
import torch
from torch import nn

from fedblur.core.config import Config
from fedblur.core.errors import ConfigError
from fedblur.learning.client import train_block
from fedblur.learning.methods.sam import Sam
from tests.worlds import job_for, packed, work_for

WEIGHTS = {"a": torch.tensor([1.0, -2.0], dtype=torch.float64), "b": torch.tensor([0.5], dtype=torch.float64)}
CURVES = {"a": torch.tensor([3.0, 1.0], dtype=torch.float64), "b": torch.tensor([4.0], dtype=torch.float64)}


def quadratic(theta):
    """∇ of ½·Σ h·w²: H·w with a diagonal H."""
    return {name: CURVES[name] * theta[name] for name in theta}


def flat(params) -> torch.Tensor:
    return torch.cat([params["a"], params["b"]])


def test_sam__is_the_gradient_at_the_worst_point_of_a_quadratic() -> None:
    h, w = flat(CURVES), flat(WEIGHTS)
    expected = h * (w + 0.5 * (h * w) / (h * w).norm())
    torch.testing.assert_close(flat(Sam(0.5).wrap_gradient(quadratic)(WEIGHTS)), expected)


def test_asam__measures_the_distance_relative_to_the_weights() -> None:
    h, w = flat(CURVES), flat(WEIGHTS)
    scale = w.abs() + 0.01
    expected = h * (w + 0.5 * scale**2 * h * w / (scale * h * w).norm())
    torch.testing.assert_close(flat(Sam(0.5, adaptive=True).wrap_gradient(quadratic)(WEIGHTS)), expected)


def test_sam__the_norm_is_global() -> None:
    """The distance to the worst point is ρ over all tensors together, not ρ for each."""
    seen = []

    def gradient(theta):
        seen.append(theta)
        return quadratic(theta)

    Sam(0.5).wrap_gradient(gradient)(WEIGHTS)
    assert float((flat(seen[1]) - flat(seen[0])).norm()) == pytest.approx(0.5)


@pytest.mark.parametrize("adaptive", [False, True])
def test_sam__a_zero_gradient_stays_where_it_is(adaptive: bool) -> None:
    zero = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
    assert torch.equal(flat(Sam(0.5, adaptive).wrap_gradient(quadratic)(zero)), flat(zero))


def run(methods) -> torch.Tensor:
    torch.manual_seed(0)
    job = job_for(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), methods)
    shard, work = work_for(job, packed([4, 7]), [0, 1])
    return train_block(job, shard, work, vectorise=True).bounded.value


def test_sam__radius_zero_is_dp_fedavg_bit_for_bit() -> None:
    assert torch.equal(run((Sam(0.0),)), run(()))
    assert not torch.equal(run((Sam(0.5),)), run(()))


@pytest.mark.parametrize("bad", [-0.1, math.inf, math.nan])
def test_sam__a_radius_that_makes_no_sense_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match=f"method.sam.radius={bad}"):
        Sam(bad)


def test_sam__by_name() -> None:
    assert Config(method="sam").method == (Sam(0.5, adaptive=False),)
