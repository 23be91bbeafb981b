"""What has been spent, in a hash chain on disk. A line is written before the round's result leaves the process.

A crash can overcount, never undercount (invariant 6): the line is on disk first, the model is released after. A run
that draws fresh noise and repeats a round after a crash pays for it again. A seeded run repeats the very same
release, which is one release however often it is computed, so its line is not written twice. A line that a crash cut
short counts as a release.

The first line is the budget and the source of the noise, each other one a release. Checkpoints, the summary and the
privacy statement hold the chain's last hash, so a ledger that was cut is found as well (`demand_anchor`).
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from fedblur import accounting, events
from fedblur.chain import Chain, ChainError, Link
from fedblur.errors import PrivacyError, RunError

Randomness = Literal["operating system", "seed"]  # where noise and cohorts come from
_SOURCES: dict[Randomness, str] = {"operating system": "the operating system", "seed": "a seed"}
_CUT_SHORT = "a line that a crash cut short, counted as a release"


@dataclass(frozen=True)
class Budget:
    """The guarantee that a run must not pass. epsilon = inf: no privacy, but the rounds still count."""

    epsilon: float
    delta: float
    accountant: accounting.Accountant
    rounds: int  # planned; never more, even where the accountant would allow one


class Ledger:
    """The spends of one run, against its budget.

    `about`: the hash of the run's configuration. `randomness`: where noise and cohorts come from; a run that does not
    say so counts as one that protects nobody wherever runs are composed (`verification.compose`).
    """

    def __init__(self, path: Path, budget: Budget, about: str = "", randomness: Randomness | None = None) -> None:
        self.path = path
        self.budget = budget
        self._chain = Chain(path)
        self._known = 0  # lines that are in the sets below
        self._spends: list[tuple[int, str]] = []
        self._done: set[tuple[int, str]] = set()
        self._kinds: set[str] = set()
        with self._chain.writing() as chain:
            if not chain.links:
                chain.append(_first_line(budget, about, randomness))
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

    def spend(self, round_: int, event: events.Event, replay: bool) -> None:
        """Write down one release, before it happens. `replay`: the same round gives the very same release (seeded)."""
        text = _text(event)
        with self._chain.writing() as chain:
            self._catch_up()
            if not (replay and (round_, text) in self._done):
                self._demand_room(round_, event)  # again: another process may have spent since the round began
                chain.append({"kind": "spend", "round": round_, "event": events.to_json(event), "at": _now()})

    def demand_room(self, round_: int, event: events.Event, replay: bool) -> None:
        """Refuse to start a round that would pass the budget."""
        self._mend(event)
        if not (replay and (round_, _text(event)) in self._done):
            self._demand_room(round_, event)

    def _demand_room(self, round_: int, event: events.Event) -> None:
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
        """(round, event) of every release, in order."""
        return read_spends(self._read())

    def epsilon(self) -> float:
        """What all spends together cost, at the budget's delta."""
        spent = self.spends()
        if not spent:
            return 0.0
        return accounting.epsilon(spent[0][1], len(spent), self.budget.delta, self.budget.accountant)

    def anchor(self) -> dict[str, Any]:
        """What others keep to find out later whether this ledger was cut: its length and last hash."""
        return {"lines": len(self._read()), "head": self._chain.head}

    def _read(self) -> list[Link]:
        return self._chain.read()

    def _mend(self, event: events.Event) -> None:
        """A torn line was written for a release that may have happened or not: it counts."""
        with self._chain.writing() as chain:
            self._catch_up()
            if chain.torn:
                round_ = 1 + max((number for number, _ in self._spends), default=0)
                body = {"kind": "spend", "round": round_, "event": events.to_json(event), "at": _now()}
                chain.append(body | {"note": _CUT_SHORT})
            self._catch_up()

    def _catch_up(self) -> None:
        for link in self._chain.links[max(self._known, 1) :]:
            spend = (link.body["round"], json.dumps(link.body["event"], sort_keys=True))
            self._spends.append(spend)
            self._done.add(spend)
            self._kinds.add(spend[1])
        self._known = len(self._chain.links)


class ForeignLedger(Ledger):
    """The ledger of a process that releases nothing: another one keeps it, and to touch it here is an error."""

    def __init__(self, path: Path, budget: Budget, about: str = "", randomness: Randomness | None = None) -> None:
        self.path, self.budget, self._chain = path, budget, _Nobodys(path)


class _Nobodys(Chain):
    def read(self) -> list[Link]:
        raise PrivacyError("only rank 0 keeps the ledger and releases anything")

    def writing(self) -> Any:
        return self.read()


def read_budget(chain: Chain) -> tuple[Budget, str]:
    """The budget that a ledger was opened for, and the hash of its configuration."""
    body = chain.links[0].body if chain.links else {}
    try:
        budget = Budget(float(body["epsilon"]), body["delta"], body["accountant"], body["rounds"])
        return budget, body["about"]
    except (KeyError, TypeError, ValueError):
        raise ChainError(f"{chain.path} does not begin with a budget; it is not a ledger of this version") from None


def read_randomness(chain: Chain) -> Randomness | None:
    """The source that a ledger names; None for a ledger of version 0.1, which names none."""
    recorded = chain.links[0].body.get("randomness") if chain.links else None
    if recorded is not None and recorded not in _SOURCES:
        raise ChainError(f"{chain.path} names an unknown source of randomness; it is not a ledger of this version")
    return cast(Randomness | None, recorded)


def randomness_of(seed: int | None) -> Randomness:
    """Where the noise of a run with this seed comes from."""
    return "operating system" if seed is None else "seed"


def read_spends(links: list[Link]) -> list[tuple[int, events.Event]]:
    """(round, event) of every release, in order; an unknown event is refused."""
    try:
        return [(int(link.body["round"]), events.from_json(link.body["event"])) for link in links[1:]]
    except (KeyError, TypeError, ValueError):
        raise ChainError("a line of the ledger is no release; it was not written by this version") from None


def open_ledger(path: Path) -> Chain:
    """A ledger to look at, not to write: whole, or an error that says which line is not."""
    chain = Chain(path)
    if chain.read() and not chain.torn:
        read_budget(chain)
        return chain
    what = "ends in the middle of a line; if its run crashed, fedblur resume mends it" if chain.torn else "is empty"
    raise ChainError(f"{path} {what}")


def demand_anchor(path: Path, anchor: Any, holder: str) -> None:
    """Refuse a ledger that does not continue the one that `holder` remembers."""
    if not isinstance(anchor, dict) or {"lines", "head"} - anchor.keys():
        raise RunError(f"{holder} names no ledger; it was made by an earlier version: start a new run")
    links = Chain(path).read() if path.exists() else []
    if len(links) < anchor["lines"] or links[anchor["lines"] - 1].hash != anchor["head"]:
        raise ChainError(
            f"{path} is not the ledger that {holder} remembers ({anchor['lines']} lines, {anchor['head'][:12]}…): "
            "it was cut or replaced, and what was spent is unknown; restore it from a copy"
        )


def _first_line(budget: Budget, about: str, randomness: Randomness | None) -> dict[str, Any]:
    """The budget. Its random id keeps two runs' ledgers apart, also those of one configuration in one second."""
    source = {} if randomness is None else {"randomness": randomness}
    return {"kind": "budget", "about": about, "id": os.urandom(8).hex(), "at": _now(), **source, **_plain(budget)}


def _text(event: events.Event) -> str:
    return json.dumps(events.to_json(event), sort_keys=True)


def _plain(budget: Budget) -> dict[str, Any]:
    return {**asdict(budget), "epsilon": str(budget.epsilon)}  # JSON has no infinity


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
