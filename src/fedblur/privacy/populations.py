"""Populations: one budget for people, across run folders and processes. In: plans. Out: room, or a refusal.

    NAME/budget.json       (epsilon, delta), if there is a budget
    NAME/runs/LEDGER.json  one file per ledger: the event of one release, how many it may make and how many it has made
    NAME/files.json        which of these files there must be: one that is missing was lost
    NAME/.lock             held while one of these files is read and written

Formal guarantee. At every moment, for any number of processes and after kills, each ledger has made at most `spent` ≤
`allowed` releases, and all that is allowed together is within the budget:

    reserve    `allowed` grows only if the composition with all other ledgers stays within the budget
    note       `spent` grows, on disk, before the ledger's row is written, and never above `allowed`
    free       `allowed` shrinks to `spent` and not below it

A reservation that is freed too early is no leak: whoever comes back must reserve again. What asks here for a run is its
account (`population_account.py`).
"""

from __future__ import annotations

import contextlib
import getpass
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedblur.core.errors import ConfigError, PrivacyError, RunError
from fedblur.core.files import (
    demand_digest,
    make_folder,
    open_lock,
    read_json_if_there,
    remove,
    with_digest,
    write_atomically,
)
from fedblur.core.files import locked as held_elsewhere
from fedblur.privacy import events, totals
from fedblur.privacy.claim import PopulationTotal, from_json
from fedblur.privacy.ledger import Chain, now, read_randomness, read_spends

try:
    import fcntl
except ImportError:  # no such locks on Windows: there, run one command at a time on a population
    fcntl = None  # type: ignore[assignment]

_ELSEWHERE = "set FEDBLUR_POPULATIONS to a folder that you may write to"
_BUDGET, _LIST = "budget.json", "files.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def home() -> Path:
    """Return the folder of all populations of this user."""
    given = os.environ.get("FEDBLUR_POPULATIONS")
    try:
        if given:
            return Path(given).expanduser()
        if sys.platform == "win32":
            state = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            state = Path.home() / "Library" / "Application Support"
        else:
            state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:
        raise RunError("no home folder to keep populations in; set FEDBLUR_POPULATIONS to a folder") from None
    return state / "fedblur" / "populations"


@dataclass(frozen=True)
class Limit:
    """The budget of a population."""

    epsilon: float
    delta: float
    adaptive: bool = False  # whether it holds if later runs' noise was chosen by looking at earlier ones
    since: str = ""  # when it was set, or more was found to be spent: then each run asks for room again

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise ConfigError(f"epsilon={self.epsilon} must be above 0 and finite")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta={self.delta} must be in (0, 1)")

    def allows(self, event: events.Event | None) -> bool:
        """Return whether everything together stays within the budget."""
        if not self.adaptive:
            return totals.fits(event, self.epsilon, self.delta)
        orders = totals.orders_for(self.epsilon, self.delta)
        cost = totals.spent_adaptively(event, orders, self.delta)
        return cost is not None and cost <= self.epsilon


@dataclass(frozen=True)
class Entry:
    """The record of one ledger in its population."""

    ledger: str  # the random id in its first line
    path: str  # where it was last
    kind: str  # run, table cell, search, voting, audit, deployment
    user: str
    started: str
    last: str  # when it last made a release
    delta: float  # of the run
    randomness: str  # where its noise comes from
    event: dict[str, Any]  # of one release
    allowed: int  # releases that are reserved, those that were made included
    spent: int  # releases that were made, or may have been
    lines: int  # of the ledger
    head: str  # its last hash
    before: str  # the hash before that: where a ledger ends that was killed before its row was written
    state: str = "open"  # or complete, or closed: given up for good
    people: str = ""  # a keyed hash of the client ids

    @property
    def reserved(self) -> int:
        """Return what counts against the budget."""
        return max(self.allowed, self.spent)

    @property
    def run(self) -> str:
        """Return the run folder."""
        return str(Path(self.path).parent)

    @property
    def release(self) -> events.Event:
        """Return the event of one release."""
        return events.from_json(self.event)


class Population:
    """People with one budget. Its state is a folder."""

    def __init__(self, name: str, root: Path | None = None) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"population={name!r} must be letters, digits and ._-, up to 64, the first a letter or digit"
            )
        self.name = name
        self.folder = (root or home()) / name

    @property
    def exists(self) -> bool:
        return self.folder.is_dir()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for the lock of this population, and hold it until the end of the block."""
        with lock(self.folder.parent, self.folder, self.folder / "runs"):
            yield

    def limit(self) -> Limit | None:
        """Return the budget; None if there is none."""
        table = self._read(_BUDGET)
        return None if table is None else from_json(Limit, table, self.folder / _BUDGET)

    def set_limit(self, limit: Limit) -> None:
        """Set the budget. One below what is already spent blocks all further releases."""
        with self.locked():
            self._write(_BUDGET, asdict(replace(limit, since=now())))

    def _touch(self) -> None:
        """Have runs that have room already ask for it again: more was spent than they were told."""
        limit = self.limit()
        if limit is not None:
            self._write(_BUDGET, asdict(replace(limit, since=f"{now()} {os.urandom(4).hex()}")))

    def entries(self) -> list[Entry]:
        """Return what is known about each ledger, the oldest first."""
        there = {f"runs/{path.name}" for path in (self.folder / "runs").glob("*.json")}
        listed = {name for name in self._listed() if name != _BUDGET}
        found = [self.find(Path(name).stem) for name in there | listed]
        return sorted((entry for entry in found if entry), key=lambda entry: (entry.started, entry.ledger))

    def find(self, ledger: str) -> Entry | None:
        """Return what is known about one ledger."""
        table = self._read(f"runs/{ledger}.json")
        return None if table is None else from_json(Entry, table, self.folder / f"runs/{ledger}.json")

    def write(self, entry: Entry) -> None:
        """Write one entry, on disk when this returns. Inside `locked` only."""
        self._write(f"runs/{entry.ledger}.json", asdict(entry))

    def forget(self, entry: Entry) -> None:
        """Drop a ledger that has released nothing. Inside `locked` only."""
        if entry.spent:
            raise PrivacyError(f"{entry.run} has made {entry.spent} releases, which a population never forgets")
        name = f"runs/{entry.ledger}.json"
        _write(self.folder / _LIST, {"files": [other for other in self._listed() if other != name]})
        remove(self.folder / name)

    def _read(self, name: str) -> dict[str, Any] | None:
        """Read a file of the state, as it was written: a digit that changed would be a release that nobody counts."""
        path = self.folder / name
        table = read_json_if_there(path)
        if table is not None:
            demand_digest(table, path, required=True)
        elif name != _LIST and name in self._listed():
            raise RunError(f"{path} is missing, and what it held is unknown; restore it from a copy")
        return table

    def _write(self, name: str, table: dict[str, Any]) -> None:
        """Write a file of the state, then list it if it is new: a kill between the two leaves none that is missing."""
        new = not (self.folder / name).exists()
        _write(self.folder / name, table)
        if new:
            there = {f"runs/{path.name}" for path in (self.folder / "runs").glob("*.json")}
            _write(self.folder / _LIST, {"files": sorted({*self._listed(), *there, name})})

    def _listed(self) -> list[str]:
        """Return the files that there must be."""
        found = (self._read(_LIST) or {}).get("files", [])
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise RunError(f"{self.folder / _LIST} does not list files; restore it from a copy")
        return found

    def demand_room(self, asking: Entry) -> None:
        """Refuse a reservation that the budget does not allow. Inside `locked` only."""
        limit = self.limit()
        if limit is None:
            return
        for freed in (False, True):
            if freed:
                self.reconcile()  # perhaps others reserved what they will never use
            others = [entry for entry in self.entries() if entry.ledger != asking.ledger]
            reason, total = unprotected([*others, asking]), composed([*others, asking])
            if reason is None and limit.allows(total):
                return
        raise PrivacyError(self._refusal(limit, others, asking, reason, total))

    def _refusal(
        self, limit: Limit, others: list[Entry], asking: Entry, reason: str | None, total: events.Event | None
    ) -> str:
        at = f"population {self.name} has a budget of ε = {limit.epsilon:g} at δ = {limit.delta:.3g}"
        if reason is not None:
            own = unprotected(others) is None
            way_out = "drop the seed" if own else "no later run can keep it, so start with other people"
            return f"{at}, and {reason}: ε = ∞; {way_out}"
        if limit.adaptive:
            cost = totals.spent_adaptively(total, totals.orders_for(limit.epsilon, limit.delta), limit.delta)
        else:
            cost = totals.smallest(total, limit.delta)
        if cost is None:
            return (
                f"{at}, and no accountant has a bound for this {asking.kind} with the others; use one kind of sampling"
            )
        endless = unprotected(others) is not None
        made, kept = (
            math.inf if endless else totals.smallest(composed(others, each), limit.delta) for each in (True, False)
        )
        runs = f"{len(others)} other run{'' if len(others) == 1 else 's'} spent {_shown(made)}"
        runs += f" ({_shown(kept)} with what is reserved)" if kept != made else ""
        return (
            f"{at}: {runs}, and this {asking.kind} of at most {asking.reserved} releases would bring it to "
            f"{_shown(cost)}; lower epsilon or rounds, close runs that nobody will resume, or raise the budget: "
            f"fedblur population budget {self.name} --epsilon E --delta D"
        )

    def reconcile(self) -> list[str]:
        """Free what will not be used, and catch up with ledgers. Inside `locked` only. Return what changed."""
        changes = []
        for entry in self.entries():
            chain = _ledger(Path(entry.path), entry.ledger)
            if chain is None or len(chain.links) <= 1:
                if entry.spent == 0 and not _in_use(Path(entry.path)):
                    self.forget(entry)  # a note comes before each release: there was none
                    changes.append(f"{entry.run}: nothing was released; {entry.allowed} releases are free again")
                continue
            known, made = entry, len(read_spends(chain.links))
            if len(chain.links) > entry.lines and chain.links[entry.lines - 1].hash == entry.head:
                entry = advanced(entry, chain, made)
                if made != known.spent:
                    changes.append(f"{entry.run}: {made - known.spent} more releases are in its ledger")
            if entry.state == "open" and entry.lines == len(chain.links) and _complete(Path(entry.path).parent):
                entry = replace(entry, state="complete", allowed=entry.spent)
                freed = known.reserved - entry.reserved
                changes.append(f"{entry.run}: complete" + (f"; {freed} releases are free again" if freed > 0 else ""))
            if entry != known:
                self.write(entry)
            if entry.spent > known.reserved:
                self._touch()
        return changes

    def adopt(self, path: Path) -> str:
        """Count a ledger that this population does not know: of an earlier version, or after its state was lost."""
        chain = Chain(path)
        if not path.exists() or not chain.read():
            raise RunError(f"{path} is not a ledger; give a run folder")
        made, known = read_spends(chain.links), self.find(ledger_id(chain))
        if known is not None or not made:
            return f"{path.parent}: " + ("is known" if known is not None else "has released nothing")
        source = read_randomness(chain) or "unknown"
        body = chain.links[0].body
        entry = new_entry(chain, len(made), made[0][1], len(made), "run", float(body["delta"]), source)
        self.write(replace(entry, started=str(body.get("at", now())), last=str(chain.links[-1].body.get("at", now()))))
        self._touch()
        return f"{path.parent}: {len(made)} releases are counted from now on"

    def knows(self, people: str) -> bool:
        """Return whether a run on clients of these ids was charged here."""
        return any(entry.people == people for entry in self.entries())

    def take_over(self, unnamed: Population) -> None:
        """Count what was spent on the same client ids before anybody named them. Inside `locked` only."""
        if unnamed.name != self.name and unnamed.exists:
            with unnamed.locked():
                missing = [entry for entry in unnamed.entries() if self.find(entry.ledger) is None]
            for entry in missing:
                self.write(entry)
            if missing:
                self._touch()

    def close(self, entry: Entry) -> Entry:
        """Give a run up for good: what it did not use is free again, and it can never be resumed."""
        with self.locked():
            entry = self.find(entry.ledger) or entry
            chain = _ledger(Path(entry.path), entry.ledger)
            if chain is not None and len(chain.links) > entry.lines:
                entry = advanced(entry, chain, len(read_spends(chain.links)))
            closed = replace(entry, state="closed", allowed=entry.spent)
            self.write(closed)
            return closed

    def total(self) -> PopulationTotal:
        """Return what everyone has spent together, and what is reserved."""
        limit, entries = self.limit(), self.entries()
        delta = self.delta(limit, entries)
        endless = unprotected(entries) is not None
        return PopulationTotal(
            name=self.name,
            epsilon=math.inf if endless else totals.smallest(composed(entries, made=True), delta),
            reserved=math.inf if endless else totals.smallest(composed(entries), delta),
            delta=delta,
            budget=None if limit is None else limit.epsilon,
            runs=sum(entry.spent > 0 for entry in entries),
        )

    def delta(self, limit: Limit | None, entries: list[Entry]) -> float:
        """Return the budget's δ, else the smallest of the runs'."""
        return limit.delta if limit is not None else min((entry.delta for entry in entries), default=1e-5)


def advanced(entry: Entry, chain: Chain, spent: int) -> Entry:
    """Return the entry of a ledger that has grown by releases that its population does not remember."""
    return replace(entry, spent=spent, lines=len(chain.links), head=chain.head, before=chain.links[-2].hash)


def new_entry(
    chain: Chain, spent: int, event: events.Event, allowed: int, kind: str, delta: float, randomness: str
) -> Entry:
    """Return the entry of a ledger that a population does not know."""
    return Entry(
        ledger=ledger_id(chain), path=str(chain.path.resolve()), kind=kind, user=_user(), started=now(), last=now(),
        delta=delta, randomness=randomness, event=events.to_json(event), allowed=max(allowed, spent), spent=spent,
        lines=len(chain.links), head=chain.head, before=chain.links[-2].hash if len(chain.links) > 1 else "",
    )  # fmt: skip


def ledger_id(chain: Chain) -> str:
    """Return what tells a ledger from all others: the random id of its first line (before 0.2: that line's hash)."""
    given = str(chain.links[0].body.get("id", ""))
    return given if re.fullmatch(r"[0-9a-f]{16,64}", given) else chain.links[0].hash[:32]


def composed(entries: Iterable[Entry], made: bool = False) -> events.Event | None:
    """Return all releases that are reserved as one event; `made`: only those that were made."""
    counts: dict[events.Event, int] = {}
    for entry in entries:
        event = events.apart(entry.release, entry.ledger)
        counts[event] = counts.get(event, 0) + (entry.spent if made else entry.reserved)
    return totals.counted(counts)


def unprotected(entries: Iterable[Entry]) -> str | None:
    """Return why a total is infinite though each run added noise; None if all noise is secret."""
    bad = [entry for entry in entries if entry.randomness != "operating system" and entry.reserved]
    if not bad:
        return None
    first = bad[0]
    why = {
        "seed": "seeded",
        "unaudited part": "by a mechanism or a sampler of the user's own that passed no audit",
    }.get(first.randomness, "of a source of noise that its ledger does not name")
    others = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"the {first.kind} in {first.run} is {why}{others}"


def every() -> list[Population]:
    """Return all populations, by name."""
    root = home()
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    return [
        Population(path.name, root)
        for path in folders
        if any(path.glob("runs/*.json")) or (path / "budget.json").exists()
    ]


def existing(name: str) -> Population:
    """Return a population that has been written to; else an error that names those that have."""
    population = Population(name)
    if not population.exists:
        known = ", ".join(each.name for each in every()) or "none yet"
        raise ConfigError(f"population {name!r} is unknown; known: {known}")
    return population


def of_run(run: Path) -> list[tuple[Population, Entry]]:
    """Return the populations that know the ledger of this run folder, with what they know."""
    path = (run / "ledger.jsonl" if run.is_dir() or not run.exists() else run).resolve()
    chain = Chain(path)
    own = ledger_id(chain) if path.exists() and chain.read() else None
    return [
        (population, entry)
        for population in every()
        for entry in population.entries()
        if (entry.ledger == own if own else entry.path == str(path))
    ]


def _ledger(path: Path, ledger: str) -> Chain | None:
    """Return a ledger that is still where it was; None if it is not, or is another one."""
    chain = Chain(path)
    with contextlib.suppress(RunError, OSError):
        return chain if path.exists() and chain.read() and ledger_id(chain) == ledger else None
    return None


def _complete(run: Path) -> bool:
    with contextlib.suppress(RunError):  # a damaged summary frees nothing
        summary = read_json_if_there(run / "summary.json") or {}
        return bool(summary.get("status") == "complete")
    return False


def _in_use(ledger: Path) -> bool:
    """Return whether a process holds the run folder now."""
    lock = ledger.parent / ".lock"
    try:
        if not lock.exists():
            return False
        with held_elsewhere(lock) as free:
            return not free
    except FileNotFoundError:  # it has just ended
        return False
    except OSError:  # it is of another user
        return True


def _shown(epsilon: float | None) -> str:
    return (
        "no known ε"
        if epsilon is None
        else "ε = ∞"
        if math.isinf(epsilon)
        else f"ε = {math.ceil(epsilon * 1e4) / 1e4:g}"
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container without this user's name
        return "unknown"


@contextlib.contextmanager
def lock(root: Path, *folders: Path) -> Iterator[None]:
    """Make folders that only their owner can read; wait for the lock in the first below `root`, or in `root`."""
    for folder in (root, *folders):
        make_folder(folder, private=True, way_out=_ELSEWHERE)  # its name is on disk, or a power failure forgets people
    file = open_lock((folders or (root,))[0] / ".lock", way_out=_ELSEWHERE)
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)  # freed when the process ends, however it ends
        yield
    finally:
        os.close(file)


def _write(path: Path, table: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(with_digest(table), indent=1) + "\n").encode(), private=True)
