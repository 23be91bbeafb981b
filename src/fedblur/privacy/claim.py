"""Claim: all that a run states about its privacy (invariant 10). In: what the run's end knows. Out: one typed record.

It is made once, when the run ends. Summary, statement, reports, tables and voting read this record, which is the key
`privacy` of summary.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from fedblur.core.errors import RunError
from fedblur.privacy.accounting import Accountant

UNIT = "client (all samples of one user)"
SEEDED = "NOT PRIVATE: seeded"
NOISELESS = "NOT PRIVATE: no noise"
UNBOUNDED = "NOT PRIVATE: no noise and no clip norm"

UNCLAIMED = "CLAIMS NO ε"

T = TypeVar("T")
_reader: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


@dataclass(frozen=True)
class Selection:
    """The private search that chose a run. The number of trials stays secret, so it is not here."""

    search: str  # hash of the search
    law: str  # of the number of trials
    expected_trials: float
    candidates: int
    epsilon_of_one_trial: float
    epsilon_of_the_choice: float
    score_noise_std: float
    score_clients: int  # validation clients
    score_clients_protected: bool  # whether noise hides them
    score: float | None = None  # the winner's, as released


@dataclass(frozen=True)
class PopulationTotal:
    """The total of all runs on the people of this one, when it ended (docs/populations.md)."""

    name: str
    epsilon: float | None  # of all releases that were made; None: no accountant has a bound
    reserved: float | None  # with those that other runs may still make
    delta: float
    budget: float | None  # ε; None: tracked, and nothing is refused
    runs: int  # that have released anything


@dataclass(frozen=True)
class OwnPart:
    """A part of a run that is not FedBlur's own, and what nobody has checked about it."""

    kind: str
    name: str
    module: str  # where its code is
    unchecked: str
    audit: Literal["passed", "failed", "not run"] | None = None  # None: what is claimed does not rest on its code
    findings: str | None = None  # of the audit

    @property
    def words(self) -> str:
        return f"{self.kind} {self.name!r} from module {self.module}"

    @property
    def unclaimed(self) -> str | None:
        """Return why a run with this part claims nothing; None where it may claim an ε."""
        if self.audit in (None, "passed"):
            return None
        outcome = f"failed ({self.findings})" if self.audit == "failed" else "was not run"
        return f"{self.words} is not FedBlur's, and its audit {outcome}"

    @property
    def told(self) -> str:
        """Return the part, its audit, and what is unchecked, in words."""
        audit = "" if self.audit is None else f", audit {self.audit}" + (f" ({self.findings})" if self.findings else "")
        return f"{self.words}{audit}; unchecked: {self.unchecked}"


@dataclass(frozen=True)
class Claim:
    """The claim that a result must state. A claim about votes has queries and no clip norm."""

    warning: str | None  # why the run protects nobody; None: it protects its clients
    epsilon: float
    delta: float
    accountant: Accountant
    adjacency: str
    sampling: str
    mechanism: str
    noise_multiplier: float
    clip_norm: float | None  # S at the end; None: labels were released, not sums of updates
    expected_cohort: float
    releases: int
    trust_model: str
    tuning: str
    signal_to_noise: float | None
    unit: str = UNIT
    ledger: dict[str, Any] | None = None  # its length and last hash
    cautions: tuple[str, ...] | None = None  # settings that are valid but suspicious
    clipping: str | None = None
    support: str | None = None
    queries: int | None = None
    vote_noise_std: float | None = None
    checks: int | None = None
    check_noise_std: float | None = None
    epsilon_against_server: float | None = None  # where the server sees no single update
    tuned: str | None = None  # by `fedblur tune`: which way; `tuning` says what it cost
    selection: Selection | None = None
    population: PopulationTotal | None = None  # of private data, or where one was named
    own_parts: tuple[OwnPart, ...] | None = None  # that are not FedBlur's; None: there are none

    def __post_init__(self) -> None:
        told = (self.queries, self.vote_noise_std, self.checks, self.check_noise_std)
        if self.votes and None in told:
            raise ValueError("a claim without clip_norm is about votes, and says how many and how noisy they are")

    @property
    def votes(self) -> bool:
        """Whether labels were released, not sums of updates."""
        return self.clip_norm is None

    @property
    def unclaimed(self) -> str | None:
        """Return why nothing is claimed: a part that ε rests on is not FedBlur's, and did not pass an audit."""
        return unclaimed(self.own_parts or ())


def why_not_private(
    private_noise: bool, noise_multiplier: float, clip_norm: float | None = None, unclaimed: str | None = None
) -> str | None:
    """Return why a run protects nobody; None where it protects its clients. `private_noise`: nobody has its seed.

    `unclaimed`: why a part that is not FedBlur's lets the run claim nothing.
    """
    if noise_multiplier == 0:
        return UNBOUNDED if clip_norm is not None and math.isinf(clip_norm) else NOISELESS
    if not private_noise:
        return SEEDED
    return None if unclaimed is None else f"{UNCLAIMED}: {unclaimed}"


def unclaimed(parts: Iterable[OwnPart]) -> str | None:
    """Return why a run with these parts claims nothing; None where none of them stands in the way."""
    return "; ".join(reason for part in parts if (reason := part.unclaimed)) or None


def to_json(record: Any) -> dict[str, Any]:
    """Return a record as JSON objects, without fields that do not apply to it (None by default)."""
    return {
        field.name: _plain(value)
        for field in fields(record)
        if (value := getattr(record, field.name)) is not None or field.default is MISSING
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return to_json(value) if is_dataclass(value) else value


def from_json(kind: type[T], table: Mapping[str, Any], name: object) -> T:
    """Read a record back; keys of other versions are ignored. `name`: where it was read, for the error."""
    try:
        record: T = _reader(kind).validate_python(table)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RunError(f"{name} is not what fedblur writes: {where}: {first['msg'].lower()}; restore it") from None
    return record
