"""A pytest plugin that measures the CPU seconds of each test, its processes included; wall time says how busy we were.

python -m pytest -p tools.suite_cost             appends a line a test to $SUITE_COST (build/suite_cost.jsonl)
python tools/suite_cost.py [FILE] [NUMBER]       prints the dearest tests, files and what each xdist group costs
python tools/suite_cost.py slow FILE...          writes tests/slow.txt: what `make test-fast` leaves out
"""

from __future__ import annotations

import collections
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SLOW_ONE, SLOW_ALL = 0.15, 0.7  # CPU seconds
LIST = Path("tests/slow.txt")
FILE = Path(os.environ.get("SUITE_COST", "build/suite_cost.jsonl"))


def spent() -> float:
    """Return the CPU seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def write(**line: object) -> None:
    """Append a line; workers share the file, so that each line is one write."""
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with FILE.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**line, "worker": os.environ.get("PYTEST_XDIST_WORKER", "main")}) + "\n")


def pytest_collection_finish() -> None:
    write(test="(start and collection)", when="setup", seconds=spent())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before, group = spent(), item.get_closest_marker("xdist_group")
    try:
        return (yield)
    finally:
        name = group and str(group.args[0] if group.args else group.kwargs["name"])
        write(test=item.nodeid.split("@")[0], seconds=round(spent() - before, 3), group=name)


def main(file: Path, number: int) -> None:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    tables: dict[str, collections.Counter[str]] = {
        "test": collections.Counter(), "file": collections.Counter(), "group": collections.Counter()
    }  # fmt: skip
    for line in lines:
        tables["test"][line["test"]] += line["seconds"]
        tables["file"][line["test"].split("::")[0]] += line["seconds"]
        tables["group"][line.get("group") or "(none)"] += line["seconds"]
    print(f"{sum(line['seconds'] for line in lines) / 60:.1f} CPU minutes, {len(tables['test'])} tests")
    for title, seconds in tables.items():
        print(f"\nCPU seconds by {title}")
        for name, each in seconds.most_common(number):
            print(f"{each:8.1f}  {name}")


def write_slow(files: list[Path]) -> None:
    """Name the test functions that took more than SLOW_ALL, or one of whose tests took more than SLOW_ONE.

    What was not measured stays as it was: whole files, too.
    """
    total, most = collections.Counter[str](), collections.Counter[str]()
    for line in (json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()):
        name = line["test"].partition("[")[0]
        total[name] += line["seconds"]
        most[name] = max(most[name], line["seconds"])
    kept = {line for line in LIST.read_text(encoding="utf-8").splitlines() if line[0] != "#" and line not in total}
    slow = sorted(kept) + sorted(
        name for name in total if "::" in name and (total[name] > SLOW_ALL or most[name] > SLOW_ONE)
    )
    head = "# make test-fast leaves these out. Written by python tools/suite_cost.py slow FILE..."
    LIST.write_text("\n".join([head, *slow]) + "\n", encoding="utf-8")
    print(f"{len(slow)} slow; the others took {sum(total.values()) - sum(total[name] for name in slow):.0f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["slow"]:
        write_slow([Path(name) for name in sys.argv[2:]])
        sys.exit()
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE, int(sys.argv[2]) if len(sys.argv) > 2 else 20)
