"""The ledger of what was spent, a hash chain on disk. A line is written before the round's result leaves the process.

A crash can overcount, never undercount (invariant 6): the line is on disk first, the model is released after. A run
that draws fresh noise and repeats a round after a crash pays for it again. A seeded run repeats the very same
release, which is one release however often it is computed, so its line is not written twice. A line that a crash cut
short counts as a release where it may have been one (`cut_release`).

    line n:  {"body": {...}, "hash": sha256(hash of line n − 1, body)}

    budget   the first line: the budget, the source of the noise, and what the run is (`Subject`): with it and
             config.json a stranger recomputes the plan
    spend    a release
    close    the digests of what was released: model, summary, rounds. A run that continues adds lines after it

Checkpoints, the summary and the privacy statement hold the chain's last hash, so a ledger that was cut is found as well
(`demand_anchor`).

Formal guarantees of the chain. A line is accepted only if it is, byte for byte, what `append` writes after the lines
before it; so any changed, moved, dropped or inserted byte in front of the last line's end is found, except that a file
which was cut at the end of a line is a shorter chain that looks whole: whoever kept a later `hash` (an anchor) finds
that too. `append` returns when the line is on disk. A crash leaves at most one line without its end; `torn` says so.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from fedblur.core.errors import PrivacyError, RunError
from fedblur.core.files import remove, sync_folder
from fedblur.privacy import accounting, events

if TYPE_CHECKING:
    from fedblur.privacy.claim import PopulationTotal

try:
    import fcntl
except ImportError:  # no such locks on Windows: two writers at once break the chain there, which is found and refused
    fcntl = None  # type: ignore[assignment]

START = "0" * 64


class ChainError(RunError):
    """A file whose lines do not follow from each other."""


@dataclass(frozen=True)
class Link:
    """One line that follows from those before it."""

    body: dict[str, Any]
    hash: str


class Chain:
    """A file that only grows. What was read once is remembered; each look reads only what is new."""

    def __init__(self, path: Path, what: str = "ledger", private: bool = False) -> None:
        self.path, self.what = path, what
        self.mode = 0o600 if private else 0o644  # whether only its owner may read it
        self.links: list[Link] = []
        self.torn = b""  # what stands after the last whole line
        self._size = 0  # of the whole lines

    @property
    def head(self) -> str:
        """The hash of the last line: it stands for the whole file."""
        return self.links[-1].hash if self.links else START

    def read(self) -> list[Link]:
        """Read all lines, including those that others wrote meanwhile."""
        with self._opened(os.O_RDONLY) as file:
            self._catch_up(file)
        return self.links

    @contextlib.contextmanager
    def writing(self) -> Iterator[Chain]:
        """Lock the chain: until the end of the block nobody else writes."""
        new = not self.path.exists()
        with self._opened(os.O_RDWR | os.O_CREAT) as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)  # freed when the file is closed
            self._catch_up(file)
            self._file = file
            yield self
        if new:
            sync_folder(self.path.parent)

    def append(self, body: Mapping[str, Any]) -> None:
        """Append a line, on disk before this returns. Inside `writing` only. It takes the place of a torn one."""
        link = _link(self.head, body)
        line = _line(link)
        os.lseek(self._file, self._size, os.SEEK_SET)
        if os.write(self._file, line) != len(line):
            raise OSError("only a part of a line could be written")  # the disk is full: it is torn, and counts
        os.ftruncate(self._file, self._size + len(line))
        os.fsync(self._file)
        self.links.append(link)
        self.torn = b""
        self._size += len(line)

    @contextlib.contextmanager
    def _opened(self, flags: int) -> Iterator[int]:
        try:
            # bytes as they are, on Windows too; a pipe must not block
            bits = flags | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
            file = os.open(self.path, bits, self.mode)
        except OSError as error:
            raise RunError(f"the {self.what} {self.path} cannot be opened: {error.strerror}") from None
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_size > 2**30:  # four million rounds
                raise RunError(f"the {self.what} {self.path} is not a regular file of at most 1 GiB; restore it")
            yield file
        except OSError as error:
            reason = error.strerror or error
            raise RunError(f"the {self.what} {self.path} cannot be used: {reason}; free space or restore it") from None
        finally:
            os.close(file)

    def _catch_up(self, file: int) -> None:
        if os.fstat(file).st_size < self._size:
            raise ChainError(f"{self.path} became shorter while it was in use; restore it from a copy")
        os.lseek(file, self._size, os.SEEK_SET)
        with open(file, "rb", closefd=False) as stream:
            *lines, self.torn = stream.read().split(b"\n")
        for line in lines:
            self.links.append(self._checked(line + b"\n"))
            self._size += len(line) + 1

    def _checked(self, line: bytes) -> Link:
        try:
            link = _link(self.head, json.loads(line)["body"])
            if _line(link) == line:
                return link
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        number = len(self.links) + 1
        after = f"line {number - 1}" if number > 1 else "an empty file"
        raise ChainError(
            f"{self.path}: line {number} does not follow from {after}; it was edited, moved or replaced: "
            "restore the file from a copy"
        )


def _link(head: str, body: Mapping[str, Any]) -> Link:
    content = dict(body)
    return Link(content, hashlib.sha256(f"{head} {_json(content)}".encode()).hexdigest())


def _line(link: Link) -> bytes:
    return (_json({"body": link.body, "hash": link.hash}) + "\n").encode()


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


Randomness = Literal["operating system", "seed", "unaudited part"]  # where noise and cohorts come from
_SOURCES: dict[Randomness, str] = {
    "operating system": "the operating system",
    "seed": "a seed",
    "unaudited part": "a user's own part that passed no audit",
}
_CLOSING = re.compile(rb'\{"body": \{"at": "[^"]*", "k')  # "kind" comes second there; a release has "event" before it
CUT_SHORT = "a line that a crash cut short, counted as a release"


@dataclass(frozen=True)
class Budget:
    """The guarantee that a run must not pass. epsilon = inf: no privacy, but the rounds still count."""

    epsilon: float
    delta: float
    accountant: accounting.Accountant
    rounds: int  # planned; never more, even where the accountant would allow one


@dataclass(frozen=True)
class Subject:
    """The subject of a ledger: facts of its run that the first line fixes, for a stranger who recomputes the plan."""

    config: str  # the whole hash of the resolved configuration
    unit: str  # of privacy
    clients: int  # N
    noise_multiplier: float  # σ
    event: dict[str, Any]  # what one round releases, as planned


class Spending(Protocol):
    """The interface of a run's ledger: `Ledger` where releases are made, `ForeignLedger` on ranks above 0."""

    def demand_room(self, round_: int, event: events.Event, replay: bool) -> None:
        """Refuse to start a round that would pass the budget."""

    def spend(self, round_: int, event: events.Event, replay: bool) -> None:
        """Write down one release, before it happens. `replay`: the same round gives the very same release (seeded)."""

    def number(self, round_: int, event: events.Event, replay: bool) -> int:
        """Return the number that this release has among all of the ledger, or will have."""

    def spends(self) -> list[tuple[int, events.Event]]:
        """Return (round, event) of every release, in order."""

    def epsilon(self) -> float:
        """Return what all spends together cost, at the budget's delta."""

    def anchor(self) -> dict[str, Any]:
        """Return the ledger's length and last hash: with them, others find out later whether it was cut."""

    def settle(self) -> None:
        """Free what a run that is complete had reserved in its population, and did not use."""

    def population(self) -> PopulationTotal | None:
        """Return what the run's population has spent; None where none is tracked."""


class Reports(Protocol):
    """The interface of a run's account with its population (`population_account.Account`): it hears of each release."""

    @property
    def budgeted(self) -> bool:
        """Whether there is a budget to keep."""

    def agree(self, chain: Chain, spent: int) -> events.Event | None:
        """Reserve, or compare. Return the event of a release that was noted and whose row a kill left out."""

    def note(self, chain: Chain, spent: int, link: Link) -> None:
        """Note a release before its row is written."""

    def settle(self, chain: Chain, spent: int) -> None:
        """Free what was reserved and not used."""

    def total(self) -> PopulationTotal:
        """Return what the population has spent."""


class Ledger:
    """The spends of one run, against its budget.

    `about`: the hash of the run's configuration. `randomness`: where noise and cohorts come from; a run that does not
    say so counts as one that protects nobody wherever runs are composed (`verify_ledger.compose`). `subject`: what a
    new ledger says of its run. `account`: with the run's population, which reserves the run's plan here and hears of
    each release before its row is written.
    """

    def __init__(
        self,
        path: Path,
        budget: Budget,
        about: str = "",
        randomness: Randomness | None = None,
        subject: Subject | None = None,
        account: Reports | None = None,
    ) -> None:
        self.path = path
        self.budget = budget
        self.account = account
        self._chain = Chain(path)
        self._known = 0  # lines that are counted below
        self._spends: list[tuple[int, events.Event]] = []
        self._done: dict[tuple[int, str], int] = {}  # the number of each release
        self._kinds: dict[str, events.Event] = {}
        with self._chain.writing() as chain:
            new = not chain.links
            if new:
                chain.append(_first_line(budget, about, randomness, subject))
        stored, owner = read_budget(self._chain)
        if stored != budget:
            raise PrivacyError(f"{path} was opened for {stored}, not {budget}; a budget does not change during a run")
        if about and owner != about:
            raise PrivacyError(f"{path} belongs to another configuration ({owner or 'none'}), not to {about}")
        recorded = read_randomness(self._chain)
        if randomness and recorded and recorded != randomness:
            raise PrivacyError(
                f"{path} was opened for noise from {_SOURCES[recorded]}, not from {_SOURCES[randomness]}; "
                "start a new run"
            )
        try:
            with self._chain.writing() as chain:
                self._agree(chain)
        except PrivacyError:
            if new:  # it has released nothing, and never will
                remove(path)
            raise

    def spend(self, round_: int, event: events.Event, replay: bool) -> None:
        """Write down one release, before it happens. `replay`: the same round gives the very same release (seeded)."""
        text = _text(event)
        with self._chain.writing() as chain:
            self._agree(chain)
            self._count_torn(chain, event)
            if not (replay and (round_, text) in self._done):
                self._demand_room(round_, event)  # again: another process may have spent since the round began
                self._append(chain, spend_line(round_, event))

    def demand_room(self, round_: int, event: events.Event, replay: bool) -> None:
        """Refuse to start a round that would pass the budget."""
        self.count_torn(event)
        if not (replay and (round_, _text(event)) in self._done):
            self._demand_room(round_, event)

    def number(self, round_: int, event: events.Event, replay: bool) -> int:
        """Return the number that a release has or will have, from 1 on; a private round that is repeated, another."""
        following = len(self.spends()) + 1
        return self._done.get((round_, _text(event)), following) if replay else following

    def count_torn(self, event: events.Event) -> None:
        """Count a line that a crash cut short as a release of this event, where it may have been one."""
        with self._chain.writing() as chain:
            self._agree(chain)
            self._count_torn(chain, event)

    def _agree(self, chain: Chain) -> None:
        """Compare with the population's account. A kill may have left it one release ahead: that release counts."""
        self._catch_up()
        missing = self.account.agree(chain, len(self._spends)) if self.account is not None else None
        if missing is not None:
            self._cut_short(chain, missing)

    def _count_torn(self, chain: Chain, event: events.Event) -> None:
        self._catch_up()
        if cut_release(chain):
            self._cut_short(chain, event)

    def _cut_short(self, chain: Chain, event: events.Event) -> None:
        last = max((number for number, _ in self._spends), default=0)
        self._append(chain, spend_line(last + 1, event) | {"note": CUT_SHORT})

    def _append(self, chain: Chain, body: Mapping[str, Any]) -> None:
        """Write a release, after the population's account: a kill leaves that one ahead, never behind."""
        if self.account is not None:
            self.account.note(chain, len(self._spends), _link(chain.head, body))
        chain.append(body)
        self._catch_up()

    def _demand_room(self, round_: int, event: events.Event) -> None:
        events.demand_stream(event)
        foreign = next((kind for kind in self._kinds if kind != _text(event)), None)
        if foreign is not None:
            raise PrivacyError(f"{self.path} holds a spend of another kind ({foreign}); a run releases only one kind")
        spent = len(self._spends)
        if spent >= self._allowed(event):
            raise PrivacyError(
                f"the budget is spent: {spent} releases in {self.path} leave no room for round {round_} within "
                f"epsilon={self.budget.epsilon:g}; start a new run (on these clients it adds to the total)"
            )

    @functools.cache  # noqa: B019, one ledger lives as long as its run
    def _allowed(self, event: events.Event) -> int:
        b = self.budget
        return accounting.rounds_within(event, b.epsilon, b.delta, b.accountant, b.rounds)

    def spends(self) -> list[tuple[int, events.Event]]:
        """Return (round, event) of every release, in order."""
        self._chain.read()
        self._catch_up()
        return [*self._spends]

    def epsilon(self) -> float:
        """Return what all spends together cost, at the budget's delta."""
        self._chain.read()
        self._catch_up()
        if not self._spends:
            return 0.0
        return accounting.epsilon(self._spends[0][1], len(self._spends), self.budget.delta, self.budget.accountant)

    def anchor(self) -> dict[str, Any]:
        """Return the length and last hash, by which others can find out later whether this ledger was cut.

        Closing lines at the end are left out: they hold a digest of the summary, which holds this.
        """
        links = self._chain.read()
        while links and kind_of(links[-1]) == "close":
            links = links[:-1]
        return {"lines": len(links), "head": links[-1].hash}

    def settle(self) -> None:
        """Free what a run that is complete had reserved in its population, and did not use."""
        if self.account is not None:
            with self._chain.writing() as chain:
                self._agree(chain)
                self.account.settle(chain, len(self._spends))

    def population(self) -> PopulationTotal | None:
        """Return what the run's population has spent; None where none is tracked."""
        return self.account.total() if self.account is not None else None

    def _catch_up(self) -> None:
        for link in self._chain.links[max(self._known, 1) :]:
            if kind_of(link) == "spend":
                round_, text = link.body.get("round"), json.dumps(link.body.get("event"), sort_keys=True)
                if text not in self._kinds or not isinstance(round_, int):  # events are parsed once for each kind
                    ((round_, self._kinds[text]),) = read_spends([link])
                self._spends.append((round_, self._kinds[text]))
                self._done.setdefault((round_, text), len(self._spends))
        self._known = len(self._chain.links)


@dataclass
class Payment:
    """The price of one round's release. However often it is settled, the ledger gets one row."""

    ledger: Spending
    round_: int
    event: events.Event
    replay: bool  # the same round gives the very same release (seeded)
    settled: bool = False

    def settle(self) -> None:
        """Write the ledger's row, unless it is written. It is on disk when this returns."""
        if not self.settled:
            self.ledger.spend(self.round_, self.event, self.replay)
            self.settled = True


def read_budget(chain: Chain) -> tuple[Budget, str]:
    """Read the budget that a ledger was opened for, and the hash of its configuration."""
    body = chain.links[0].body if chain.links else {}
    with contextlib.suppress(KeyError, TypeError, ValueError):
        budget = Budget(float(body["epsilon"]), body["delta"], body["accountant"], body["rounds"])
        kinds = type(budget.delta), type(budget.accountant), type(budget.rounds), type(body["about"])
        if kinds == (float, str, int, str):
            return budget, body["about"]
    raise ChainError(f"{chain.path} does not begin with a budget; it is not a ledger of this version")


def read_randomness(chain: Chain) -> Randomness | None:
    """Read the source of noise that a ledger names; None for a ledger of version 0.1, which names none."""
    recorded = chain.links[0].body.get("randomness") if chain.links else None
    if recorded not in (None, *_SOURCES):
        raise ChainError(f"{chain.path} names an unknown source of randomness; it is not a ledger of this version")
    return cast(Randomness | None, recorded)


def randomness_of(seed: int | None, unaudited: bool = False) -> Randomness:
    """Return where the noise of a run with this seed comes from; `unaudited`: a part of it failed its audit."""
    if seed is not None:
        return "seed"
    return "unaudited part" if unaudited else "operating system"


def read_spends(links: list[Link]) -> list[tuple[int, events.Event]]:
    """Read (round, event) of every release, in order; an unknown event or line is refused."""
    with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):
        spends = [link.body for link in links if kind_of(link) == "spend"]
        found = [(body["round"], events.from_json(body["event"])) for body in spends]
        if all(type(round_) is int for round_, _ in found):
            return found
    raise ChainError("a line of the ledger is no release; it was not written by this version")


def kind_of(link: Link) -> str:
    kind = link.body.get("kind")
    if kind not in ("budget", "spend", "close"):
        raise ChainError(f"the ledger holds a line of an unknown kind ({kind!r}); it was not written by this version")
    return str(kind)


def cut_release(chain: Chain) -> bool:
    """Return whether a crash cut a line short that may have been a release: then it counts as one.

    A closing line is none. Nor is a line for which the budget had no round left: that release was refused.
    """
    if not chain.torn or not chain.links or _CLOSING.match(chain.torn):
        return False
    return len(read_spends(chain.links)) < read_budget(chain)[0].rounds


def _first_line(budget: Budget, about: str, randomness: Randomness | None, subject: Subject | None) -> dict[str, Any]:
    """Return the budget. Its random id keeps two runs' ledgers apart, even of one configuration in one second."""
    source = {} if randomness is None else {"randomness": randomness}
    facts = {} if subject is None else {"subject": asdict(subject)}
    limit = {**asdict(budget), "epsilon": str(budget.epsilon)}  # JSON has no infinity
    return {"kind": "budget", "about": about, "id": os.urandom(8).hex(), "at": now(), **source, **facts, **limit}


def spend_line(round_: int, event: events.Event) -> dict[str, Any]:
    return {"kind": "spend", "round": round_, "event": events.to_json(event), "at": now()}


def _text(event: events.Event) -> str:
    return json.dumps(events.to_json(event), sort_keys=True)


def now() -> str:
    """Return the time, as ledgers write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
