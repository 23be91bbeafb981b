"""Run the sweeps: `python -m tests.sweeps --part crashes --count 500`. `--write` renews the table of docs/sweeps.md.

A case is repeated by its name: `python -m tests.sweeps --part damage --case "votes: out/run/config.json: flip #1003"`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.sweeps.counts import PARTS, Tally, chosen, renewed
from tests.sweeps.crashes import COMMANDS
from tests.sweeps.damage import FOLDERS


def main(arguments: list[str] | None = None) -> int:
    """Sweep, print the counts, and return 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweeps", description=__doc__)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--count", type=int, help="so many cases of each part, chosen by --seed (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group", action="append", help="the cases of one group: a command, or a folder (repeatable)")
    parser.add_argument("--case", help="one case, by its name")
    parser.add_argument("--write", type=Path, help="a page whose table is renewed, a row after each group")
    parser.add_argument("--all-findings", action="store_true", help="print every finding, not the first of each kind")
    options = parser.parse_args(arguments)
    known = {"crashes": COMMANDS, "damage": FOLDERS}.get(options.part, options.group)
    if options.group and (options.part == "all" or not set(options.group) <= set(known)):
        parser.error(f"--group {options.group!r} needs --part, and one of its groups: {', '.join(known)}")
    if options.write and options.case:
        parser.error("--write needs the cases of a group; leave out --case")
    os.environ["HF_HUB_OFFLINE"] = "1"  # no sweep reaches for the network
    os.environ["FEDBLUR_TIMING"] = "off"
    console, tallies = Console(soft_wrap=True), []
    memory = Path("/dev/shm")  # a disk in memory saves half of the time
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        os.environ["FEDBLUR_CACHE"] = str(Path(scratch) / "cache")
        for part in PARTS if options.part == "all" else [options.part]:
            cases, judge = PARTS[part](Path(scratch) / part, *([options.group] if options.group else []))
            if options.case:
                cases = [case for case in cases if case.name == options.case]
                if not cases:
                    parser.error(f"no case of {part} is called {options.case!r}")
            tally = Tally(part, Counter(case.group for case in cases))
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
                todo = chosen(cases, options.count, options.seed)
                for number, case in enumerate(progress.track(todo, description=part)):
                    finding = judge(case)
                    new = tally.add(case, finding)
                    if finding is not None and finding[0] != "not reached" and (new or options.all_findings):
                        console.print(f"{case.name}: {finding[0]}: {finding[1]}", markup=False, highlight=False)
                    ends = number + 1 == len(todo) or todo[number + 1].group != case.group
                    if options.write and ends:
                        page = options.write.read_text(encoding="utf-8")
                        today = datetime.now(UTC).date().isoformat()
                        options.write.write_text(renewed(page, tally, today), encoding="utf-8")
            tallies.append(tally)
            console.print(tally.line(), markup=False, highlight=False)
    return int(any(tally.findings for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())
