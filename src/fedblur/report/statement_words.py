"""The sentences of a privacy statement: the same for every run, but for what a run's own state makes untrue."""

from __future__ import annotations

import math

_FAILS = "FAILS FOR THIS RUN: its noise and its cohorts follow from a seed."
_ASSUMED = (
    ("Each person is one client. Someone with k clients has k·ε, and δ times (e^(kε) − 1)/(e^ε − 1).", False),
    (
        "Who is in the population, and N itself, were decided without looking at private data; N and p are public.",
        False,
    ),
    ("The trusted party named above runs this code unchanged and releases only the models.", False),
    ("Noise and cohorts are secret, drawn by the operating system's random generator, and that is sound.", True),
    ("Clients' participations in a round are independent draws; only the trusted party learns who took part.", False),
)

QUESTIONS = (
    "Can one person be several clients, or share data with others?",
    "How many runs on these clients came before this one, and are they in the total?",
    "Who held the data and the noise, and could they have released anything else?",
    "Is δ small enough for N, and is ε what the people concerned were told?",
)


def assumed(seeded: bool) -> tuple[str, ...]:
    """What the claim rests on; a seeded run is told which part it lacks."""
    return tuple(f"{line} {_FAILS}" if seeded and needs_secrets else line for line, needs_secrets in _ASSUMED)


def not_protected(discrete: bool) -> tuple[str, ...]:
    """What the claim does not cover. `discrete`: the noise is of whole numbers."""
    ideal = (
        "" if discrete else "; ε is for ideal real-valued noise, and the low bits of floating-point noise may tell more"
    )
    return (
        "What the population as a whole teaches: the model learns it, and that is the purpose.",
        "A client against whoever holds its data, or against the trusted party itself.",
        "Whoever the data behind the accuracy belong to: it was measured without noise. Where they are clients too "
        "(see the note about the data), publishing it tells something about them that ε does not count.",
        "Figures marked local_only in the run folder (norms, cohort sizes, times): made without noise; publishing "
        "them voids the claim.",
        "Other runs and other publications about the same clients: ε and δ both add up (see Tuning).",
        f"Side channels, such as timing and memory{'' if discrete else ideal}.",
    )


def meaning(epsilon: float | None, delta: float, seeded: bool) -> str:
    """The definition, and what it allows an adversary to learn."""
    if epsilon is None or math.isinf(epsilon):
        return "No noise bounds what its releases tell about a client: nothing is claimed."
    sure = 100 / (1 + math.exp(-epsilon))
    limit = math.ceil(1000 * epsilon - 1e-6) / 1000
    bound = (
        f"(ε, δ)-differential privacy with ε = {limit:.3f} and δ = {delta:.4g}: for any event E about everything that "
        "the run released, P[E with a client] ≤ e^ε · P[E without it] + δ, and the other way round. Someone for whom a "
        f"client's taking part was an even bet may become {sure:.0f} % sure of it, not more, apart from δ."
    )
    return f"With secret noise and cohorts it would have had {bound}" if seeded else f"It has {bound}"


def delta_against(delta: float, clients: int) -> str:
    """δ beside 1/N."""
    share = delta * clients
    if share > 0.999:
        told = (
            "That is not below 1/N: by itself the guarantee would permit publishing one client's data in full, on "
            "average, in every run. The usual advice is far less."
        )
    else:
        told = "Not far below 1/N; the usual advice is far less." if share > 0.1 else "Well below 1/N."
    return f"δ·N = {share:.3g} for N = {clients:,} clients. {told}"
