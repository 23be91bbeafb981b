"""What banded matrix-factorisation noise would bring: the noise in a final model, against independent noise.

python tools/banded_noise.py

Clients are in b groups that take turns: round t samples its group with rate p·b, so two rounds of one client are at
least b apart. The noise of round t is (C⁻¹z)_t with C lower triangular, Toeplitz, b bands and columns of norm 1
(Choquette-Choo et al. 2023); a client then pays for T/b rounds of Poisson(p·b). The bands are truncated coefficients of
the square root of a sum over rounds, not optimised. b = 1 is what FedBlur does.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.linalg import solve_triangular, toeplitz

from fedblur.privacy import events
from fedblur.privacy.accounting import calibrate
from fedblur.training.server import Momentum

DELTA = 1 / 3400
BANDS = (2, 4, 8)
SETTINGS = (  # p, T, ε, how the server's step falls
    (0.1, 300, 8.0, "cosine"),
    (0.1, 1000, 8.0, "cosine"),
    (0.1, 300, 2.0, "cosine"),
    (0.04, 300, 8.0, "cosine"),
    (0.04, 1000, 8.0, "cosine"),
    (0.2, 500, 8.0, "linear"),  # the recipe on EMNIST and CIFAR-10
    (0.2, 500, 2.0, "linear"),
)


def weights(rounds: int, schedule: str) -> np.ndarray:
    """How much of each round's mean is in the final model: the server's own steps, on one coordinate a round."""
    server = Momentum(learning_rate=1.0, momentum=0.9, schedule=schedule)  # type: ignore[arg-type]
    state = server.init(torch.zeros(rounds))
    for t in range(rounds):
        state = server.step(state, torch.eye(rounds)[t], round_=t, rounds=rounds, noise_std=0.0)
    return state.theta.double().numpy()


def final_noise(rate: float, rounds: int, epsilon: float, bands: int, weight: np.ndarray) -> float:
    """Standard deviation of the noise in the final model; nan where the groups are too small for the cohort."""
    if rate * bands > 1:
        return math.nan
    sigma = calibrate(
        lambda s: events.PoissonSampled(rate * bands, events.Gaussian(s)), math.ceil(rounds / bands), epsilon, DELTA
    )
    band = np.cumprod([1.0, *((2 * k - 1) / (2 * k) for k in range(1, bands))])
    column = np.zeros(rounds)
    column[:bands] = band / np.linalg.norm(band)
    spread = solve_triangular(toeplitz(column, np.zeros(rounds)).T, weight)
    return sigma * float(np.linalg.norm(spread))


def main() -> None:
    print("| p, T, ε, step | " + " | ".join(f"b = {b}" for b in BANDS) + " |")
    print("|---|" + "---|" * len(BANDS))
    for rate, rounds, epsilon, schedule in SETTINGS:
        weight = weights(rounds, schedule)
        alone = final_noise(rate, rounds, epsilon, 1, weight)
        shares = [final_noise(rate, rounds, epsilon, b, weight) / alone for b in BANDS]
        shown = " | ".join("" if math.isnan(share) else f"{share:.2f}" for share in shares)
        print(f"| {rate:g}, {rounds}, {epsilon:g}, {schedule} | {shown} |")


if __name__ == "__main__":
    main()
