"""The table of planted bugs in docs/privacy.md. `python -m tests.planted.table` writes it; a test compares."""

from __future__ import annotations

from pathlib import Path

from tests.planted.bugs import BUGS
from tests.planted.catchers import CATCHERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "privacy.md"
BEGIN, END = "<!-- planted bugs: made by python -m tests.planted.table -->", "<!-- end of planted bugs -->"


def table() -> str:
    """One row for each bug: what is wrong, and every check that catches it."""
    lines = ["| planted bug | what it does | caught by |", "|---|---|---|"]
    for bug in BUGS:
        found = "; ".join(f"{CATCHERS[name].kind}: {CATCHERS[name].where}" for name in bug.catchers)
        lines.append(f"| {bug.name} | {bug.what} | {found} |")
    return "\n".join(lines)


def section(text: str) -> tuple[str, str, str]:
    """What stands before the table, the table, and what follows."""
    before, rest = text.split(BEGIN)
    middle, after = rest.split(END)
    return before, middle.strip(), after


if __name__ == "__main__":
    before, _, after = section(PAGE.read_text())
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
