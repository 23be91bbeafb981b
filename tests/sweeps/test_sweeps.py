"""The sweeps: a sample of each part in every `make test`, the whole in `make test-long`."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sweeps import worlds
from tests.sweeps.__main__ import main
from tests.sweeps.counts import MARKS, PARTS, Tally, chosen, counted, renewed
from tests.sweeps.crashes import Crashes, Point
from tests.sweeps.damage import Case, Damage, damage
from tests.sweeps.disk import Disk, Killed, Operation, snapshot
from tests.sweeps.inputs import Inputs, inputs
from tests.sweeps.worlds import MACHINE, invoke, write_files

PAGE = Path(__file__).resolve().parents[2] / "docs/sweeps.md"
COMMANDS = ("run, private", "resume, seeded", "run, votes", "tune, seeded")
FOLDERS = ("private run, stopped", "search, complete", "table, packed")


def sweep(part: str, cases: list[Any], judge: Callable[[Any], tuple[str, str] | None]) -> None:
    """Judge cases; fail with what was found first."""
    tally, found = Tally(part), []
    for case in cases:
        finding = judge(case)
        tally.add(case, finding)
        if finding is not None and finding[0] != "not reached":
            found.append(f"{case.name}: {finding[0]}: {finding[1]}")
    assert not found, f"{tally.line()}\n{found[0]}"


def test_crashes__a_sample_of_points(tmp_path: Path) -> None:
    crashes = Crashes(tmp_path, COMMANDS)
    sweep("crashes", chosen(crashes.points(), 24, seed=1), crashes.judge)


def test_damage__a_sample_of_files(tmp_path: Path) -> None:
    damaged = Damage(tmp_path, FOLDERS)
    sweep("damage", chosen(damaged.cases(), 40, seed=1), damaged.judge)


def test_crashes__a_power_failure_takes_nothing_that_was_released(tmp_path: Path) -> None:
    crashes = Crashes(tmp_path, ("run, private",))
    failures = [point for point in crashes.points() if point.mode in ("power", "names")]
    sweep("crashes", failures[4::9], crashes.judge)


def test_crashes__labels_are_paid_for_before_they_are_written(tmp_path: Path) -> None:
    crashes = Crashes(tmp_path, ("run, votes",))
    around = [point for point in crashes.points() if point.mode == "before" and point.at in crashes.around("ledger")]
    sweep("crashes", around, crashes.judge)


def test_inputs__a_sample(tmp_path: Path) -> None:
    sweep("inputs", chosen(inputs(), 120, seed=1), Inputs(tmp_path).judge)


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_sweep__whole(tmp_path: Path, part: str) -> None:
    sweep(part, *PARTS[part](tmp_path))


def test_inputs__have_names_of_their_own() -> None:
    names = [odd.name for odd in inputs()]
    assert len(set(names)) == len(names) >= 500


# --- the simulated disk ---


def test_disk__sees_every_change_of_a_run(tmp_path: Path) -> None:
    """Between two operations nothing changes: whatever writes past the disk is found."""
    world = tmp_path.resolve() / "world"
    write_files(world)
    kept = [snapshot(world)]
    changed = []

    class Watched(Disk):
        def _step(self, kind: str, path: str, act: Any, half: Any = None) -> Any:
            if snapshot(world) != kept[-1]:
                changed.append(f"before {kind} {path}")
            result = super()._step(kind, path, act, half)
            kept.append(snapshot(world))
            return result

    with Watched(world).active():
        assert invoke(["run", f"{world}/private.toml", "--out", f"{world}/out/run", *MACHINE]).status == 0
    assert changed == []
    assert snapshot(world) == kept[-1]
    assert len(kept) > 50


@pytest.mark.parametrize(
    ("mode", "left"),
    [("before", b"old"), ("torn", b"oldne"), ("after", b"oldnew!"), ("power", b""), ("full", b"oldne")],
)
def test_disk__a_write_that_fails_leaves(tmp_path: Path, mode: str, left: bytes) -> None:
    path = tmp_path.resolve() / "file"
    disk = Disk(tmp_path.resolve(), 2, mode)
    with disk.active():
        handle = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.write(handle, b"old")
        try:
            assert os.write(handle, b"new!") == 2
            with pytest.raises(OSError, match="space"):
                os.write(handle, b"w!")
        except Killed:
            with pytest.raises(Killed):
                os.unlink(path)
        os.close(handle)
    assert path.read_bytes() == left


@pytest.mark.parametrize(("synced", "left"), [(False, b"old"), (True, b"new")])
def test_disk__a_name_that_was_not_synced_is_lost_with_the_power(tmp_path: Path, synced: bool, left: bytes) -> None:
    folder = tmp_path.resolve()
    (folder / "a").write_bytes(b"old")
    disk = Disk(folder, 5 if synced else 4, "names")
    with contextlib.suppress(Killed), disk.active():
        handle = os.open(folder / "b", os.O_WRONLY | os.O_CREAT)  # 0
        os.write(handle, b"new")  # 1
        os.fsync(handle)  # 2
        os.close(handle)
        os.replace(folder / "b", folder / "a")  # 3
        if synced:
            handle = os.open(folder, os.O_RDONLY)
            os.fsync(handle)  # 4
            os.close(handle)
        os.unlink(folder / "a")
    assert disk.dead
    assert (folder / "a").read_bytes() == left


def test_operation__fails_in_the_ways_that_it_can() -> None:
    assert "torn" in Operation("write", "x").modes()
    assert "full" not in Operation("fsync", "x").modes()
    assert "torn" not in Operation("unlink", "x").modes()


def test_damage__leaves_another_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    (tmp_path / "b.json").write_text('{"b": 2}')
    for kind in ("flip", "edit", "cut", "garbage", "not UTF-8", "other", "empty", "missing", "folder", "loop"):
        path.write_text('{"a": 12345, "c": [1.5]}')
        damage(path, kind, random.Random(3), tmp_path)
        assert not path.is_file() or path.read_bytes() != b'{"a": 12345, "c": [1.5]}', kind
        if path.is_dir():
            (path / "inside").unlink()
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs alarms")
@pytest.mark.parametrize(
    "act", [lambda: time.sleep(60), lambda: [x for x in iter(int, 1) if x]], ids=["waits", "computes"]
)
def test_invoke__ends_what_does_not_end(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    monkeypatch.setattr(worlds, "HANG", 1)
    monkeypatch.setattr(worlds.CliRunner, "invoke", lambda *given: act())
    assert invoke([]).bug.startswith("it hangs")


# --- the page ---


def test_page__reports_what_issue_25_asks_for() -> None:
    page = PAGE.read_text(encoding="utf-8")
    found = counted(page)
    assert found["Crash points"] >= 2000
    assert found["Damaged files"] >= 5000
    assert found["Odd inputs"] >= 500
    rows = re.findall(r"^\| .+? \| [\d,]+ \| [\d,]+ \| (\d+(?: \| \d+){4}) \| [\d-]* ?\|$", page, re.MULTILINE)
    assert len(rows) > 30
    assert {*rows} == {"0 | 0 | 0 | 0 | 0"}


def test_page__a_table_is_renewed_between_its_marks() -> None:
    tally = Tally("damage", Counter(votes=5, table=9))
    assert not tally.add(Case("votes", "x", "flip", 1), None)
    assert tally.add(Case("votes", "x", "flip", 2), ("traceback", "…"))
    before = f"{MARKS[0]}\n| damaged files: table | 40 | 41 | 0 | 0 | 0 | 0 | 0 | 2026-01-01 |\n{MARKS[1]}"
    page = renewed(before, tally, "2026-01-02")
    assert "| damaged files: votes | 2 | 5 | 0 | 0 | 1 | 0 | 0 | 2026-01-02 |" in page
    assert "| damaged files: table | 40 | 41 | 0 | 0 | 0 | 0 | 0 | 2026-01-01 |" in page
    assert counted(page) == {"Damaged files": 42}
    assert renewed(page, tally, "2026-01-02") == page


def test_page__holds_rows_of_the_sweeps_alone() -> None:
    """Rows of other tables once landed between the marks, and stayed there."""
    row = "| odd inputs: tables | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 2026-01-01 |"
    stray = f"{MARKS[0]}\n\n| command | what it does |\n{row}\n{MARKS[1]}"
    tally = Tally("crashes")
    tally.add(Point("audit", 0, "before"), None)
    table = renewed(stray, tally, "2026-01-01").splitlines()
    assert [line.split(" | ")[0] for line in table if line.startswith("| ") and "cases" not in line] == [
        "| crash points: audit",
        "| **Crash points, together**",
        "| odd inputs: tables",
        "| **Odd inputs, together**",
    ]


def test_page__says_how_many_cases_there_are_beside_those_that_were_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("\n".join(MARKS))
    assert main(["--part", "inputs", "--group", "arrays", "--count", "3", "--write", str(page)]) == 0
    there = sum(odd.group == "arrays" for odd in inputs())
    assert f"| odd inputs: arrays | 3 | {there:,} | 0 | 0 | 0 | 0 | 0 |" in page.read_text()
