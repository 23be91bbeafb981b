"""What a user should hear before a run that is allowed, but hardly meant. In: a plan. Out: lines with the way out."""

from __future__ import annotations

from fedblur.accounting import PrivacyPlan
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
            f"R = {ratio:.2g}: the noise exceeds the largest possible signal and this will not learn; raise epsilon or "
            "sample_rate, or take a smaller model (fedblur plan compares)"
        )
    return lines
