"""Crashes: each command that writes is killed at each of its file operations; then a user follows the printed advice.

The user knows nothing but what a command prints. Wedged: the advice does not lead to a run that ended, or sends the
user away from a folder in which nothing was released. Underpaid: fewer spends in the ledgers than releases.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.sweeps.disk import Disk, Killed, Operation
from tests.sweeps.worlds import (
    AUDIT,
    CROWD,
    MACHINE,
    ONE_TRIAL,
    PROXY,
    SEARCH,
    Outcome,
    Releases,
    at_home,
    demand,
    fresh,
    invoke,
    model_round,
    shown_but_unpaid,
    spends,
    stopped,
    uncounted,
    write_files,
)

STEPS = 8  # that a user takes at most


@dataclass(frozen=True)
class Command:
    """A command that writes, and the world that it finds."""

    words: tuple[str, ...]  # W stands for the world's folder
    out: str  # what it makes
    before: Callable[[Path], None] = lambda world: None
    seeded: bool = False  # it ends with the same bytes, however often it is killed
    resumes: bool = False  # a user may also type `fedblur resume OUT` first

    def typed(self, world: Path) -> list[str]:
        return [word.replace("W/", f"{world}/") for word in self.words]


def _run(file: str, *more: str) -> tuple[str, ...]:
    return ("run", f"W/{file}", "--out", "W/out/run", *MACHINE, *more)


def _ended(world: Path) -> None:
    demand(["run", f"{world}/private.toml", "--out", f"{world}/out/run", *MACHINE])


def _crowded(world: Path) -> None:
    demand(["population", "budget", "crowd", "--epsilon", "200", "--delta", "1e-3"])


def _spent(world: Path) -> None:
    """A run of the crowd that was killed, with more reserved than it used."""
    _crowded(world)
    stopped(world, "private.toml", world / "out/run", by=Killed, population="crowd")


def _signing(world: Path) -> None:
    _ended(world)
    demand(["ledger", "key", f"{world}/operator"])


def _table(world: Path) -> None:
    demand(["table", f"{world}/table.toml", "--out", f"{world}/out/table", *MACHINE])


COMMANDS: dict[str, Command] = {
    "run, private": Command(_run("private.toml"), "out/run", resumes=True),
    "run, seeded": Command(_run("seeded.toml"), "out/run", seeded=True, resumes=True),
    "resume, private": Command(
        ("resume", "W/out/run", *MACHINE), "out/run", lambda world: stopped(world, "private.toml", world / "out/run")
    ),
    "resume, seeded": Command(
        ("resume", "W/out/run", *MACHINE),
        "out/run",
        lambda world: stopped(world, "seeded.toml", world / "out/run"),
        True,
    ),
    "resume, complete": Command(("resume", "W/out/run", *MACHINE), "out/run", _ended),
    "run, votes": Command(_run("votes.toml"), "out/run", resumes=True),
    "run, seeded votes": Command(_run("seeded-votes.toml"), "out/run", seeded=True, resumes=True),
    "table, seeded": Command(("table", "W/table.toml", "--out", "W/out/table", *MACHINE), "out/table", seeded=True),
    "table, private": Command(("table", "W/private-table.toml", "--out", "W/out/table", *MACHINE), "out/table"),
    "tune, private": Command(("tune", "W/private-grid.toml", "--out", "W/out/tuned", *MACHINE, *SEARCH), "out/tuned"),
    "tune, seeded": Command(
        ("tune", "W/grid.toml", "--out", "W/out/tuned", *MACHINE, *SEARCH), "out/tuned", seeded=True
    ),
    "tune, proxy": Command(("tune", "W/grid.toml", "--out", "W/out/tuned", *MACHINE, *PROXY), "out/tuned", seeded=True),
    "audit": Command(("audit", "W/private.toml", "--out", "W/out/audit", *MACHINE, *AUDIT), "out/audit"),
    "statement": Command(("statement", "W/out/run"), "out/run", _ended),
    "report": Command(("report", "W/out/run"), "out/run", _ended),
    "run, of a population": Command(_run("private.toml", *CROWD), "out/run", _crowded, resumes=True),
    "resume, of a population": Command(("resume", "W/out/run", *MACHINE), "out/run", _spent),
    "tune, of a population": Command(
        ("tune", "W/private-grid.toml", "--out", "W/out/tuned", *MACHINE, *ONE_TRIAL, *CROWD), "out/tuned", _crowded
    ),
    "population budget": Command(
        ("population", "budget", "crowd", "--epsilon", "300", "--delta", "1e-3"), "people", _spent
    ),
    "population reconcile": Command(("population", "reconcile", "crowd", "W/out/run"), "people", _ended),
    "population close": Command(("population", "close", "W/out/run"), "people", _spent),
    "ledger key": Command(("ledger", "key", "W/out/operator"), "out", lambda world: (world / "out").mkdir()),
    "ledger sign": Command(("ledger", "sign", "W/out/run", "--key", "W/operator"), "out/run", _signing),
    "ledger seal": Command(("ledger", "seal", "W/out/run", "--out", "W/out/seal"), "out/run", _ended),
    "deploy init": Command(
        ("deploy", "init", "W/out/federation", "--host", "localhost", "--clients", "2"), "out/federation"
    ),
    "results --pack": Command(("results", "W/out/table", "--pack"), "out/table", _table),
}


@dataclass(frozen=True)
class Point:
    """One crash: the operation of a command, and how it fails."""

    command: str
    at: int
    mode: str
    first: str = "again"  # what the user types first: the same command, or `resume`

    @property
    def group(self) -> str:
        return self.command

    @property
    def name(self) -> str:
        return f"{self.command} @{self.at} {self.mode} ({self.first})"


class Crashes:
    """The crash sweep in a scratch folder."""

    def __init__(self, scratch: Path, commands: Sequence[str] = tuple(COMMANDS)) -> None:
        self.scratch = scratch.resolve()
        self.commands = commands
        self.world = self.scratch / "world"
        self.expected: dict[str, dict[str, bytes]] = {}
        self.operations: list[Operation] = []  # of the last command

    def points(self) -> list[Point]:
        """Return every crash point, after running each command once undisturbed."""
        points = []
        for name in self.commands:
            command = COMMANDS[name]
            kept = self._kept(name)
            fresh(kept, self.world)
            disk = Disk(self.world)
            with at_home(self.world), disk.active():
                demand(command.typed(self.world))
            self.operations = disk.operations
            self.expected[name] = _models(self.world / command.out)
            for at, operation in enumerate(disk.operations):
                for number, mode in enumerate(operation.modes()):
                    first = "resume" if command.resumes and (at + number) % 2 else "again"
                    points.append(Point(name, at, mode, first))
        return points

    def around(self, part: str, reach: int = 3) -> set[int]:
        """Return the numbers of the last command's operations near those on such a file."""
        near = (at for at, operation in enumerate(self.operations) if part in operation.path)
        return {number for at in near for number in range(at - reach, at + reach)}

    def _kept(self, name: str) -> Path:
        """Return the world that a command finds, made once."""
        kept = self.scratch / "kept" / re.sub(r"\W+", "-", name)
        if not kept.exists():
            shutil.rmtree(self.world, ignore_errors=True)
            write_files(self.world)
            with at_home(self.world):
                COMMANDS[name].before(self.world)
            shutil.copytree(self.world, kept)
        return kept

    def judge(self, point: Point) -> tuple[str, str] | None:
        """Crash at a point and follow the advice; return what is wrong, as (kind, words), or None."""
        with at_home(self.world):
            return self._judge(point)

    def _judge(self, point: Point) -> tuple[str, str] | None:
        command, out = COMMANDS[point.command], self.world / COMMANDS[point.command].out
        fresh(self._kept(point.command), self.world)
        releases, model = Releases(), model_round(out)
        disk = Disk(self.world, point.at, point.mode)
        typed, said = command.typed(self.world), ""
        with releases.counted():
            try:
                with disk.active():
                    outcome = invoke(typed)
            except Killed:
                outcome = None
            if not disk.reached:
                return "not reached", "the number of trials is random: this command had fewer operations"
            if wrong := [*releases.underpaid(), *shown_but_unpaid(self.world), *uncounted(self.world)]:
                return "underpaid", "; ".join(wrong)
            if outcome is not None and not _good(outcome):
                if poor := _poor(outcome):
                    return poor
                said = outcome.said
            following = [typed] if outcome is None else []
            if point.first == "resume" and outcome is None:
                following = [["resume", str(out), *MACHINE]]
            ended = outcome is not None and _good(outcome)
            steps = []
            now = following[0] if following else typed
            if not ended and not following:
                advised = self._advised(said, typed, now)
                if advised is None:
                    return "wedged", f"no advice in: {said}"
                now = advised
            while not ended:
                steps.append(" ".join(now).replace(str(self.world), "W"))
                if len(steps) > STEPS:
                    return "wedged", f"{len(steps)} steps: {'; '.join(steps[-3:])}: {said}"
                outcome = invoke(now)
                if wrong := [*releases.underpaid(), *uncounted(self.world)]:
                    return "underpaid", "; ".join(wrong)
                if model_round(out) < model:
                    return "silently wrong", f"a model of round {model} became one of {model_round(out)}"
                model = model_round(out)
                if _good(outcome):
                    break
                if poor := _poor(outcome):
                    return poor
                said = outcome.said
                if elsewhere := self._needless(said, out):
                    return "wedged", elsewhere
                advised = self._advised(said, typed, now)
                if advised is None:
                    return "wedged", f"no advice in: {said}"
                now = advised
        return self._judge_end(point, command, said)

    def _needless(self, said: str, out: Path) -> str:
        """Return why the advice to start elsewhere is wrong: nothing was released here."""
        if "another --out" not in said and "start a new run" not in said:
            return ""
        ledgers = [*out.rglob("ledger*.jsonl")] if out.exists() else []
        if ("the budget is spent" in said and "tuned" not in str(out)) or "the winner of a search" in said:
            return "" if any(spends(path) for path in ledgers) else f"sent away with empty ledgers: {said}"
        return f"sent away: {said}"

    def _advised(self, said: str, typed: list[str], now: list[str]) -> list[str] | None:
        """Return the command that a message tells the user to type; files that it says to delete are deleted."""
        if found := re.search(r"(?:go on with|start it again): fedblur (.+?)$", said):
            return [*found[1].split(), *MACHINE]
        if (
            "another --out" in said
            or "start a new run" in said
            or ("choose another folder" in said and "free space" not in said)
        ):
            turn = typed.index("--out") + 1 if "--out" in typed else None
            if turn is None:  # a resumed run: it was begun by `run`
                return [
                    "run",
                    f"{self.world}/{'seeded' if 'seeded' in said else 'private'}.toml",
                    "--out",
                    f"{self.world}/out/new",
                    *MACHINE,
                ]
            return [*typed[:turn], typed[turn] + "-new", *typed[turn + 1 :]]
        if "choose another name" in said:
            return [*typed[:-1], typed[-1] + "-new"]
        if found := re.search(r"(\S+) (?:cannot be read|does not name|holds no)[^;]*; delete it", said):
            Path(found[1]).unlink()
            return now
        if "free space and resume" in said and typed[0] == "run":
            return ["resume", typed[typed.index("--out") + 1], *MACHINE]
        again = (
            "free space",
            "run the same",
            "rerun the command",
            "fedblur run has written",
            "No space left",
            "run again",
        )
        return typed if any(words in said for words in again) else None

    def _judge_end(self, point: Point, command: Command, said: str) -> tuple[str, str] | None:
        out = self.world / command.out
        if command.seeded and "another --out" not in said:
            found = _models(out)
            if found != self.expected[point.command]:
                names = [
                    name
                    for name in {*found, *self.expected[point.command]}
                    if found.get(name) != self.expected[point.command].get(name)
                ]
                return "silently wrong", f"other models than undisturbed: {names}"
        for config in sorted(self.world.glob("out/**/config.json")):
            if not (config.parent / "summary.json").exists() or "local-only" in str(config):
                continue
            if "the budget is spent" in said and config.parent == out:
                continue
            checked = invoke(["ledger", "verify", str(config.parent)])
            if checked.bug:
                return "traceback", checked.bug
            if checked.status != 0:
                return "silently wrong", f"after all: {checked.said}"
        left = [
            path.name
            for path in self.world.rglob(".*.tmp")
            if out in path.parents and point.command[:3] in ("run", "res", "tun")
        ]
        return ("wedged", f"temporary files stay: {left}") if left else None


def _good(outcome: Outcome) -> bool:
    """Return whether a command did what it should; an audit's attack may succeed by chance."""
    return not outcome.bug and (outcome.status == 0 or (outcome.status == 1 and "Results:" in outcome.out))


def _poor(outcome: Outcome) -> tuple[str, str] | None:
    """Return what is wrong with how a command failed."""
    if outcome.bug or outcome.status == 70:
        return "traceback", outcome.bug or outcome.said
    errors = [
        line for line in outcome.err.splitlines() if line.startswith(("error: ", "stopped: "))
    ]  # others are notes
    if outcome.status not in (1, 2, 130) or (len(errors) != 1 and outcome.status != 1):
        return "traceback", f"status {outcome.status}: {outcome.err}"
    return None


def _models(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("model.safetensors")}
