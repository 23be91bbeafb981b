"""Verification of a ledger: is it whole, and does it cover all that the run folder shows? In: a folder. Out: findings.

    chain       every line follows from those before it, byte for byte
    anchors     the newest checkpoint, the summary and the statement remember a part of this very ledger
    owner       the configuration in config.json is the one that the ledger was opened for
    plan        noise, sampling, δ and rounds are recomputed from config.json and N, and are those of the ledger
    coverage    there is a release for every round up to the last that left anything in the folder
    attendance  the record of who took part has a cohort for every release, and none that the sampling does not allow
    closing     model, configuration, summary and rounds are what the ledger was closed with
    randomness  the ledger, config.json and the summary agree on where the noise came from: the system, or a seed
    budget      the releases are of one kind and within the budget
    own parts   the summary names the parts that are not FedBlur's, and the audit of mechanism and sampler holds again
    claim       what the summary says of ε, noise, N and warnings is what follows from ledger and configuration
    statement   so is what statement.json says (its pages for people are not read)

Not found: a folder whose every file was rolled back or rewritten together. There is no secret in a chain. A signature
(`signature.py`) finds what was rewritten without the operator's key; a seal that was kept elsewhere finds the rest.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedblur.core.config import Config, canonical, config_digest, config_hash, from_dict
from fedblur.core.errors import ConfigError, FedBlurError, PrivacyError, RunError
from fedblur.core.files import read_json_if_there
from fedblur.core.plugins import loaded
from fedblur.core.registry import describe
from fedblur.core.rng import make_rng
from fedblur.privacy import events
from fedblur.privacy.accounting import ACCOUNTANTS, Accountant, PrivacyPlan, adjacency
from fedblur.privacy.claim import UNIT, to_json
from fedblur.privacy.events import Event, PrivateSelection
from fedblur.privacy.ledger import (
    Budget,
    Chain,
    Subject,
    kind_of,
    randomness_of,
    read_budget,
    read_randomness,
    read_spends,
)
from fedblur.privacy.ledger_file import demand_anchor, open_ledger, read_closing, read_subject, released_by
from fedblur.privacy.participation import Scheduled
from fedblur.privacy.totals import spent, together
from fedblur.training.checkpoint import load_newest, rounds_kept
from fedblur.training.own_parts import audited, own_parts
from fedblur.training.participation_record import ParticipationRecord
from fedblur.training.run_folder import RunFolder, RunSummary
from fedblur.training.setup import plan_for

_ALIKE = 1e-3  # relative: another version of an accountant may calibrate σ a little differently


@dataclass(frozen=True)
class Books:
    """A run's ledger, read and checked line by line."""

    path: Path
    chain: Chain
    budget: Budget
    spends: list[tuple[int, Event]]
    randomness: Literal["operating system", "seed", "unaudited part", "unknown"]  # where noise and cohorts came from

    def event(self) -> Event | None:
        """Return everything that was released, as one event."""
        return together([event for _, event in self.spends])

    @property
    def bound(self) -> bool:
        """Whether the ledger names its plan, and is closed with digests of what was released. Those of 0.2 do not."""
        return self.search or read_subject(self.chain) is not None

    @property
    def search(self) -> bool:
        """Whether this is the ledger of a search: the winner's folder has no checkpoints, and many configurations."""
        return any(isinstance(event, PrivateSelection) for _, event in self.spends)

    def epsilon(self, accountant: Accountant) -> float | None:
        """Recompute it from the events at the budget's delta; None if this accountant has no bound for them."""
        return spent(self.event(), self.budget.delta, accountant)


def ledger_path(run: Path) -> Path:
    """Return the path of a run's ledger; `run` may be that path."""
    path = RunFolder(run).ledger if run.is_dir() else run
    if not path.exists():
        raise RunError(f"{run} has no ledger; give a run folder")
    return path


def read_books(run: Path) -> Books:
    """Read the ledger of a run folder (or a ledger's own path)."""
    chain = open_ledger(ledger_path(run))
    # A seed in config.json is believed first, then the ledger's first line. A ledger of version 0.1 does not name the
    # source of its noise, and config.json speaks for it.
    resolved = read_json_if_there(chain.path.parent / "config.json") or {}
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
    event = _all(books)
    return delta, {name: spent(event, delta, name) for name in ACCOUNTANTS}


def _all(books: list[Books]) -> Event | None:
    """Join all releases of several runs; those of a copy that went on elsewhere count apart from the original's."""
    return together([events.apart(event, str(which)) for which, book in enumerate(books) for _, event in book.spends])


def neighbours(books: list[Books]) -> str | None:
    """Return between which neighbours a total over these runs holds: the weakest of theirs. None: between none."""
    event = _all(books)
    try:
        return None if event is None else adjacency(event)
    except PrivacyError:
        return None


def unprotected(books: list[Books]) -> str | None:
    """Return why a total over these runs is infinite though each added noise; None if all noise was secret."""
    seeded = sum(book.randomness == "seed" for book in books if book.spends)
    unknown = sum(book.randomness == "unknown" for book in books if book.spends)
    unaudited = sum(book.randomness == "unaudited part" for book in books if book.spends)
    reasons = []
    if unaudited:
        reasons.append(f"{_runs(unaudited)} had a mechanism or a sampler of the user's own that passed no audit")
    if seeded:
        reasons.append(f"{_runs(seeded)} drew the noise from a seed, and whoever has the seed can subtract it")
    if unknown:
        reasons.append(f"{_runs(unknown)} did not record where the noise came from, so it is not taken to be secret")
    return "; ".join(reasons) or None


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


class MissingPart(RunError):
    """A user's own part that is not loaded: without it a run can neither be verified nor be called wrong."""


def verify(run: Path, stated: bool = True) -> list[str]:
    """Return one line for each thing that is wrong; none for a ledger that can be relied on.

    `stated`: with statement.json, unless it is about to be made again.
    """
    folder = RunFolder(run)
    try:
        books = read_books(run)
        resolved, summary = folder.resolved(), folder.stored_summary()
        path = folder.path / "statement.json"
        statement = (stated and read_json_if_there(path, "make it again with fedblur statement")) or {}
        config = None if books.search else _configuration(folder, summary, resolved)
    except MissingPart:
        raise
    except FedBlurError as error:
        return [str(error)]
    checks = (
        _anchors(folder, books, summary, statement),
        _owner(books, summary, config),
        _plan(folder, books, summary, config),
        _coverage(folder, books, summary, config),
        _participation(folder, books, summary, config),
        _closing(folder, books, summary),
        _secrecy(books, summary, statement),
        _budget(books),
        _own_parts(folder, books, summary, config),
        _claim(books, summary),
        _statement(folder, books, statement, config),
    )
    try:
        return [finding for check in checks for finding in check]
    except FedBlurError as error:
        return [str(error)]


def _configuration(folder: RunFolder, summary: RunSummary | None, resolved: dict[str, Any]) -> Config:
    try:
        return from_dict({key: value for key, value in resolved.items() if key != "own"})
    except FedBlurError as error:
        made_with = summary.versions if summary else {}
        needed = [name for key in made_with if (name := key.removeprefix("plugin ")) != key and name not in loaded()]
        if needed:
            missing = ", ".join(needed)
            raise MissingPart(
                f"{folder.path} was made with {missing}; give it with --plugin to check the run"
            ) from None
        raise RunError(f"config.json cannot be read: {error}") from None


def _anchors(folder: RunFolder, books: Books, summary: RunSummary | None, statement: dict[str, Any]) -> Iterator[str]:
    holders: list[tuple[str, Any]] = []
    try:
        if not books.search:
            checkpoint, _ = load_newest(folder.checkpoints)
            holders.append((f"the checkpoint of round {checkpoint.round}", checkpoint.state.get("ledger")))
    except RunError as error:
        yield str(error)
    if summary:
        holders.append(("summary.json", summary.privacy.ledger))
    if statement:
        holders.append(("statement.json", statement.get("ledger")))
    for holder, anchor in holders:
        try:
            demand_anchor(folder.ledger, anchor, holder)
        except RunError as error:
            yield str(error)


def _owner(books: Books, summary: RunSummary | None, config: Config | None) -> Iterator[str]:
    _, owner = read_budget(books.chain)
    if config is None:
        searched = summary.privacy.selection.search if summary and summary.privacy.selection else None
        if summary and owner != searched:
            yield f"the ledger was opened for search {owner or 'none'}, summary.json is of {searched}"
        return
    subject = read_subject(books.chain)
    here = config_hash(config)
    if owner != here:
        yield f"the ledger was opened for configuration {owner or 'none'}, config.json is {here}"
    elif subject is not None and subject.config != config_digest(config):
        yield "the ledger's first line is of another configuration than config.json"


def replanned(folder: RunFolder, config: Config, subject: Subject, summary: RunSummary | None) -> PrivacyPlan:
    """Recompute the plan from the configuration, N, and the model's number of parameters."""
    if config.voting is not None:
        plan: PrivacyPlan = config.voting.replan(config, subject.clients, events.from_json(subject.event))
        return plan
    if folder.model.exists():
        parameters = sum(tensor.numel() for tensor in folder.read_model().values())
    else:
        parameters = load_newest(folder.checkpoints)[0].tensors["theta"].numel()
    if summary is not None and summary.parameters != parameters:
        raise RunError(f"summary.json says {summary.parameters} parameters, the model has {parameters}")
    stream = events.stream_of(events.from_json(subject.event))
    return plan_for(config, subject.clients, parameters).in_stream(stream)


def _plan(folder: RunFolder, books: Books, summary: RunSummary | None, config: Config | None) -> Iterator[str]:
    """Check that the ledger's figures follow from the configuration and N.

    A ledger of version 0.2 does not state N, so the summary's is taken: whoever drops the plan gains nothing by it.
    """
    subject = read_subject(books.chain) or _implied(books, summary, config)
    if config is None or subject is None:
        return
    plan = replanned(folder, config, subject, summary)
    budget = Budget(plan.epsilon_target, plan.delta, config.accountant, plan.rounds)
    stated = [
        ("unit", subject.unit, UNIT),
        ("budget for epsilon", books.budget.epsilon, budget.epsilon),
        ("delta", books.budget.delta, budget.delta),
        ("accountant", books.budget.accountant, budget.accountant),
        ("number of rounds", books.budget.rounds, budget.rounds),
        ("noise multiplier", subject.noise_multiplier, plan.noise_multiplier),
        ("planned release", subject.event, events.to_json(plan.event())),
        ("source of noise", _source(books, randomness_of(config.seed)), randomness_of(config.seed)),
    ]
    if config.clients is not None and config.voting is None:
        stated.append(("number of clients", subject.clients, config.clients))
    for name, here, there in stated:
        if not _alike(here, there):
            yield f"the ledger's {name} is {here}, config.json gives {there}"
    kinds = {canonical(events.to_json(event)) for _, event in books.spends}
    if kinds - {canonical(subject.event)}:
        yield "the ledger holds releases of another kind than its first line planned"
    if summary is None:
        return
    claim = summary.privacy
    claimed = [
        ("number of clients", summary.clients, subject.clients),
        ("unit", claim.unit, subject.unit),
        ("delta", claim.delta, plan.delta),
        ("accountant", claim.accountant, config.accountant),
        ("noise multiplier", claim.noise_multiplier, plan.noise_multiplier),
        ("expected cohort", claim.expected_cohort, plan.expected_cohort),
    ]
    if config.voting is None:
        claimed += [
            ("mechanism", claim.mechanism, canonical(describe(config.mechanism))),
            ("sampling", claim.sampling, plan.sampler.description),
        ]
        claimed += [("clip norm", claim.clip_norm, config.clip_norm)] if config.clipping is None else []
    for name, here, there in claimed:
        if not _alike(here, there):
            yield f"summary.json's {name} is {here}, config.json and the ledger give {there}"
    derived = folder.read_summary()
    if derived is not None and derived.privacy.warning != claim.warning:
        yield f"summary.json's warning is {claim.warning!r}, the ledger and config.json say {derived.privacy.warning!r}"


def _source(books: Books, configured: str) -> str:
    """Return where the ledger says that noise came from. That a part passed no audit says nothing of the source."""
    recorded = read_randomness(books.chain)
    unsaid = "not named" if books.bound else configured  # version 0.1 never named it
    return "operating system" if recorded == "unaudited part" else recorded or unsaid


def _own_parts(folder: RunFolder, books: Books, summary: RunSummary | None, config: Config | None) -> Iterator[str]:
    """Check that all parts of the user's own are named, and audit a mechanism and a sampler again."""
    own = own_parts(config) if config is not None else ()
    subject = read_subject(books.chain)
    if config is None or summary is None or subject is None:
        return
    if any(part.audit for part in own):
        plan = replanned(folder, config, subject, summary)
        own = audited(own, config, plan, summary.parameters, make_rng(None))
    named = {(part.kind, part.name, part.module): part for part in summary.privacy.own_parts or ()}
    for part in own:
        stated = named.get((part.kind, part.name, part.module))
        if stated is None:
            yield f"summary.json does not say that {part.words} is not FedBlur's"
        elif part.unclaimed and not stated.unclaimed:
            yield f"summary.json says that {part.words} passed its audit; here it {part.audit}: {part.findings}"
    if summary.privacy.unclaimed and read_randomness(books.chain) == "operating system":
        yield "the ledger does not say that a part passed no audit, summary.json does"


def _implied(books: Books, summary: RunSummary | None, config: Config | None) -> Subject | None:
    if config is None or summary is None or not books.spends:
        return None
    claim, (_, event) = summary.privacy, books.spends[0]
    return Subject(config_digest(config), claim.unit, summary.clients, claim.noise_multiplier, events.to_json(event))


def _alike(one: Any, other: Any) -> bool:
    """Return whether two values agree, floats up to what another version's calibration may change."""
    if isinstance(one, float) or isinstance(other, float):
        return one == other or (
            isinstance(one, int | float) and isinstance(other, int | float) and math.isclose(one, other, rel_tol=_ALIKE)
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def _coverage(folder: RunFolder, books: Books, summary: RunSummary | None, config: Config | None) -> Iterator[str]:
    """Check that each round up to the last that was shown has its release. Votes and searches have no rounds."""
    shown = [row["round"] for row in folder.read_rounds() if "stage" not in row]
    if config is not None and config.voting is None:
        shown += [folder.model_round(), *rounds_kept(folder.checkpoints), summary.rounds if summary else 0]
    paid = {round_ for round_, _ in books.spends}
    missing = next(round_ for round_ in itertools.count(1) if round_ not in paid)
    if missing <= max(shown, default=0):
        yield f"round {max(shown)} left results, and round {missing} has no release in the ledger"
    if summary and summary.privacy.releases > len(books.spends):
        yield f"summary.json counts {summary.privacy.releases} releases, the ledger {len(books.spends)}"


def _participation(folder: RunFolder, books: Books, summary: RunSummary | None, config: Config | None) -> Iterator[str]:
    """Check that the record of who took part belongs to this ledger, and that everyone took part as is accounted."""
    subject = read_subject(books.chain)
    if config is None or subject is None or not getattr(config.sampling, "scheduled", False):
        return
    sampler = replanned(folder, config, subject, summary).sampler
    if isinstance(sampler, Scheduled) and sampler.recorded:
        record = ParticipationRecord(folder.participation, sampler.clients, sampler.stream)
        record.demand_agreement(folder.ledger)
        checkpoint, _ = load_newest(folder.checkpoints)
        record.demand_anchor(checkpoint.state.get("participation"), f"the checkpoint of round {checkpoint.round}")
        yield from record.violations(sampler)


def _closing(folder: RunFolder, books: Books, summary: RunSummary | None) -> Iterator[str]:
    """Check that what was released is what the ledger was closed with. Ledgers of version 0.2 were not closed."""
    closing = read_closing(books.chain)
    if closing is None:
        if summary and summary.complete and read_subject(books.chain) is not None:
            yield (
                "summary.json says that the run is complete, and the ledger has no closing line: it was cut, or the "
                "run was killed as it ended (fedblur resume closes it)"
            )
        return
    for before, after in itertools.pairwise(books.chain.links):
        both = kind_of(before) == kind_of(after) == "close"
        if both and released_by(before).get("model") != released_by(after).get("model"):
            yield "the ledger was closed twice, with two models: one of them was never trained by this run"
    for part, digest in folder.released().items():
        if closing.get(part) != digest:
            name = getattr(folder, part).name
            yield f"{name} is not what the ledger was closed with: it was changed, replaced or removed"


def _secrecy(books: Books, summary: RunSummary | None, statement: dict[str, Any]) -> Iterator[str]:
    """Check that a seeded run says so wherever it states a claim: a seed protects nobody."""
    if books.randomness != "seed":
        return
    if read_randomness(books.chain) == "operating system":
        yield "the ledger says that its noise came from the operating system, config.json has a seed"
    if summary and not summary.privacy.warning:
        yield "summary.json does not say that the noise came from a seed"
    total = statement.get("total")
    figures = total.get("epsilon") if isinstance(total, dict) else None
    infinite = not isinstance(figures, dict) or all(value in (None, "inf") for value in figures.values())
    if statement.get("runs_composed", 1) != 1 and not infinite:  # infinity is text in JSON
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
    total = math.inf if summary.privacy.unclaimed else total
    releases = summary.privacy.releases
    if len(books.spends) > releases:
        yield (
            f"summary.json counts {releases} releases, the ledger {len(books.spends)}: the run went on after it was "
            "written; fedblur resume ends it and writes another"
        )
    elif len(books.spends) == releases and total is not None and canonical(claimed) != canonical(total):
        yield f"summary.json claims epsilon {claimed:.6g}, the ledger's events give {total:.6g}"


def _statement(folder: RunFolder, books: Books, statement: dict[str, Any], config: Config | None) -> Iterator[str]:
    """Check what statement.json says of this run; earlier versions said less."""
    summary = folder.read_summary()
    if not statement or summary is None:
        return
    claim = summary.privacy
    truth = {
        "private": not claim.warning,
        "epsilon": {name: math.inf if claim.unclaimed else books.epsilon(name) for name in ACCOUNTANTS},
        "delta": books.budget.delta,
        "clients": summary.clients,
        "releases": len(books.spends),
        "claim": to_json(replace(claim, ledger=None)),
    }
    truth |= {} if config is None else {"seed": config.seed, "config_hash": config_hash(config)}
    if statement.get("runs_composed") == 1:
        truth["total"] = dict(zip(("delta", "epsilon"), compose([books]), strict=True))
    wrong = [*_differing(statement, json.loads(canonical(truth)))]
    if wrong:
        yield f"statement.json says something else of {', '.join(wrong)} than ledger and summary; make it again"


def _differing(stated: dict[str, Any], truth: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key in sorted(truth.keys() & stated.keys()):
        here, there = stated[key], truth[key]
        if isinstance(here, dict) and isinstance(there, dict):
            yield from _differing(here, there, f"{prefix}{key}.")
        elif not _alike(here, there):
            yield f"{prefix}{key}"
