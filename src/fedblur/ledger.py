"""What has been spent, in SQLite. A row is on disk before the round's result leaves the process (invariant 6).

A crash can overcount, never undercount: the row is committed (and synced) first, the model is released after. A run
that draws fresh noise and repeats a round after a crash pays for it again. A seeded run repeats the very same
release, which is one release however often it is computed, so its row is not written twice.
"""

from __future__ import annotations

import functools
import json
import sqlite3
from contextlib import closing
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedblur import accounting, events
from fedblur.errors import PrivacyError, RunError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS budget (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    epsilon REAL NOT NULL, delta REAL NOT NULL, accountant TEXT NOT NULL, rounds INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS spends (
    id INTEGER PRIMARY KEY AUTOINCREMENT, round INTEGER NOT NULL, event TEXT NOT NULL, at TEXT NOT NULL
);
"""


@dataclass(frozen=True)
class Budget:
    """The guarantee that a run must not pass. epsilon = inf: no privacy, but the rounds still count."""

    epsilon: float
    delta: float
    accountant: accounting.Accountant
    rounds: int  # planned; never more, even where the accountant would allow one


class Ledger:
    """The spends of one run, against its budget."""

    def __init__(self, path: Path, budget: Budget) -> None:
        self.path = path
        self.budget = budget
        with self._connect() as db:
            db.executescript(_SCHEMA)
            db.execute("INSERT OR IGNORE INTO budget VALUES (1, ?, ?, ?, ?)", astuple(budget))
            stored = Budget(*db.execute("SELECT epsilon, delta, accountant, rounds FROM budget").fetchone())
        if stored != budget:
            raise PrivacyError(f"{path} was opened for {stored}, not {budget}; a budget does not change during a run")

    def _connect(self) -> _Connection:
        return _Connection(self.path)

    def spend(self, round_: int, event: events.Event, replay: bool) -> None:
        """Write down one release, before it happens. `replay`: the same round gives the very same release (seeded)."""
        text = _text(event)
        with self._connect() as db:
            done = db.execute("SELECT event FROM spends WHERE round = ?", (round_,)).fetchall()
            if replay and (text,) in done:
                return
            now = datetime.now(UTC).isoformat(timespec="seconds")
            db.execute("INSERT INTO spends (round, event, at) VALUES (?, ?, ?)", (round_, text, now))

    def demand_room(self, round_: int, event: events.Event, replay: bool) -> None:
        """Refuse to start a round that would pass the budget."""
        text = _text(event)
        with self._connect() as db:
            done = db.execute("SELECT COUNT(*) FROM spends WHERE round = ? AND event = ?", (round_, text)).fetchone()[0]
            foreign = db.execute("SELECT event FROM spends WHERE event <> ? LIMIT 1", (text,)).fetchone()
            spent = db.execute("SELECT COUNT(*) FROM spends").fetchone()[0]
        if foreign is not None:
            raise PrivacyError(
                f"{self.path} holds a spend of another kind ({foreign[0]}); a run releases only one kind"
            )
        if spent >= self._allowed(event) and not (replay and done):
            raise PrivacyError(
                f"the budget is spent: {spent} releases in {self.path} leave no room for round {round_} within "
                f"epsilon={self.budget.epsilon:g}; start a new run (on these clients it adds to the total)"
            )

    @functools.cache  # noqa: B019, one ledger lives as long as its run
    def _allowed(self, event: events.Event) -> int:
        b = self.budget
        return accounting.rounds_within(event, b.epsilon, b.delta, b.accountant, b.rounds)

    def spends(self) -> list[tuple[int, events.Event]]:
        """(round, event) of every release, in order."""
        with self._connect() as db:
            rows = db.execute("SELECT round, event FROM spends ORDER BY id").fetchall()
        return [(round_, events.from_json(json.loads(text))) for round_, text in rows]

    def epsilon(self) -> float:
        """What all spends together cost, at the budget's delta."""
        spent = self.spends()
        if not spent:
            return 0.0
        return accounting.epsilon(spent[0][1], len(spent), self.budget.delta, self.budget.accountant)


class ForeignLedger(Ledger):
    """The ledger of a process that releases nothing: another one keeps it, and to touch it here is an error."""

    def __init__(self, path: Path, budget: Budget) -> None:
        self.path, self.budget = path, budget

    def _connect(self) -> _Connection:
        raise PrivacyError("only rank 0 keeps the ledger and releases anything")


def _text(event: events.Event) -> str:
    return json.dumps(events.to_json(event), sort_keys=True)


class _Connection:
    """A short connection that commits, syncs and closes; a broken file is a one-line error."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> sqlite3.Connection:
        try:
            self.db = sqlite3.connect(self.path)
            self.db.execute("PRAGMA synchronous = FULL")
        except sqlite3.Error as error:
            raise RunError(f"the ledger {self.path} cannot be opened: {error}") from None
        return self.db

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with closing(self.db):
            if kind is None:
                self.db.commit()
        if isinstance(error, sqlite3.Error):
            raise RunError(f"the ledger {self.path} cannot be used: {error}; free space or restore it") from None
