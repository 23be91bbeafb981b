"""What one part of a claim comes to, in four words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HOLDS, FAILS, MIXED, OPEN = "holds", "does not hold", "mixed", "not yet measured"


@dataclass(frozen=True)
class Finding:
    """What one part of a claim comes to."""

    verdict: str
    rule: str
    evidence: str
    narrow: bool = False  # chance could overturn it
    counts: bool = True


def combine(verdicts: Sequence[str]) -> str:
    """All alike, or mixed; what is not measured has no say."""
    known = {verdict for verdict in verdicts if verdict != OPEN}
    return OPEN if not known else known.pop() if len(known) == 1 else MIXED


def judge(margins: Sequence[float]) -> str:
    """By how far each setting is above what the rule demands."""
    return combine([HOLDS if margin >= 0 else FAILS for margin in margins])
