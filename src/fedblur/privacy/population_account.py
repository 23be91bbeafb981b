"""The account of one run with its population: what `Ledger` reports to. In: releases. Out: room for them, or a refusal.

A release is noted here before its row is in the ledger. So after a kill the population may be one release ahead of the
ledger, whose next reader writes the missing row; it is never behind. A ledger that is further apart was rolled back, or
copied and continued elsewhere, and is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import replace
from pathlib import Path

from fedblur.core.errors import ConfigError, PrivacyError, RunError
from fedblur.core.files import read_bytes, write_atomically
from fedblur.data.population import Federation
from fedblur.privacy import accounting, events
from fedblur.privacy.claim import PopulationTotal
from fedblur.privacy.ledger import Budget, Chain, Link, Randomness, now, read_spends
from fedblur.privacy.ledger_file import open_ledger
from fedblur.privacy.populations import (
    Entry,
    Limit,
    Population,
    advanced,
    every,
    home,
    ledger_id,
    lock,
    new_entry,
)


class Account:
    """The account of one run with its population: what `Ledger` reports to."""

    def __init__(
        self,
        population: Population,
        event: events.Event,
        allowed: int,
        kind: str,
        delta: float,
        randomness: str,
        people: str = "",
    ) -> None:
        self.population = population
        self.event = event
        self.allowed = allowed
        self.kind = kind
        self.delta = delta
        self.randomness = randomness
        self.people = people  # a keyed hash of the client ids; "" where there are none
        self._checked: Limit | None = None  # the budget that the reservation was held against
        self._took_over = False

    @property
    def budgeted(self) -> bool:
        """Whether there is a budget to keep."""
        return self.population.limit() is not None

    def reconcile(self) -> None:
        """Free what nobody will use."""
        with self.population.locked():
            self.population.reconcile()

    def agree(self, chain: Chain, spent: int) -> events.Event | None:
        """Reserve the run's plan, or compare what is known about its ledger with the ledger.

        Return the event of a release that was noted, but whose row a kill left out; the ledger writes it then.
        """
        with self.population.locked():
            entry = self._entry(chain, spent)
            return entry.release if entry.lines > len(chain.links) else None

    def note(self, chain: Chain, spent: int, link: Link) -> None:
        """Note one release, on disk when this returns. `link` is the row that the ledger will write next."""
        with self.population.locked():
            entry = self._entry(chain, spent, needed=spent + 1)
            if link.body.get("event") != entry.event:
                raise PrivacyError(
                    f"{chain.path} would make a release that population {self.population.name} did not reserve"
                )
            self.population.write(
                replace(
                    entry, spent=spent + 1, lines=len(chain.links) + 1, head=link.hash, before=chain.head, last=now(),
                    path=str(chain.path.resolve()), state="open",
                )
            )  # fmt: skip

    def settle(self, chain: Chain, spent: int) -> None:
        """Free what a run that is complete did not use."""
        with self.population.locked():
            entry = self._entry(chain, spent)
            self.population.write(replace(entry, state="complete", allowed=entry.spent))

    def total(self) -> PopulationTotal:
        """Return what the population has spent."""
        with self.population.locked():
            return self.population.total()

    def _new(self, chain: Chain, spent: int) -> Entry:
        entry = new_entry(chain, spent, self.event, self.allowed, self.kind, self.delta, self.randomness)
        return replace(entry, people=self.people)

    def _entry(self, chain: Chain, spent: int, needed: int = 0) -> Entry:
        """Return the entry of this ledger, which agrees with the ledger and has its releases reserved."""
        if self.people and not self._took_over:
            self.population.take_over(Population(self.people, self.population.folder.parent))
            self._took_over = True
        known = self.population.find(ledger_id(chain))
        entry = self._new(chain, spent) if known is None else agreed(known, chain, spent, self.population.name)
        if entry.state == "closed":
            raise PrivacyError(
                f"{entry.run} was given up (fedblur population close); start a new run (on population "
                f"{self.population.name} it adds to the total)"
            )
        allowed = max(entry.allowed, self.allowed, needed)
        wanted = replace(entry, allowed=allowed, people=self.people or entry.people)
        limit = self.population.limit()
        more = known is None or wanted.reserved > known.reserved
        asks = wanted.reserved > spent and (more or limit != self._checked)
        if asks:
            self.population.demand_room(wanted)
        self._checked = limit
        if asks or wanted != known:
            self.population.write(wanted)
        return wanted


def agreed(entry: Entry, chain: Chain, spent: int, name: str) -> Entry:
    """Return the entry of a ledger that continues what is known of it, or lacks the very last row; refuse any other."""
    lines = len(chain.links)
    if entry.lines == lines and entry.head == chain.head:
        return entry
    if entry.lines == lines + 1 and entry.before == chain.head:
        return entry  # a kill between note and row
    if lines > entry.lines and chain.links[entry.lines - 1].hash == entry.head:
        return advanced(entry, chain, spent)  # the population's state is the older one
    raise PrivacyError(
        f"{chain.path} was rolled back, or copied and continued elsewhere: population {name} remembers {entry.spent} "
        f"releases, it has {spent}; restore it from a copy, or start a new run"
    )


def account_of(
    given: str | None, data: Federation, event: events.Event, budget: Budget, kind: str, randomness: Randomness
) -> Account | None:
    """Return a run's account with the population of these data; None where none is tracked."""
    population = population_of(given, data)
    if population is None:
        return None
    allowed = accounting.rounds_within(event, budget.epsilon, budget.delta, budget.accountant, budget.rounds)
    people = fingerprint(data) if data.members else ""
    return Account(population, event, allowed, kind, budget.delta, randomness, people)


def covers(search: Path, event: events.Event, rounds: int) -> bool:
    """Return whether the ledger of a search has paid for a trial of so many releases; refuse one that has not."""
    paid = [released for _, released in read_spends(open_ledger(search).links)]
    trial = events.SelfComposed(event, rounds)
    if not any(isinstance(each, events.PrivateSelection) and trial in each.trials for each in paid):
        raise PrivacyError(
            f"{search} is not the ledger of a search that has paid for this trial; start the search again"
        )
    return True


def population_of(given: str | None, data: Federation) -> Population | None:
    """Return the population that a run on these data is charged to; None for public data that nobody named.

    Data without a name belong to the population with a budget that knows their client ids. So nobody passes a budget by
    leaving the name out.
    """
    if given and data.population and given != data.population:
        raise ConfigError(
            f"population={given!r}, but these data are of population {data.population!r}; give one of them"
        )
    name = given or data.population
    if name is not None:
        return Population(name)
    if data.public:
        return None
    people = fingerprint(data)
    known = [each for each in every() if data.members and each.knows(people) and each.limit() is not None]
    if len(known) > 1:
        names = " and ".join(each.name for each in known)
        raise ConfigError(f"the clients of these data are those of populations {names}; give population= to say which")
    return known[0] if known else Population(people)


def fingerprint(data: Federation) -> str:
    """Return the name of data that nobody named: a keyed hash of their client ids, and of how many there are."""
    members = data.members or f"{data.name} {data.train.clients}"
    root = home()
    path = root / "key"
    try:
        if not path.exists():
            with lock(root):
                if not path.exists():  # another process may have been quicker
                    write_atomically(path, os.urandom(32), private=True)
        key = read_bytes(path, way_out="name the population of these data")
    except FileNotFoundError:
        raise RunError(f"{path} is gone; name the population of these data") from None
    return f"unnamed-{hmac.new(key, members.encode(), hashlib.sha256).hexdigest()[:12]}"
