"""The sentences of a privacy statement that are the same for every run."""

from __future__ import annotations

ASSUMED = (
    "Each person is one client. Someone with k clients is protected with about k times the ε.",
    "Who is in the population, and N itself, were decided without looking at private data; N and p are public.",
    "The trusted party named above runs this code unchanged, keeps the noise secret and releases only the models.",
    "The operating system's random generator is sound.",
    "Clients' participations in a round are independent draws, as the sampling says; nobody learns who took part.",
    "Data used to measure accuracy belong to nobody in the population.",
)

NOT_PROTECTED = (
    "What the population as a whole teaches: the model learns it, and that is the purpose.",
    "A client against whoever holds its data, or against the trusted party itself.",
    "Figures marked local_only in the run folder (norms, cohort sizes, times): they are not part of the claim.",
    "Other runs and other publications about the same clients: their ε adds up (see Tuning).",
    "Side channels: timing, memory, the low bits of floating-point noise (discrete mechanisms have none of the last).",
)

QUESTIONS = (
    "Can one person be several clients, or share data with others?",
    "How many runs on these clients came before this one, and are they in the total?",
    "Who held the data and the noise, and could they have released anything else?",
    "Is δ small enough for N, and is ε what the people concerned were told?",
)
