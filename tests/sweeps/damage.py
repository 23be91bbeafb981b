"""Damage: each file of a finished, stopped or killed run, table, search and audit is damaged; every command reads it.

A command may refuse, in one line. If it succeeds, what it shows of ε, N, σ, accuracy and who is protected is the truth,
or `fedblur ledger verify` reports the damage; a model is the one that an undisturbed run ends with; and the ledgers
hold at least as many spends as there were releases.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from fedblur.core.files import MOST_BYTES
from fedblur.experiments import search_runner
from tests.sweeps.disk import Disk, Killed
from tests.sweeps.worlds import (
    AUDIT,
    CROWD,
    MACHINE,
    SEARCH,
    Outcome,
    Releases,
    at_home,
    demand,
    fresh,
    invoke,
    spends,
    stopped,
    write_files,
)

KINDS = (
    "flip",
    "edit",
    "cut",
    "garbage",
    "not UTF-8",
    "other",
    "type",
    "empty",
    "missing",
    "huge",
    "deep",
    "folder",
    "loop",
    "pipe",
)
_OFTEN = {"flip": 16, "edit": 16, "cut": 6, "garbage": 5, "not UTF-8": 3, "other": 3, "type": 3}
_LARGEST = {".safetensors": 2**36}  # what a reader accepts


@dataclass(frozen=True)
class Made:
    """A folder that is damaged, and the commands that read it."""

    make: Callable[[Path], None]
    readers: tuple[tuple[str, ...], ...]
    folder: str = "out"  # whose files are damaged
    private: bool = False  # each release is another


def _typed(text: str) -> tuple[str, ...]:
    words: list[str] = []
    for word in text.split():
        words += {"MACHINE": MACHINE, "AUDIT": AUDIT, "SEARCH": SEARCH, "CROWD": CROWD}.get(word, [word])
    return tuple(words)


_RUN = (
    "ledger verify W/out/run",
    "ledger show W/out/run --json",
    "statement W/out/run --json",
    "report W/out/run --json",
)
_RUNS_ON = ("resume W/out/run --json MACHINE",)


def _readers(*lines: str) -> tuple[tuple[str, ...], ...]:
    return tuple(_typed(line) for line in lines)


def _finish(file: str) -> Callable[[Path], None]:
    return lambda world: void(demand(["run", f"{world}/{file}", "--out", f"{world}/out/run", *MACHINE]))


def void(value: object) -> None:
    """Drop a value."""


def _killed(world: Path) -> None:
    stopped(world, "seeded.toml", world / "out/run", by=Killed)


def _table(world: Path) -> None:
    demand(["table", f"{world}/table.toml", "--out", f"{world}/out/table", *MACHINE])


def _packed(world: Path) -> None:
    _table(world)
    demand(["results", f"{world}/out/table", "--pack"])


def _search(file: str, operations: int | None = None) -> Callable[[Path], None]:
    def make(world: Path) -> None:
        words = ["tune", f"{world}/{file}", "--out", f"{world}/out/tuned", *MACHINE, *SEARCH]
        disk = Disk(world, operations)
        with contextlib.suppress(Killed), disk.active():
            demand(words)

    return make


def _unreleased(world: Path) -> None:
    """A search of which all trials are scored, and that was killed before it released the best."""
    with mock.patch.object(search_runner, "_release", side_effect=Killed), contextlib.suppress(Killed):
        demand(["tune", f"{world}/grid.toml", "--out", f"{world}/out/tuned", *MACHINE, *SEARCH])


def _crowded(world: Path) -> None:
    """Two runs of a population with a budget, which has room for one more."""
    demand(["population", "budget", "crowd", "--epsilon", "30", "--delta", "1e-3"])
    for name in ("run", "other"):
        demand(["run", f"{world}/private.toml", "--out", f"{world}/out/{name}", *MACHINE, *CROWD])


def _audited(world: Path) -> None:
    _finish("private.toml")(world)
    invoke(["audit", f"{world}/out/run", *MACHINE, *AUDIT])


def _again(file: str) -> str:
    return f"run W/{file} --out W/out/run --json MACHINE"


_TUNED = (
    "ledger verify W/out/tuned",
    "ledger show W/out/tuned --json",
    "statement W/out/tuned --json",
    "report W/out/tuned --json",
)
FOLDERS: dict[str, Made] = {
    "private run, complete": Made(
        _finish("private.toml"), _readers(*_RUN, *_RUNS_ON, _again("private.toml"), *_RUN[:1]), private=True
    ),
    "private run, stopped": Made(
        lambda world: stopped(world, "private.toml", world / "out/run"),
        _readers(*_RUN, *_RUNS_ON, _again("private.toml"), *_RUN[:1]),
        private=True,
    ),
    "seeded run, complete": Made(_finish("seeded.toml"), _readers(*_RUN, *_RUNS_ON, *_RUN[:1])),
    "seeded run, stopped": Made(
        lambda world: stopped(world, "seeded.toml", world / "out/run", 2), _readers(*_RUN, *_RUNS_ON, *_RUN[:3])
    ),
    "seeded run, killed": Made(_killed, _readers(*_RUN[:2], *_RUNS_ON, *_RUN[:3])),
    "votes": Made(_finish("seeded-votes.toml"), _readers(*_RUN, *_RUNS_ON, *_RUN[:1])),
    "table": Made(
        _table,
        _readers(
            "results W/out/table --json",
            "report W/out/table --json",
            "table W/table.toml --out W/out/table --json MACHINE",
            "results W/out/table --json",
        ),
    ),
    "table, packed": Made(
        _packed,
        _readers("results W/out/table --json", "table W/table.toml --out W/out/table --json MACHINE"),
        "out/table/results",
    ),
    "search, complete": Made(
        _search("private-grid.toml"),
        _readers(*_TUNED, "tune W/private-grid.toml --out W/out/tuned --json MACHINE SEARCH", *_TUNED[:3]),
        private=True,
    ),
    "search, killed": Made(
        _search("grid.toml", 60),
        _readers(
            "ledger show W/out/tuned --json", "tune W/grid.toml --out W/out/tuned --json MACHINE SEARCH", *_TUNED[:3]
        ),
    ),
    "search, not released": Made(
        _unreleased, _readers("tune W/grid.toml --out W/out/tuned --json MACHINE SEARCH", *_TUNED[:3])
    ),
    "population": Made(
        _crowded,
        _readers(
            "population show crowd --json",
            "population list --json",
            "population reconcile crowd --json",
            "run W/private.toml --out W/out/third --json MACHINE CROWD",
            "run W/private.toml --out W/out/fourth --json MACHINE CROWD",
            "population show crowd --json",
        ),
        "people",
        private=True,
    ),
    "run, audited": Made(
        _audited,
        _readers("audit W/out/run --json MACHINE AUDIT", "statement W/out/run --json", "report W/out/run --json"),
        "out/run/audit",
        private=True,
    ),
}


@dataclass(frozen=True)
class Case:
    """One damaged file."""

    folder: str
    file: str
    kind: str
    seed: int

    @property
    def group(self) -> str:
        return self.folder

    @property
    def name(self) -> str:
        return f"{self.folder}: {self.file}: {self.kind} #{self.seed}"


class Damage:
    """The damage sweep in a scratch folder."""

    def __init__(self, scratch: Path, folders: Sequence[str] = tuple(FOLDERS)) -> None:
        self.scratch = scratch.resolve()
        self.folders = folders
        self.world = self.scratch / "world"
        self.truth: dict[tuple[str, tuple[str, ...]], list[Any]] = {}
        self.models: dict[str, dict[str, bytes]] = {}
        self.paid: dict[str, int] = {}

    def cases(self) -> list[Case]:
        """Return every case; the folders are made here, and read undamaged."""
        cases = []
        for name in self.folders:
            made = FOLDERS[name]
            kept = self._kept(name)
            self._learn(name)
            files = sorted(
                path.relative_to(kept).as_posix() for path in (kept / made.folder).rglob("*") if path.is_file()
            )
            for number, file in enumerate(files):
                for kind in KINDS:
                    if kind in ("edit", "type", "deep") and not file.endswith((".json", ".jsonl", ".gz")):
                        continue
                    cases += [Case(name, file, kind, 1000 * number + i) for i in range(_OFTEN.get(kind, 1))]
        return cases

    def _kept(self, name: str) -> Path:
        kept = self.scratch / "kept" / re.sub(r"\W+", "-", name)
        if not kept.exists():
            shutil.rmtree(self.world, ignore_errors=True)
            write_files(self.world)
            with at_home(self.world):
                FOLDERS[name].make(self.world)
            shutil.copytree(self.world, kept)
        return kept

    def _learn(self, name: str) -> None:
        """Note what each command shows of the undamaged folder, and the models that it ends with."""
        fresh(self._kept(name), self.world)
        self.paid[name] = _spent(self.world)
        with at_home(self.world):
            outcomes = [invoke(self._words(words)) for words in FOLDERS[name].readers]
        assert not any(_bug(outcome) for outcome in outcomes), (name, outcomes)
        for words, outcome in zip(FOLDERS[name].readers, outcomes, strict=True):
            if outcome.status < 2:  # what is shown before a run goes on, and after that
                self.truth.setdefault((name, words), []).append(_facts(outcome))
        self.models[name] = _models(self.world)

    def _words(self, words: tuple[str, ...]) -> list[str]:
        return [word.replace("W/", f"{self.world}/") for word in words]

    def judge(self, case: Case) -> tuple[str, str] | None:
        """Damage a file and read it with every command; return what is wrong, as (kind, words), or None."""
        made = FOLDERS[case.folder]
        fresh(self._kept(case.folder), self.world)
        damage(self.world / case.file, case.kind, random.Random(case.name), self.world)
        before, noticed, releases = _models(self.world), False, Releases()
        with at_home(self.world), releases.counted():
            for words in made.readers:
                outcome = invoke(self._words(words))
                shown = " ".join(words[:2])
                if _bug(outcome):
                    return "traceback", f"{shown}: {outcome.bug or outcome.err}"
                noticed |= words[:2] == ("ledger", "verify") and outcome.status == 1
                noticed |= "it is not used" in outcome.err or "NOT VERIFIED" in outcome.out
                if wrong := self._underpaid(case, made, releases):
                    return "underpaid", f"{shown}: {wrong}"
                if outcome.status == 0 and (lie := self._lie(case, words, outcome)) and not noticed:
                    return "silently wrong", f"{shown}: {lie}"
                writes = words[0] in ("resume", "table", "tune", "run") and outcome.status == 0
                if writes and (wrong := self._other_models(case, before)):
                    return "silently wrong", f"{shown}: {wrong}"
        return None

    def _underpaid(self, case: Case, made: Made, releases: Releases) -> str:
        if not made.private:
            return "; ".join(releases.underpaid())
        new, paid = sum(map(len, releases.found.values())), _spent(self.world)
        new -= sum(len(names) for path, names in releases.found.items() if "-local-only" in str(path))
        whole = case.kind in ("missing", "folder", "loop", "pipe") and "ledger" in case.file
        if new and paid < self.paid[case.folder] + new and not (whole and "audit" in case.file):
            return f"{self.paid[case.folder]} releases and {new} new ones, {paid} in the ledgers"
        return ""

    def _lie(self, case: Case, words: tuple[str, ...], outcome: Outcome) -> str:
        found, truths = _facts(outcome), self.truth.get((case.folder, words), [])
        if found is None or not truths:
            return ""
        if isinstance(found, dict) and found.get("ledger_findings"):
            return ""
        again = words[0] in ("tune", "run") or (words[0] == "audit" and case.kind == "missing")
        if FOLDERS[case.folder].private and again:
            return ""  # a new one, with results of its own
        private = FOLDERS[case.folder].private and "stopped" in case.folder
        lies = ["; ".join(_differences(truth, found, skip=_FRESH if private else ())) for truth in truths]
        return min(lies, key=len)

    def _other_models(self, case: Case, before: dict[str, bytes]) -> str:
        expected, found = self.models[case.folder], _models(self.world)
        for path, content in found.items():
            if (
                "-local-only" in path
                or "/new" in path
                or (FOLDERS[case.folder].private and "complete" not in case.folder)
            ):
                continue
            if content != expected.get(path) and content != before.get(path):
                return f"{path} is another model than that of an undisturbed run"
        return ""


# --- damage ---


def damage(path: Path, kind: str, lots: random.Random, world: Path) -> None:
    """Damage a file."""
    data = path.read_bytes()
    place = lots.randrange(max(1, len(data)))
    if lots.random() < 0.5 and path.suffix == ".safetensors":
        place = lots.randrange(min(len(data), 400))  # its header
    others = sorted(other for other in world.rglob("*") if other.is_file() and other != path)
    changed: dict[str, Callable[[], bytes]] = {
        "flip": lambda: (
            data[:place] + bytes([data[place] ^ 1 << lots.randrange(8)]) + data[place + 1 :] if data else b""
        ),
        "edit": lambda: _edited(path, data, lots),
        "cut": lambda: data[:place],
        "garbage": lambda: data[:place] + lots.randbytes(lots.randint(1, 32)) + data[place + 16 :],
        "not UTF-8": lambda: data[:place] + b"\xff" + data[place + 1 :],
        "other": lambda: lots.choice(others).read_bytes(),
        "type": lambda: lots.choice([b"[]", b"3", b'"x"', b"null", b"true", b"{}", b"[{}]"]),
        "empty": lambda: b"",
        "deep": lambda: b'{"a":' * 100_000,
    }
    if kind in changed:
        path.write_bytes(changed[kind]())
        return
    path.unlink()
    if kind == "huge":
        with path.open("wb") as file:
            file.write(data)
            file.truncate(_LARGEST.get(path.suffix, MOST_BYTES) + 1)
    elif kind == "folder":
        path.mkdir()
        (path / "inside").write_text("x")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "pipe":
        os.mkfifo(path)


def _edited(path: Path, data: bytes, lots: random.Random) -> bytes:
    """Change one value of a JSON file, as a person with an editor does."""
    if path.suffix == ".gz":
        return data[:-1]
    lines = data.splitlines() if path.suffix == ".jsonl" else [data]
    chosen = lots.randrange(len(lines))
    value = json.loads(lines[chosen])
    leaves = list(_leaves(value, []))
    *above, last = lots.choice(leaves)
    holder = value
    for key in above:
        holder = holder[key]
    old = holder[last]
    changes: list[Any] = [None, "", [], {}, -1, 0, 1, 2**70, 1e308, float("nan"), "x" * 1000, True, "‮[/b]"]
    if isinstance(old, int | float) and not isinstance(old, bool):
        changes += [old + 1, old / 2, -old, old * 1000] * 2
    if lots.random() < 0.1:
        del holder[last]
    else:
        holder[last] = lots.choice(changes)
    lines[chosen] = json.dumps(value, indent=2 if len(lines) == 1 else None).encode()
    return b"\n".join(lines) + b"\n"


def _leaves(value: Any, path: list[Any]) -> Iterator[list[Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inner:
        yield [*path, key]
        yield from _leaves(entry, [*path, key])


# --- what a command shows ---

_FRESH = ("accuracy", "loss", "accuracy_last_10_evaluations")  # other noise gives others
_SHOWN = {
    "epsilon", "delta", "clients", "releases", "noise_multiplier", "accuracy", "loss", "private", "warning",
    "randomness", "accuracy_last_10_evaluations", "status", "rounds", "claimed_epsilon", "noise_removed", "verdict",
    "not_private_because", "expected_cohort", "unit", "spent", "reserved", "budget",
}  # fmt: skip


def _facts(outcome: Outcome) -> Any:
    try:
        return json.loads(outcome.out)
    except ValueError:
        return None


def _name(value: Any) -> str:
    """Return what an entry of a list is about; the place counts for those without a name."""
    return str(value.get("key") or value.get("label") or value.get("run")) if isinstance(value, dict) else str(value)


def _differences(truth: Any, found: Any, where: str = "", skip: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield what is shown otherwise, among the figures that people rely on."""
    if isinstance(truth, dict) and isinstance(found, dict):
        if any(truth.get(key) != found.get(key) for key in ("seeds", "key", "label")):
            return  # of other cells: fewer are shown, and it is said how many
        for key, value in truth.items():
            if key in skip:
                continue
            if key in _SHOWN and not isinstance(value, dict | list) and found.get(key) != value:
                yield f"{where}{key} is {found.get(key)!r}, was {value!r}"
            yield from _differences(value, found.get(key), f"{where}{key}.", skip)
    elif isinstance(truth, list) and isinstance(found, list):
        named = {_name(other): other for other in found}
        for one in truth:
            yield from _differences(one, named.get(_name(one)), where, skip)


def _bug(outcome: Outcome) -> bool:
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    return bool(outcome.bug) or outcome.status not in (0, 1, 2) or (outcome.status == 2 and len(errors) != 1)


def _models(world: Path) -> dict[str, bytes]:
    found = {}
    for path in world.rglob("model.safetensors"):
        if path.is_file() and path.stat().st_size < MOST_BYTES:
            found[str(path.relative_to(world))] = path.read_bytes()
    return found


def _spent(world: Path) -> int:
    return sum(
        spends(path)
        for path in world.rglob("ledger*.jsonl")
        if "-local-only" not in str(path) and path.is_file() and path.stat().st_size < MOST_BYTES
    )
