"""Who looks on while a run goes: a watcher gets each round's row as soon as it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
Watcher = Callable[[Row], None]


def with_header(header: str, tell: Callable[[str], None], watch: Watcher | None) -> Watcher:
    """Tells the header with the first round: a run that may not go on says why, and nothing else."""
    waiting = iter([header])

    def watching(row: Row) -> None:
        for text in waiting:
            tell(text)
        if watch is not None:
            watch(row)

    return watching
