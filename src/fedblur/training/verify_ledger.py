"""Verification of a ledger: is it whole, and does it cover all that the run folder shows? In: a folder. Out: findings.

    chain       every line follows from those before it, byte for byte
    anchors     the newest checkpoint, the summary and the statement remember a part of this very ledger
    owner       the configuration in config.json is the one that the ledger was opened for
    coverage    there is a release for every round that left anything in the folder
    randomness  the ledger, config.json and the summary agree on where the noise came from: the system, or a seed
    budget      the releases are of one kind and within the budget
    epsilon     recomputed from the events, it is what the summary claims

Not found: a folder whose every file was rolled back or rewritten together. There is no secret in a chain; whoever wants
to rule that out keeps a hash elsewhere (the statement prints it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedblur.core.config import canonical, config_hash, from_dict
from fedblur.core.errors import ConfigError, FedBlurError, RunError
from fedblur.core.plugins import loaded
from fedblur.privacy.accounting import ACCOUNTANTS, Accountant
from fedblur.privacy.events import Event, PrivateSelection
from fedblur.privacy.ledger import (
    Budget,
    Chain,
    demand_anchor,
    open_ledger,
    randomness_of,
    read_budget,
    read_randomness,
    read_spends,
)
from fedblur.privacy.totals import spent, together
from fedblur.training.checkpoint import load_newest
from fedblur.training.run_folder import RunFolder, RunSummary, read_json


@dataclass(frozen=True)
class Books:
    """A run's ledger, read and checked line by line."""

    path: Path
    chain: Chain
    budget: Budget
    spends: list[tuple[int, Event]]
    randomness: Literal["operating system", "seed", "unknown"]  # where noise and cohorts came from

    def event(self) -> Event | None:
        """Return everything that was released, as one event."""
        return together([event for _, event in self.spends])

    @property
    def search(self) -> bool:
        """Whether this is the ledger of a search: the winner's folder has no checkpoints, and many configurations."""
        return any(isinstance(event, PrivateSelection) for _, event in self.spends)

    def epsilon(self, accountant: Accountant) -> float | None:
        """Recompute it from the events at the budget's delta; None if this accountant has no bound for them."""
        return spent(self.event(), self.budget.delta, accountant)


def read_books(run: Path) -> Books:
    """Read the ledger of a run folder (or a ledger's own path)."""
    path = RunFolder(run).ledger if run.is_dir() else run
    if not path.exists():
        raise RunError(f"{run} has no ledger; give a run folder")
    chain = open_ledger(path)
    # A seed in config.json is believed first, then the ledger's first line. A ledger of version 0.1 does not name the
    # source of its noise, and config.json speaks for it.
    resolved = read_json(chain.path.parent / "config.json")
    configured = randomness_of(resolved["seed"]) if "seed" in resolved else None
    randomness = configured if configured == "seed" else read_randomness(chain) or configured or "unknown"
    return Books(run, chain, read_budget(chain)[0], read_spends(chain.links), randomness)


def compose(books: list[Books], delta: float | None = None) -> tuple[float, dict[Accountant, float | None]]:
    """Return the total of several runs over the same clients: delta (the smallest of theirs by default) and epsilons.

    Formal guarantee: infinite as soon as one of them is not known to have had secret noise (`unprotected` says why).
    """
    delta = min(book.budget.delta for book in books) if delta is None else delta
    if not 0 < delta < 1:
        raise ConfigError(f"delta={delta} must be in (0, 1)")
    if unprotected(books):
        return delta, dict.fromkeys(ACCOUNTANTS, math.inf)
    event = together([event for book in books for _, event in book.spends])
    return delta, {name: spent(event, delta, name) for name in ACCOUNTANTS}


def unprotected(books: list[Books]) -> str | None:
    """Return why a total over these runs is infinite though each added noise; None if all noise was secret."""
    seeded = sum(book.randomness == "seed" for book in books if book.spends)
    unknown = sum(book.randomness == "unknown" for book in books if book.spends)
    reasons = []
    if seeded:
        reasons.append(f"{_runs(seeded)} drew the noise from a seed, and whoever has the seed can subtract it")
    if unknown:
        reasons.append(f"{_runs(unknown)} did not record where the noise came from, so it is not taken to be secret")
    return "; ".join(reasons) or None


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def verify(run: Path) -> list[str]:
    """Return one line for each thing that is wrong; none for a ledger that can be relied on."""
    folder = RunFolder(run)
    try:
        books = read_books(run)
        resolved, summary = folder.resolved(), folder.read_summary()
    except FedBlurError as error:
        return [str(error)]
    checks = (
        _anchors(folder, books, summary),
        _owner(folder, books, summary, resolved),
        _coverage(folder, books, summary),
        _secrecy(folder, books, summary),
        _budget(books),
        _claim(books, summary),
    )
    return [finding for check in checks for finding in check]


def _anchors(folder: RunFolder, books: Books, summary: RunSummary | None) -> Iterator[str]:
    holders: list[tuple[str, Any]] = []
    try:
        if not books.search:
            checkpoint, _ = load_newest(folder.checkpoints)
            holders.append((f"the checkpoint of round {checkpoint.round}", checkpoint.state.get("ledger")))
    except RunError as error:
        yield str(error)
    statement = read_json(folder.path / "statement.json")
    if summary:
        holders.append(("summary.json", summary.privacy.ledger))
    if statement:
        holders.append(("statement.json", statement.get("ledger")))
    for holder, anchor in holders:
        try:
            demand_anchor(folder.ledger, anchor, holder)
        except RunError as error:
            yield str(error)


def _owner(folder: RunFolder, books: Books, summary: RunSummary | None, resolved: dict[str, Any]) -> Iterator[str]:
    _, owner = read_budget(books.chain)
    if books.search:
        searched = summary.privacy.selection.search if summary and summary.privacy.selection else None
        if owner != searched:
            yield f"the ledger was opened for search {owner or 'none'}, summary.json is of {searched}"
        return
    try:
        here = config_hash(from_dict({key: value for key, value in resolved.items() if key != "own"}))
    except FedBlurError as error:
        # Without the user's own parts a run can neither be verified nor be called wrong.
        made_with = summary.versions if summary else {}
        needed = [name for key in made_with if (name := key.removeprefix("plugin ")) != key and name not in loaded()]
        if needed:
            missing = ", ".join(needed)
            raise RunError(f"{folder.path} was made with {missing}; give it with --plugin to check the run") from None
        yield f"config.json cannot be read: {error}"
        return
    if owner != here:
        yield f"the ledger was opened for configuration {owner or 'none'}, config.json is {here}"


def _coverage(folder: RunFolder, books: Books, summary: RunSummary | None) -> Iterator[str]:
    """Check that each round has its release. Rows that name a stage (voting) are not releases."""
    shown = {row["round"] for row in folder.read_rounds() if "stage" not in row}
    missing = sorted(shown - {round_ for round_, _ in books.spends})
    if missing:
        yield f"{len(missing)} rounds left results but no release in the ledger, the first is round {missing[0]}"
    if summary and summary.privacy.releases > len(books.spends):
        yield f"summary.json counts {summary.privacy.releases} releases, the ledger {len(books.spends)}"


def _secrecy(folder: RunFolder, books: Books, summary: RunSummary | None) -> Iterator[str]:
    """Check that a seeded run says so wherever it states a claim: a seed protects nobody."""
    if books.randomness != "seed":
        return
    if read_randomness(books.chain) == "operating system":
        yield "the ledger says that its noise came from the operating system, config.json has a seed"
    if summary and not summary.privacy.warning:
        yield "summary.json does not say that the noise came from a seed"
    statement = read_json(folder.path / "statement.json")
    total = statement.get("total", {}).get("epsilon", {})
    figures = [float(value) for value in total.values() if value is not None]  # an infinite one is text in JSON
    if statement.get("runs_composed", 1) > 1 and any(map(math.isfinite, figures)):
        yield (
            "statement.json adds this run, whose noise came from a seed, to others and gives a finite epsilon; "
            "make it again with fedblur statement"
        )


def _budget(books: Books) -> Iterator[str]:
    kinds = {event for _, event in books.spends}
    if len(kinds) > 1:
        yield f"the ledger holds {len(kinds)} kinds of releases; a run has one"
    total = books.epsilon(books.budget.accountant)
    if total is None:
        yield f"the {books.budget.accountant} accountant, which the ledger names, has no bound for its events"
    elif total > books.budget.epsilon:
        yield f"epsilon {total:.4g} of the releases is above the budget {books.budget.epsilon:.4g}"


def _claim(books: Books, summary: RunSummary | None) -> Iterator[str]:
    if summary is None:
        return
    claimed, total = summary.privacy.epsilon, books.epsilon(books.budget.accountant)
    releases = summary.privacy.releases
    if len(books.spends) > releases:
        yield (
            f"summary.json counts {releases} releases, the ledger {len(books.spends)}: the run went on after it was "
            "written; fedblur resume ends it and writes another"
        )
    elif len(books.spends) == releases and total is not None and canonical(claimed) != canonical(total):
        yield f"summary.json claims epsilon {claimed:.6g}, the ledger's events give {total:.6g}"
