"""`python -m tests.docs.renew PAGE`: write what console blocks print now where a page shows something else.

A block that still fits, by its own …, stays as it is; look at the difference before you commit it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.docs import running
from tests.docs.blocks import ROOT, read_blocks


def renew(page: str, folder: Path) -> int:
    """How many outputs were replaced."""
    changes: list[tuple[str, str]] = []
    strict = running.compare

    def lenient(shown: str, printed: str, where: str) -> None:
        try:
            strict(shown, printed, where)
        except AssertionError:
            changes.append((shown, "\n".join(line.rstrip() for line in printed.strip("\n").splitlines()) + "\n"))

    running.compare = lenient
    try:
        running.PageRun(folder).follow(read_blocks(page))
    finally:
        running.compare = strict
    text = (ROOT / page).read_text()
    for shown, printed in changes:
        text = text.replace(shown, printed, 1)
    (ROOT / page).write_text(text)
    return len(changes)


if __name__ == "__main__":
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", "MPLBACKEND": "Agg", "FEDBLUR_TIMING": "off"}
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        os.environ["FEDBLUR_POPULATIONS"] = f"{name}/populations"
        Path("examples").symlink_to(ROOT / "examples")
        sys.path.insert(0, name)
        print(renew(sys.argv[1], Path(name)), "outputs replaced")
