"""Noise in the final model by kind of noise, at one epsilon, relative to independent noise with Poisson cohorts.

python tools/noise_kinds.py

N = 3400, δ = 1/3400, momentum 0.9, PLD. Two rounds of a client are at least b apart. `training/noise_comparison.py`
says what each kind assumes: tree, banded and BLT noise, and independent noise in the column "alone", no sampling;
"cyclic" is banded noise for b groups that take turns, with secret coins inside the group.
"""

from __future__ import annotations

from fedblur.training.noise_comparison import CYCLIC, POISSON, SEPARATED, Question, compare

CLIENTS = 3400
KINDS = (SEPARATED, "tree", "banded", "blt", CYCLIC)
HEADS = ("p, T, ε, step, b", "alone", "tree", "banded", "BLT", "cyclic")
SETTINGS = (  # p, T, ε, how the server's step falls, b
    (0.1, 300, 8.0, "cosine", 4),
    (0.1, 300, 8.0, "cosine", 8),
    (0.1, 300, 2.0, "cosine", 8),
    (0.1, 1000, 8.0, "cosine", 8),
    (0.04, 300, 8.0, "cosine", 20),
    (0.04, 1000, 8.0, "cosine", 20),
    (0.04, 1000, 2.0, "cosine", 20),
    (0.02, 1000, 8.0, "cosine", 40),
    (0.01, 1000, 8.0, "cosine", 80),
    (0.01, 1000, 2.0, "cosine", 80),
    (0.2, 500, 8.0, "linear", 4),  # the recipe on EMNIST and CIFAR-10
    (0.2, 500, 2.0, "linear", 4),
)


def row(rate: float, rounds: int, epsilon: float, schedule: str, separation: int) -> str:
    """Return one row of the table."""
    server = {"name": "momentum", "momentum": 0.9, "schedule": schedule}
    found = compare(Question(CLIENTS, rate, rounds, epsilon, separation, server=server))
    shares = [found.ratios(kind)[POISSON] for kind in KINDS]
    setting = f"{rate:g}, {rounds}, {epsilon:g}, {schedule}, {separation}"
    return f"| {setting} | " + " | ".join(f"{share:.2f}" for share in shares) + " |"


def main() -> None:
    print("| " + " | ".join(HEADS) + " |")
    print("|---|" + "---|" * len(KINDS))
    for setting in SETTINGS:
        print(row(*setting), flush=True)


if __name__ == "__main__":
    main()
