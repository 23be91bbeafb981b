"""FedProx: the proximal term is μΔ inside the ball and outside; it contracts by the closed form on a constant slope."""

import pytest
import torch

from fedblur.core.errors import ConfigError
from fedblur.learning.methods.prox import Prox


def test_prox__follows_the_closed_form_on_a_constant_slope() -> None:
    """Δ_Q = −g·(1 − (1 − ημ)^Q)/μ."""
    eta, mu, slope = 0.1, 0.4, 2.0
    delta = torch.zeros(3, dtype=torch.float64)
    for _ in range(20):
        delta = delta - eta * (slope + Prox(mu).gradient_term({"w": delta}, clip_norm=1e-9)["w"])
    assert float(delta[0]) == pytest.approx(-slope * (1 - (1 - eta * mu) ** 20) / mu)


def test_prox__does_not_look_at_the_clip_norm() -> None:
    delta = {"w": torch.tensor([0.3, -0.1])}
    for clip_norm in (1e-3, 1e3):
        torch.testing.assert_close(Prox(0.5).gradient_term(delta, clip_norm)["w"], 0.5 * delta["w"])


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan")])
def test_prox__bad_strength_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="method.prox.strength"):
        Prox(bad)
