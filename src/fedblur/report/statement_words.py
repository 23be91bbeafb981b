"""The sentences of a privacy statement: the same for every run, but for what a run's own state makes untrue."""

from __future__ import annotations

import math

from fedblur.report.rounding import rounded_up

_FAILS = "FAILS FOR THIS RUN: its noise and its cohorts follow from a seed."
_ASSUMED = (
    ("Each person is one client. Someone with k clients has k·ε, and δ times (e^(kε) − 1)/(e^ε − 1).", False),
    (
        "Who is in the population, and N itself, were decided without looking at private data; N and p are public.",
        False,
    ),
    ("The trusted party named above runs this code unchanged and releases only the models.", False),
    ("Noise and cohorts are secret, drawn by the operating system's random generator, and that is sound.", True),
)
_PARTICIPATION = {  # by how the sampling is described
    "Poisson": "Clients' participations in a round are independent draws; only the trusted party learns who took part.",
    "fixed": "The clients of a round are drawn at random; only the trusted party learns who took part.",
}
_NEIGHBOURS = {  # by how the neighbours are stated: the two worlds, and what someone may want to know
    "add or remove": ("with a client", "without it", "a client's taking part"),
    "replace": ("with one client's data", "with another's instead", "which of two guesses at a client's data is right"),
    "one client's data": ("with a client's data", "with none in their place", "whether a client's data were used"),
}

QUESTIONS = (
    "Can one person be several clients, or share data with others?",
    "How many runs on these clients came before this one, and are they in the total?",
    "Who held the data and the noise, and could they have released anything else?",
    "Is δ small enough for N, and is ε what the people concerned were told?",
)


def assumed(seeded: bool, sampling: str) -> tuple[str, ...]:
    """What the claim rests on; a seeded run is told which part it lacks. Who came matters where sampling counts."""
    lines = [f"{line} {_FAILS}" if seeded and needs_secrets else line for line, needs_secrets in _ASSUMED]
    amplifies = "amplifies nothing" not in sampling
    return (*lines, *(line for start, line in _PARTICIPATION.items() if amplifies and sampling.startswith(start)))


def not_protected(in_floats: bool, pool: bool = False, scored: int = 0) -> tuple[str, ...]:
    """List what the claim does not cover.

    `in_floats`: the noise was added in floating point; `pool`: labels of public samples were bought; `scored`:
    validation clients whose scores chose the settings without noise.
    """
    others = (
        "Clients against someone who has the exact numbers of any released model: version 0.1 added noise in floating "
        "point, whose low bits can tell who took part with certainty, and in its blocks one client's size changed what "
        "others sent (docs/privacy.md, Before version 0.2)." * in_floats,
        "Whoever the public pool belongs to (see the note about the data): its samples are used as they are." * pool,
        f"The {scored} validation clients: settings were chosen by their scores, without noise." * bool(scored),
    )
    return (
        *filter(None, others),
        "What the population as a whole teaches: the model learns it, and that is the purpose.",
        "A client against whoever holds its data, or against the trusted party itself.",
        "Whoever the data behind the accuracy belong to: it was measured without noise. Where they are clients too "
        "(see the note about the data), publishing it tells something about them that ε does not count.",
        "Figures marked local_only in the run folder (norms, cohort sizes, times): made without noise; publishing "
        "them voids the claim.",
        "Other runs and other publications about the same clients: ε and δ both add up (see Tuning).",
        "Side channels, such as timing and memory.",
    )


def meaning(epsilon: float | None, delta: float, seeded: bool, adjacency: str) -> str:
    """The definition between the neighbours that are stated, and what it allows an adversary to learn."""
    if epsilon is None or math.isinf(epsilon):
        return "No noise bounds what its releases tell about a client: nothing is claimed."
    sure = 100 / (1 + math.exp(-epsilon))
    one, other, wanted = next(words for start, words in _NEIGHBOURS.items() if adjacency.startswith(start))
    bound = (
        f"(ε, δ)-differential privacy with ε = {rounded_up(epsilon)} and δ = {delta:.4g}: for any event E about "
        f"everything that the run released, P[E {one}] ≤ e^ε · P[E {other}] + δ, and the other way round. Someone for "
        f"whom {wanted} was an even bet may become {sure:.0f} % sure of it, not more, apart from δ."
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


def counted(count: int, word: str) -> str:
    """`1 release`, `4 releases`."""
    return f"{count:,} {word}" + ("" if count == 1 else "s")
