"""Words for settings on a page: the paper's symbols instead of configuration keys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

SYMBOLS = {
    "epsilon": "ε",
    "partition.alpha": "α",
    "partition.samples_per_client": "images a user",
    "clients": "N",
    "method.lus.sparsity": "c",
    "method.blur.strength": "λ",
    "local.steps": "Q",
    "sample_rate": "p",
    "server.learning_rate": "server step",
    "server.schedule": "schedule",
    "method.gce.power": "q",
    "rounds": "T",
    "clip_norm": "S",
    "seed": "seed",
}


def symbol(axis: str) -> str:
    """Return `ε` for `epsilon`; other keys stay as they are."""
    return SYMBOLS.get(axis, axis)


def number(value: Any) -> str:
    """Write a setting's value as short as possible."""
    if isinstance(value, float | int) and not isinstance(value, bool):
        return "∞" if value == float("inf") else f"{value:g}"
    return str(value)


def in_order(values: Iterable[Any]) -> list[tuple[float, str]]:
    """Return a key to sort settings by: what is not set first, then numbers by size, then words."""
    found = []
    for value in values:
        size = -math.inf if value is None else float(value) if isinstance(value, int | float) else math.inf
        found.append((size, value if isinstance(value, str) else ""))
    return found


def setting(axes: Mapping[str, Any]) -> str:
    """Write `ε = 2, c = 0.7`."""
    return ", ".join(f"{symbol(axis)} = {number(value)}" for axis, value in axes.items())


def listed(items: Iterable[str], last: str = "and") -> str:
    """Write `a, b and c`."""
    words = list(items)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}" if words else ""


def minutes(seconds: float) -> str:
    """Write `0.4`, `3.5`, `120`: GPU minutes as a page states them."""
    value = seconds / 60
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def row(cells: Iterable[str]) -> str:
    """Write one line of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def grid(header: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> str:
    """Write a Markdown table: the first columns aligned left, the others right."""
    names = list(header)
    rule = "|" + "|".join(":--" if column < left else "--:" for column in range(len(names))) + "|"
    return "\n".join([row(names), rule, *(row(cells) for cells in rows)])
