"""Whether a tuned table uses the best cells of the table that tuned it. In: a document. Out: a sentence.

Tuning cells are judged on validation clients; the tuned table's cells must have the settings of the best one for their
method and epsilon. Until every tuning cell of a group is measured, the choice is provisional and says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from fedblur.core.config import Config, canonical, differences, to_dict
from fedblur.experiments.result_store import Result
from fedblur.experiments.table_spec import Cell
from papers.rendering.document import Document

_FREE = {"seed", "evaluate", "eval_every", "checkpoint_every"}  # how a cell is looked at, not what it is


@dataclass(frozen=True)
class TuningState:
    """The progress of the tuning, and where the tuned table departs from it."""

    by: str
    measured: int
    wanted: int
    wrong: tuple[str, ...]  # one line for each setting that is not the best one's

    @property
    def provisional(self) -> bool:
        return self.measured < self.wanted

    def __str__(self) -> str:
        if self.provisional:
            done = f"{self.measured} of {self.wanted} tuning cells of `{self.by}` are measured"
            return f"PROVISIONAL: {done}; these settings were not chosen by it yet."
        if self.wrong:
            return f"NOT THE BEST of `{self.by}`: {'; '.join(self.wrong)}."
        return f"Settings are the best of `{self.by}` for each method and epsilon ({self.wanted} cells)."


def tuning_state(document: Document, name: str) -> TuningState:
    """Return the state of one tuned table."""
    by = document.tuning[name]
    groups: dict[str, list[Cell]] = {}
    for cell in document.spec(by).cells:
        groups.setdefault(_contest(cell.config), []).append(cell)
    wanted = {_contest(cell.config): cell for cell in document.spec(name).cells}
    found = document.results.found
    cells = [cell for contest in wanted for cell in groups.get(contest, [])]
    wrong = [
        line
        for contest, cell in wanted.items()
        if all(other.key in found for other in groups.get(contest, []))
        for line in _departures(cell, _best(groups.get(contest, []), found))
    ]
    return TuningState(by, sum(cell.key in found for cell in cells), len(cells), tuple(wrong))


def _contest(config: Config) -> str:
    """Return the contest of a cell: equal methods and an equal epsilon compete."""
    return canonical([to_dict(config)["method"], config.epsilon])


def _best(cells: list[Cell], found: Mapping[str, Result]) -> Cell | None:
    return max(cells, key=lambda cell: float(found[cell.key]["accuracy"]), default=None)


def _departures(cell: Cell, best: Cell | None) -> list[str]:
    if best is None:
        return [f"{cell.group}: nothing tunes it"]
    now, then = (json.loads(canonical(to_dict(config))) for config in (cell.config, best.config))
    changed = [line for line in differences(now, then) if line.split(":")[0].split(".")[0] not in _FREE]
    return [f"{cell.group}: {line}" for line in changed]
