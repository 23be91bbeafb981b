"""An ε as text: never smaller than it is."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context, Decimal


def rounded_up(value: float | None) -> str:
    """Return an ε with three decimals, rounded up exactly."""
    if value is None:
        return "no bound"
    if not math.isfinite(value):
        return "∞"
    return str(Decimal(value).quantize(Decimal("0.001"), ROUND_CEILING, Context(prec=400)))


def in_short(value: float | None, digits: int = 3) -> str:
    """Return an ε with so many significant digits, rounded up exactly, without trailing zeros."""
    if value is None:
        return "no bound"
    if not math.isfinite(value):
        return "∞"
    return f"{float(Context(digits, ROUND_CEILING).create_decimal(Decimal(value))):.{digits}g}"
