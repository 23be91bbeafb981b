"""The record of who took part in which release, a hash chain on disk. In: cohorts, before they train. Out: the past.

    line 1    the run's stream of releases and N
    line n+1  {"number": n, "round": t, "clients": [...]}: chosen for the ledger's n-th release

A line is on disk before any of its clients is asked to train, and its release's row in the ledger comes later. So the
record has a line for each row, and perhaps one more: that release was never made, and the next attempt has the same
cohort. A line that a crash cut short is of a cohort of whom nobody trained. A record with fewer lines than the ledger
has rows was rolled back, and is refused: whoever is missing in it would take part too often.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedblur.core.errors import PrivacyError, RunError
from fedblur.core.files import make_folder
from fedblur.privacy.ledger import Chain, Link, read_spends
from fedblur.privacy.participation import Attendance, Ids, Scheduled

_RESTORE = "restore it from a copy, or start a new run (on these clients it adds to the total)"


class ParticipationRecord(Attendance):
    """The past of a run's clients, on disk. Only its owner may read the file."""

    def __init__(self, path: Path, clients: int, stream: str, new: bool = False) -> None:
        """Read the record of this stream; `new`: begin one, where there is none yet."""
        super().__init__(clients)
        self.path = path
        self._chain = Chain(path, "record of participation", private=True)
        if new:
            make_folder(path.parent, private=True)
            with self._chain.writing() as chain:
                if not chain.links:
                    chain.append({"stream": stream, "clients": clients})
        first, *lines = self._chain.read() or [Link({}, "")]
        if first.body != {"stream": stream, "clients": clients}:
            raise RunError(f"{path} is the record of another run; {_RESTORE}")
        for line in lines:
            self.take_in(*self._parsed(line, clients))
        self._chain.links = [Link({}, line.hash) for line in self._chain.links]  # cohorts are kept once

    def note(self, number: int, round_: int, ids: Ids) -> None:
        """Record a cohort, on disk when this returns."""
        with self._chain.writing() as chain:
            if len(chain.links) != number:
                raise PrivacyError(f"{self.path} has {len(chain.links) - 1} cohorts, and release {number} is to come")
            chain.append({"number": number, "round": round_, "clients": ids.tolist()})
        self.take_in(number, ids)

    def anchor(self) -> dict[str, Any]:
        """Return the record's length and last hash, by which a checkpoint finds out later whether it was replaced."""
        return {"lines": len(self._chain.links), "head": self._chain.head}

    def demand_anchor(self, anchor: Any, holder: str) -> None:
        """Refuse a record that does not continue the one that `holder` remembers."""
        lines = anchor.get("lines") if isinstance(anchor, dict) else None
        links = self._chain.links
        if type(lines) is not int or not 1 <= lines <= len(links) or links[lines - 1].hash != anchor.get("head"):
            raise RunError(f"{self.path} is not the record that {holder} remembers: it was cut or replaced; {_RESTORE}")

    def demand_agreement(self, ledger: Path) -> None:
        """Refuse a record that lacks the cohort of a release that is paid for, or knows releases that are not."""
        paid = len(read_spends(Chain(ledger).read()))
        if not paid <= self.latest <= paid + 1:
            raise RunError(
                f"{self.path} has {self.latest} cohorts, and {ledger.name} {paid} releases: one of them was rolled "
                f"back, and who took part is not known; {_RESTORE}"
            )

    def violations(self, sampler: Scheduled) -> Iterator[str]:
        """Find cohorts that the sampler's rule does not allow."""
        past = Attendance(len(self.last))
        for number in range(1, self.latest + 1):
            ids = self.cohort(number)
            assert ids is not None  # numbers have no gaps
            early = int((~sampler.may(number, past)[ids]).sum())
            if early:
                yield f"{early} clients of release {number} were not allowed to take part in it yet"
            past.take_in(number, ids)

    def _parsed(self, line: Link, clients: int) -> tuple[int, Ids]:
        number, named = line.body.get("number"), line.body.get("clients")
        if type(number) is int and isinstance(named, list) and all(type(client) is int for client in named):
            ids = np.array(named, dtype=np.int64)
            if (np.diff(ids) > 0).all() and (not len(ids) or (ids[0] >= 0 and ids[-1] < clients)):
                return number, ids
        raise RunError(f"{self.path} names no cohort where fedblur writes one; {_RESTORE}")
