"""What a user should hear of a run that is allowed, but hardly meant: before it, and while it goes."""

from __future__ import annotations

from typing import Any

from fedblur.accounting import PrivacyPlan
from fedblur.config import Config
from fedblur.planning import signal_to_noise

_SLACK = 1 + 1e-9  # 1/N itself is the usual choice


def cautions(plan: PrivacyPlan, clients: int, parameters: int) -> list[str]:
    """Nothing for a plan without noise: its warning says more."""
    lines: list[str] = []
    if not plan.noise_multiplier:
        return lines
    if plan.delta * clients > _SLACK:
        lines.append(
            f"delta={plan.delta:g} is above 1/N={1 / clients:.3g}: it permits releasing a random client; "
            'set delta = "1/N" or "N^-1.1"'
        )
    ratio = signal_to_noise(plan, parameters)
    if ratio < 1:
        lines.append(
            f"R = {ratio:.2g}: the noise exceeds the largest possible signal, which may cost much; raise epsilon or "
            "sample_rate, or take a smaller model (fedblur plan compares)"
        )
    return lines


def note_divergence(row: dict[str, Any], config: Config, protects: bool) -> str:
    """What is wrong with a round in which no update was finite. Single ones count as zero; all of them are a mistake.

    Where the run protects people it must go on all the same: one client more, whose update is finite, and it would not
    have stopped. Then only the operator is told, by the row.
    """
    local_only = row["local_only"]
    if not local_only["cohort"] or local_only["refused"] != local_only["cohort"]:
        return ""
    words = (
        f"all {local_only['cohort']} updates of round {row['round']} were NaN or infinite and counted as zero; "
        f"lower local.learning_rate={config.local.learning_rate:g} or check the data"
    )
    if protects:
        local_only["caution"] = f"{words} (the run goes on: that it stopped would tell about clients)"
    return words
