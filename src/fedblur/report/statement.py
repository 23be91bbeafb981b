"""The privacy statement of a run. In: a run folder. Out: one page as Markdown, HTML and JSON.

It follows what the field asks a private result to report (Ponomareva et al. 2023, "How to DP-fy ML"), for a reviewer
who has never seen the project. Everything in it is recomputed from the ledger or read from the run's own files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedblur.accounting import zcdp
from fedblur.checkpoint import write_atomically
from fedblur.config import canonical, config_hash, from_dict
from fedblur.errors import RunError
from fedblur.ledger import read_randomness
from fedblur.report.page import Page, Section, html, markdown
from fedblur.report.rounding import rounded_up
from fedblur.report.statement_how import how
from fedblur.report.statement_words import QUESTIONS, assumed, counted, delta_against, meaning, not_protected
from fedblur.runfolder import RunFolder
from fedblur.verification import ACCOUNTANTS, Books, compose, read_books, read_json, unprotected, verify

SEEDED = "not private: seeded noise"


@dataclass(frozen=True)
class Statement:
    """What a run claims, and all that the claim rests on."""

    run: Path
    summary: dict[str, Any]
    config: dict[str, Any]
    books: Books
    findings: list[str]  # of `ledger verify`
    also: tuple[Books, ...] = ()  # other runs on the same clients: tuning, earlier tries
    tuning: str = ""

    @property
    def privacy(self) -> dict[str, Any]:
        found: dict[str, Any] = self.summary["privacy"]
        return found

    @property
    def not_private(self) -> str | None:
        """Why this very run protects nobody, in plain words."""
        warning = self.privacy["warning"]
        if not warning:  # the ledger's word counts too
            return SEEDED if self.books.randomness == "seed" else None
        return SEEDED if "seeded" in warning else str(warning).replace("NOT PRIVATE", "not private")

    @property
    def seeded(self) -> bool:
        return self.not_private == SEEDED

    @property
    def in_floats(self) -> bool:
        """Whether version 0.1 made the run: its Gaussian noise was added in floating point (docs/privacy.md).

        Its ledgers do not say where noise comes from; later ones do, and their noise is of whole numbers.
        """
        whole = not self.votes and self.config["mechanism"]["name"] in ("ddgauss", "skellam")
        return read_randomness(self.books.chain) is None and not whole

    @property
    def votes(self) -> bool:
        """Whether labels were released, not sums of updates."""
        return self.privacy["clip_norm"] is None

    @property
    def chosen(self) -> dict[str, Any]:
        """How a private search found this run; empty for a run of its own."""
        return self.privacy.get("selection") or {}

    @property
    def scored(self) -> int:
        """Validation clients whose scores decided without noise."""
        open_ = self.chosen and not self.chosen["score_clients_protected"]
        return int(self.chosen["score_clients"]) if open_ else 0

    def not_protected(self) -> tuple[str, ...]:
        return not_protected(self.in_floats, self.votes, self.scored)

    def unprotected(self) -> str | None:
        """Why the total over this run and the others is infinite though they added noise."""
        return unprotected([self.books, *self.also])

    def epsilons(self) -> dict[str, float | None]:
        return {name: self.books.epsilon(name) for name in ACCOUNTANTS}

    def _config_hash(self) -> str:
        with RunFolder(self.run).reading():
            return config_hash(from_dict({key: value for key, value in self.config.items() if key != "own"}))

    def one_line(self) -> str:
        """The whole claim in a line."""
        delta, other = self.books.budget.delta, "rdp" if self.books.budget.accountant == "pld" else "pld"
        main, second = self.epsilons()[self.books.budget.accountant], self.epsilons()[other]
        also = "" if second is None else f"; {other.upper()} {rounded_up(second)}"
        verified = "ledger verified" if not self.findings else "LEDGER NOT VERIFIED"
        claim = (
            f"ε = {rounded_up(main)} at δ = {delta:.3g} ({self.books.budget.accountant.upper()}{also}), "
            f"{self.privacy['adjacency']}, {counted(len(self.books.spends), 'release')}, {verified}"
        ) + (f", NOT for the {self.scored} validation clients" if self.scored else "")
        if self.in_floats:
            claim += ", NOT against someone with the exact released numbers: version 0.1 added noise in floating point"
        return f"{self.not_private.upper()} (with secret noise: {claim})" if self.not_private else claim

    def facts(self) -> dict[str, Any]:
        """The machine-readable form."""
        privacy = {key: value for key, value in self.privacy.items() if key not in ("ledger", "epsilon", "warning")}
        total_delta, total = compose([self.books, *self.also])
        return {
            "statement": "fedblur privacy statement, version 1",
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "private": self.not_private is None,
            "not_private_because": self.not_private,
            "epsilon": self.epsilons(),
            "delta": self.books.budget.delta,
            "delta_times_clients": self.books.budget.delta * self.summary["clients"],
            "zcdp_rho": zcdp(self.books.event()),
            "clients": self.summary["clients"],
            "releases": len(self.books.spends),
            "claim": privacy,
            "runs_composed": 1 + len(self.also),
            "total": {"delta": total_delta, "epsilon": total, "infinite_because": self.unprotected()},
            "tuning": self.tuning or None,
            "assumed": list(assumed(self.seeded, self.privacy["sampling"])),
            "not_protected": list(self.not_protected()),
            "seed": self.config.get("seed"),
            "versions": self.summary["versions"],
            "config_hash": self._config_hash(),
            "ledger": {"lines": len(self.books.chain.links), "head": self.books.chain.head},
            "ledger_findings": self.findings,
        }


def read_statement(run: Path, also: Sequence[Path] = (), tuning: str = "") -> Statement:
    """Everything about a finished run."""
    folder = RunFolder(run)
    config, summary = folder.resolved(), read_json(folder.summary)
    if not summary:
        raise RunError(f"{run} has no summary.json: the run never ended; go on with: fedblur resume {run}")
    return Statement(
        run, summary, config, read_books(run), verify(run), tuple(read_books(other) for other in also), tuning
    )


def write_statement(run: str | Path, also: Sequence[Path] = (), tuning: str = "") -> tuple[Statement, Path]:
    """statement.md, .html and .json in the run folder; the Markdown's path comes back."""
    run = Path(run)
    statement = read_statement(run, also, tuning)
    page = page_of(statement)
    write_atomically(run / "statement.md", markdown(page).encode())
    write_atomically(run / "statement.html", html(page).encode())
    facts = json.loads(canonical(statement.facts()))
    write_atomically(run / "statement.json", (json.dumps(facts, indent=2) + "\n").encode())
    return statement, run / "statement.md"


def page_of(statement: Statement) -> Page:
    """The statement as a page: the same for Markdown and HTML."""
    notice = None
    if statement.not_private:
        notice = (
            f"This run is {statement.not_private}. The seed is on this page: anyone can compute the noise and subtract "
            "it. The figures below would hold for the same settings with noise and cohorts from the operating system."
            if statement.seeded
            else f"This run is {statement.not_private}."
        )
    if statement.findings:
        notice = f"{notice or ''} The ledger could not be verified: {'; '.join(statement.findings)}.".strip()
    sections = (
        _claim(statement), _who(statement), how(statement), _tuning(statement), _limits(statement), _record(statement),
    )  # fmt: skip
    return Page("Privacy statement", statement.one_line(), notice, sections)


def _claim(statement: Statement) -> Section:
    epsilons, delta, clients = statement.epsilons(), statement.books.budget.delta, statement.summary["clients"]
    rho = zcdp(statement.books.event())
    each = [
        (
            f"ε by {name.upper()}",
            "this accountant has no bound for this mechanism" if value is None else rounded_up(value),
        )
        for name, value in epsilons.items()
    ]
    zero = (
        "does not apply: no useful bound with this sampling and noise; the RDP figure is the comparable one"
        if rho is None
        else f"ρ = {rho:.4g}"
    )
    main, neighbours = epsilons[statement.books.budget.accountant], statement.privacy["adjacency"]
    text = _introduction(statement) + meaning(main, delta, statement.seeded, neighbours)
    title = "The claim" if statement.not_private is None else "What is not claimed for this run"
    return Section(title, text, [*each, ("δ", f"{delta:.4g}. {delta_against(delta, clients)}"), ("zCDP", zero)])


def _introduction(statement: Statement) -> str:
    summary, config = statement.summary, statement.config
    model = (config.get("own") or {}).get("model") or config["model"]["name"]
    methods = " + ".join(method["name"] for method in config["method"]) or "DP-FedAvg"
    return (
        f"A model ({model}, {summary['parameters']:,} parameters) was trained by federated learning "
        f"({methods}) on the data of {summary['clients']:,} clients, with "
        f"{counted(len(statement.books.spends), 'release')} of {_released(statement)}. Its accuracy is "
        f"{100 * summary['accuracy']:.1f} % on {summary['evaluated_on']} data. "
    )


def _released(statement: Statement) -> str:
    if statement.chosen:
        return "the winner of a private search, with all that its training released"
    return "labels by noisy votes" if statement.votes else "noisy sums"


def _who(statement: Statement) -> Section:
    privacy = statement.privacy
    rows = [
        ("unit of privacy", f"{privacy['unit']}: everything that one client contributed, in all rounds"),
        ("neighbours", privacy["adjacency"]),
        ("population", f"{statement.summary['clients']:,} clients; data: {statement.summary['data']}"),
        ("trusted", privacy["trust_model"]),
        ("the adversary sees", "all released models and everything computed from them, the settings and the code"),
    ]
    if statement.summary["data_note"]:
        rows.append(("about the data", statement.summary["data_note"]))
    return Section("Who is protected, and from whom", "", rows)


def _tuning(statement: Statement) -> Section:
    rows = [("measured on", f"{statement.summary['evaluated_on']} data, final round")]
    privacy = statement.summary["privacy"]
    recorded = privacy["tuning"] if "tuned" in privacy else ""  # by `fedblur tune`: which way, and what it cost
    unknown = "how they were chosen is not recorded; if on these clients, it is not free"
    uncounted = "" if recorded or statement.also or not statement.tuning else "what that cost is not counted here"
    rows.append(("settings", "; ".join(filter(None, (recorded, statement.tuning, uncounted))) or unknown))
    if statement.also:
        figures = words_of_total([statement.books, *statement.also], digits=4)
        rows.append((f"all {1 + len(statement.also)} runs together", figures))
    text = (
        "Every run on the same clients adds to what they lose, failed ones and those for tuning too. The claim above "
        "is for this run alone."
    )
    return Section("Tuning, and other runs on the same clients", text, rows)


def _limits(statement: Statement) -> Section:
    return Section(
        "What this rests on, and what it does not cover",
        "",
        [],
        lists=(
            ("Assumed", assumed(statement.seeded, statement.privacy["sampling"])),
            ("Not protected", statement.not_protected()),
            ("Questions to ask", QUESTIONS),
        ),
    )


def _record(statement: Statement) -> Section:
    facts = statement.facts()
    verified = "verified: chain whole, every round covered, ε recomputed" if not statement.findings else "NOT VERIFIED"
    seed = statement.config.get("seed")
    rows = [
        ("randomness", f"seed {seed}: {SEEDED}" if seed is not None else "operating system (CSPRNG), not replayable"),
        ("configuration", facts["config_hash"]),
        ("ledger", f"{facts['ledger']['lines']} lines (the budget, then a line a release), {facts['ledger']['head']}"),
        ("ledger check", verified),
        ("versions", ", ".join(f"{name} {value}" for name, value in facts["versions"].items())),
        ("status", f"{statement.summary['status']}; statement made {facts['made']}"),
    ]
    text = (
        "To check: `fedblur ledger verify RUN`, on the run folder. It recomputes ε and finds edits; that the noise was "
        "drawn it cannot show: `fedblur audit` attacks the code that does. A hash of the ledger kept elsewhere shows "
        "if it was rewritten."
    )
    return Section("Record", text, rows + _audits(statement.run))


def _audits(run: Path) -> list[tuple[str, str]]:
    """Audits of this configuration, where there are any in the run folder."""
    rows = []
    for path in sorted((run / "audit").glob("*.json")):
        audit = read_json(path)
        if audit and not audit.get("noise_removed"):
            found = {name: attack["epsilon"] for name, attack in audit["attacks"].items()}
            words = ", ".join(f"{name} ε = {value:.2f}" for name, value in found.items())
            rows.append(("empirical audit", f"{words} ({audit['canaries']:,} canaries); a lower bound, no proof"))
    return rows


def words_of_total(books: list[Books], digits: int = 3) -> str:
    """What runs on the same clients cost together, or why that is infinite; nothing where no accountant has a bound."""
    why = unprotected(books)
    if why is not None:
        return f"ε = ∞, since {why}"
    delta, total = compose(books)
    known = [f"{name.upper()} {rounded_up(value)}" for name, value in total.items() if value is not None]
    return f"ε = {', '.join(known)} at δ = {delta:.{digits}g}" if known else ""
