"""BLUR against the corrected closed form: γ_q = Π_{r>q} (1 − λη·1[‖Δ_r‖ > S])."""

import math

import pytest
import torch

from fedblur.core.config import Config, LocalTraining
from fedblur.core.errors import ConfigError
from fedblur.learning.methods.blur import Blur

LEARNING_RATE = 0.05


def unroll(blur: Blur, target: torch.Tensor, steps: int, clip_norm: float) -> tuple[torch.Tensor, list, list]:
    """Δ on f(w) = ½‖w − target‖² from w = 0, in float64, with the gradients and the Δ_r that were met."""
    delta, gradients, met = torch.zeros_like(target), [], []
    for _ in range(steps):
        gradient = delta - target
        gradients.append(gradient)
        met.append(delta)
        term = blur.gradient_term({"w": delta}, clip_norm)
        total = gradient if term is None else gradient + term["w"]
        delta = blur.after_step({"w": delta - LEARNING_RATE * total}, clip_norm)["w"]
    return delta, gradients, met


@pytest.mark.parametrize("strength", [0.0, 0.4, 0.8, 8.0, 0.9 / LEARNING_RATE])
def test_blur__equals_the_corrected_closed_form_on_a_quadratic(strength: float) -> None:
    target = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    clip_norm, steps = 0.3, 30
    delta, gradients, met = unroll(Blur(strength), target, steps, clip_norm)
    factor = [1 - strength * LEARNING_RATE * float(d.norm() > clip_norm) for d in met]
    closed = sum(
        -LEARNING_RATE * math.prod(factor[q + 1 :]) * gradient for q, gradient in enumerate(gradients)
    )  # a gradient is discounted by LATER penalised steps
    assert any(f < 1 for f in factor) == (strength > 0)
    torch.testing.assert_close(delta, closed, rtol=1e-12, atol=1e-12)


def test_blur__the_papers_printed_lemma_does_not_hold() -> None:
    target = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    delta, gradients, met = unroll(Blur(8.0), target, 30, 0.3)
    printed = sum(
        -LEARNING_RATE * ((1 - 8.0 * LEARNING_RATE) ** q if float(met[q].norm()) > 0.3 else 1.0) * gradient
        for q, gradient in enumerate(gradients)
    )
    assert float((delta - printed).norm()) > 0.01


def test_blur__shrink_factor_of_the_brief() -> None:
    """Constant gradients, penalised from step 1: (1 − (1 − λη)^Q)/(Qλη), .844 at λ=.4, η=.03, Q=30."""
    eta, strength, delta = 0.03, 0.4, torch.zeros(2, dtype=torch.float64)
    for _ in range(30):
        term = Blur(strength).gradient_term({"w": delta}, 1e-9)
        delta = delta - eta * (torch.ones(2, dtype=torch.float64) + term["w"])
    assert float(-delta[0] / (30 * eta)) == pytest.approx(0.844, abs=5e-4)


def test_blur__is_silent_inside_the_ball_and_on_the_sphere() -> None:
    for norm in (0.0, 0.5, 1.0):
        term = Blur(0.4).gradient_term({"w": torch.tensor([norm, 0.0])}, 1.0)
        assert bool((term["w"] == 0).all())
    assert float(Blur(0.4).gradient_term({"w": torch.tensor([1.5, 0.0])}, 1.0)["w"][0]) == pytest.approx(0.6)


def test_blur__infinite_strength_projects() -> None:
    projected = Blur(math.inf).after_step({"a": torch.full((2,), 3.0), "b": torch.full((2,), 4.0)}, 0.1)
    total = math.sqrt(sum(float(t.square().sum()) for t in projected.values()))
    assert total == pytest.approx(0.1, rel=1e-6)
    zero = Blur(math.inf).after_step({"a": torch.zeros(3)}, 0.1)["a"]
    assert torch.equal(zero, torch.zeros(3))


def test_blur__the_norm_is_global() -> None:
    """Each tensor inside the ball, both together outside: the penalty acts."""
    delta = {"a": torch.tensor([0.8]), "b": torch.tensor([0.8])}
    assert float(Blur(0.5).gradient_term(delta, 1.0)["a"]) == pytest.approx(0.4)


def test_blur__strength_times_rate_of_one_or_more_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strength=40.0 times local.learning_rate=0.03"):
        Config(method=[{"name": "blur", "strength": 40.0}], local=LocalTraining(learning_rate=0.03))
    Config(method=[{"name": "blur", "strength": math.inf}])


@pytest.mark.parametrize("bad", [-0.1, math.nan])
def test_blur__negative_strength_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="strength"):
        Blur(bad)
