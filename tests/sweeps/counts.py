"""The three parts of the sweeps, and their counts as a table."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sweeps.crashes import COMMANDS, Crashes
from tests.sweeps.damage import FOLDERS, Damage
from tests.sweeps.inputs import Inputs, inputs

Judge = Callable[[Any], tuple[str, str] | None]
KINDS = ("wedged", "underpaid", "traceback", "silently wrong", "unclear", "leaves files")
WORDS = {"crashes": "Crash points", "damage": "Damaged files", "inputs": "Odd inputs"}
_HEADER = "| | cases run | of | wedged | underpaid | tracebacks | silently wrong | unclear, or files left | on |"
_ROW = re.compile(
    r"^\| (crash points|damaged files|odd inputs): ([^|]+?) \| ([\d,]+(?: \| [\d,]+){6} \| [\d-]+) \|$", re.MULTILINE
)
MARKS = "<!-- counts of python -m tests.sweeps -->", "<!-- end of the counts -->"


def _crashes(scratch: Path, groups: Sequence[str] = tuple(COMMANDS)) -> tuple[list[Any], Judge]:
    crashes = Crashes(scratch, groups)
    return crashes.points(), crashes.judge


def _damage(scratch: Path, groups: Sequence[str] = tuple(FOLDERS)) -> tuple[list[Any], Judge]:
    damage = Damage(scratch, groups)
    return damage.cases(), damage.judge


def _inputs(scratch: Path, groups: Sequence[str] = ()) -> tuple[list[Any], Judge]:
    return [odd for odd in inputs() if not groups or odd.group in groups], Inputs(scratch).judge


PARTS: dict[str, Callable[..., tuple[list[Any], Judge]]] = {  # of a scratch folder, and groups: all by default
    "crashes": _crashes,
    "damage": _damage,
    "inputs": _inputs,
}


def chosen(cases: Sequence[Any], count: int | None, seed: int = 0) -> list[Any]:
    """Choose so many cases, in their order, about as many of each group; all by default."""
    if count is None or count >= len(cases):
        return list(cases)
    groups: dict[str, list[int]] = {}
    for index, case in enumerate(cases):
        groups.setdefault(case.group, []).append(index)
    lots, taken = random.Random(seed), list[int]()
    for left, group in zip(range(len(groups), 0, -1), sorted(groups.values(), key=len), strict=True):
        share = -(-(count - len(taken)) // left)
        taken += lots.sample(group, min(share, len(group)))
    return [cases[index] for index in sorted(taken)[:count]]


@dataclass
class Tally:
    """How many cases of a part were judged, and what was found, by group."""

    part: str
    there: Counter[str] = field(default_factory=Counter)  # cases that there are
    cases: Counter[str] = field(default_factory=Counter)
    findings: Counter[tuple[str, str]] = field(default_factory=Counter)  # (group, kind)
    first: dict[str, str] = field(default_factory=dict)  # kind: the first case

    def add(self, case: Any, finding: tuple[str, str] | None) -> bool:
        """Count a case; return whether it is the first of its kind in its group. One that was not reached is none."""
        if finding is not None and finding[0] == "not reached":
            return False
        self.cases[case.group] += 1
        if finding is None:
            return False
        self.findings[case.group, finding[0]] += 1
        self.first.setdefault(finding[0], case.name)
        return self.findings[case.group, finding[0]] == 1

    def line(self) -> str:
        """Return the counts in a line."""
        found = Counter(kind for (_, kind), count in self.findings.items() for _ in range(count))
        words = ", ".join(f"{found[kind]} {kind}" for kind in KINDS[: None if self.part == "inputs" else 4])
        first = "".join(f"; first {kind}: {name}" for kind, name in self.first.items())
        return f"{WORDS[self.part]}: {sum(self.cases.values()):,}; {words}{first}"


def renewed(page: str, tally: Tally, date: str) -> str:
    """Return the page with the rows of these groups renewed; other rows stay, and sums are taken again."""
    before, rest = page.split(MARKS[0])
    table, after = rest.split(MARKS[1])
    rows: dict[str, dict[str, list[str]]] = {words.lower(): {} for words in WORDS.values()}
    for part, group, cells in _ROW.findall(table):
        rows[part][group] = cells.replace(",", "").split(" | ")
    for group, count in tally.cases.items():
        found = [tally.findings[group, kind] for kind in KINDS]
        numbers = [count, tally.there[group], *found[:4], sum(found[4:])]
        rows[WORDS[tally.part].lower()][group] = [*map(str, numbers), date]
    lines = [_HEADER, "|---|" + "--:|" * 8]
    for words in WORDS.values():
        groups = rows[words.lower()]
        for group, (*cells, day) in sorted(groups.items()):
            lines.append(f"| {words.lower()}: {group} | {' | '.join(f'{int(cell):,}' for cell in cells)} | {day} |")
        if groups:
            sums = (sum(int(cells[column]) for cells in groups.values()) for column in range(7))
            lines.append(f"| **{words}, together** | {' | '.join(f'{number:,}' for number in sums)} | |")
    return f"{before}{MARKS[0]}\n\n" + "\n".join(lines) + f"\n\n{MARKS[1]}{after}"


def counted(page: str) -> dict[str, int]:
    """Read back how many cases a page reports, by part."""
    found = re.findall(r"\*\*(.+?), together\*\* \| ([\d,]+)", page)
    return {name: int(number.replace(",", "")) for name, number in found}
