"""Ledgers as files: opened whole to read, compared with what others remember, closed when their run ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedblur.core.errors import RunError
from fedblur.privacy.ledger import (
    CUT_SHORT,
    Chain,
    ChainError,
    Link,
    Subject,
    cut_release,
    kind_of,
    now,
    read_budget,
    read_spends,
    spend_line,
)


def read_subject(chain: Chain) -> Subject | None:
    """Read what a ledger says of its run; None for a search's, and for one of version 0.2, which says nothing."""
    stored = chain.links[0].body.get("subject") if chain.links else None
    if stored is None:
        return None
    with contextlib.suppress(TypeError):
        subject = Subject(**stored)
        kinds = [type(value) for value in (subject.config, subject.unit, subject.clients, subject.event)]
        if kinds == [str, str, int, dict] and type(subject.noise_multiplier) in (int, float):
            return subject
    raise ChainError(f"{chain.path} does not say what it is about; it is not a ledger of this version")


def read_stream(path: Path) -> str:
    """Read the name of a run's stream of releases from its ledger, or draw one for a ledger that is to be opened."""
    subject = read_subject(chain) if path.exists() and (chain := Chain(path)).read() else None
    stream = "" if subject is None else subject.event.get("stream")
    return stream if isinstance(stream, str) and stream else os.urandom(16).hex()


def close_ledger(path: Path, released: Mapping[str, str]) -> None:
    """Write down the digests of what was released, unless the last line says the same. A torn line counts first."""
    ledger = Chain(path)
    with ledger.writing() as chain:
        if not chain.links:
            raise ChainError(f"{path} does not begin with a budget; restore it from a copy")
        if cut_release(chain) and (spent := read_spends(chain.links)):
            round_, event = spent[-1]
            chain.append(spend_line(round_ + 1, event) | {"note": CUT_SHORT})
        last = chain.links[-1].body
        if chain.torn or last.get("kind") != "close" or last.get("released") != dict(released):
            chain.append({"kind": "close", "released": dict(released), "at": now()})


def read_closing(chain: Chain) -> dict[str, str] | None:
    """Read what the closing line holds; None for a ledger that is not closed, or was opened again by a release."""
    last = chain.links[-1] if chain.links else None
    return None if last is None or kind_of(last) != "close" else released_by(last)


def released_by(link: Link) -> dict[str, str]:
    """Return the digests of a closing line."""
    released = link.body.get("released")
    if not isinstance(released, dict) or not all(isinstance(value, str) for value in released.values()):
        raise ChainError("the ledger has a closing line that fedblur did not write; restore it from a copy")
    return released


def begins_with(chain: Chain, lines: Any, head: Any) -> bool:
    """Return whether the first so many lines, of those that were read, end with this hash."""
    return type(lines) is int and 0 < lines <= len(chain.links) and chain.links[lines - 1].hash == head


def read_if_there(path: Path) -> Chain:
    """Read a ledger; one that is not there has no lines."""
    chain = Chain(path)
    if path.exists():
        chain.read()
    return chain


def open_ledger(path: Path) -> Chain:
    """Open a ledger to read it: whole, or an error that names the first bad line."""
    chain = Chain(path)
    if chain.read() and not chain.torn:
        read_budget(chain)
        return chain
    what = "ends in the middle of a line; if its run crashed, fedblur resume repairs it" if chain.torn else "is empty"
    raise ChainError(f"{path} {what}")


def demand_anchor(path: Path, anchor: Any, holder: str) -> None:
    """Refuse a ledger that does not continue the one that `holder` remembers."""
    if not isinstance(anchor, dict) or {"lines", "head"} - anchor.keys():
        raise RunError(f"{holder} names no ledger; it was made by an earlier version: start a new run")
    if type(anchor["lines"]) is not int or anchor["lines"] < 1 or not isinstance(anchor["head"], str):
        raise RunError(f"{holder} does not name its ledger as fedblur does; restore it from a copy")
    if not begins_with(read_if_there(path), anchor["lines"], anchor["head"]):
        raise ChainError(
            f"{path} is not the ledger that {holder} remembers ({anchor['lines']} lines, {anchor['head'][:12]}…): "
            "it was cut or replaced, and what was spent is unknown; restore it from a copy"
        )
