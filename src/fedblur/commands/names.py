"""Names that the shell can complete: whatever is registered, third parties' parts included."""

from __future__ import annotations

from collections.abc import Callable

from fedblur.config import REFERENCES
from fedblur.registry import Kind, parts


def complete(kind: Kind) -> Callable[[str], list[str]]:
    """The parts of a kind that begin with what was typed."""

    def found(incomplete: str) -> list[str]:
        return [name for name in sorted(parts(kind)) if name.startswith(incomplete)]

    return found


def complete_method(incomplete: str) -> list[str]:
    """Methods may be joined: after `blur+` any other one can follow."""
    before, plus, last = incomplete.rpartition("+")
    names = {*parts("method"), *(() if plus else ("dp-fedavg", *parts("voting"), *REFERENCES))}
    used = before.split("+")
    return [f"{before}{plus}{name}" for name in sorted(names) if name.startswith(last) and name not in used]


def complete_recipe(incomplete: str) -> list[str]:
    return [name for name in ("best",) if name.startswith(incomplete)]
