"""The privacy statement of a run. In: a run folder. Out: one page as Markdown, HTML and JSON.

It follows what the field asks a private result to report (Ponomareva et al. 2023, "How to DP-fy ML"), for a reviewer
who has never seen the project. Everything in it is recomputed from the ledger or read from the run's own files.
`templates/statement.md.jinja` is the page; here is what depends on the run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedblur.core.config import canonical, config_hash, demand_form, from_dict
from fedblur.core.errors import RunError
from fedblur.core.files import demand_digest, read_json, write_atomically
from fedblur.core.registry import build
from fedblur.learning.metrics.measures import measure_of
from fedblur.privacy.accounting import ACCOUNTANTS, zcdp
from fedblur.privacy.claim import UNCLAIMED, Claim, Selection, to_json
from fedblur.privacy.ledger import now, read_randomness
from fedblur.report.page import Page, html, render_markdown
from fedblur.report.text import counted, rounded_up, words_of_figure, words_of_population
from fedblur.training.run_folder import NO_AUDIT, RunFolder, RunSummary
from fedblur.training.verify_ledger import Books, compose, neighbours, read_books, unprotected, verify

SEEDED = "not private: seeded noise"
_FAILS = "FAILS FOR THIS RUN: its noise and its cohorts follow from a seed."
_NEIGHBOURS = {  # by how the neighbours are stated: the two worlds, and what someone may want to know
    "add or remove": ("with a client", "without it", "a client's taking part"),
    "replace": ("with one client's data", "with another's instead", "which of two guesses at a client's data is right"),
    "one client's data": ("with a client's data", "with none in their place", "whether a client's data were used"),
}
_MECHANISMS = {
    "gaussian": "Gaussian noise on the sum of bounded updates",
    "ddgauss": "discrete Gaussian noise on whole numbers, summed modulo a power of two (DDGauss)",
    "skellam": "Skellam noise on whole numbers, summed modulo a power of two",
}


@dataclass(frozen=True)
class Statement:
    """A run's privacy claim, and all that it rests on."""

    run: Path  # its folder
    summary: RunSummary  # what the run says of itself; warning, N and σ are derived from ledger and configuration
    config: dict[str, Any]  # all settings
    books: Books  # its ledger, read and recomputed
    findings: list[str]  # of `ledger verify`
    also: tuple[Books, ...] = ()  # other runs on the same clients: tuning, earlier tries
    tuning: str = ""  # how the settings were chosen

    @property
    def privacy(self) -> Claim:
        """The claim as the run wrote it."""
        return self.summary.privacy

    @property
    def not_private(self) -> str | None:
        """Return why this run protects nobody."""
        warning = self.privacy.warning
        if not warning:  # the ledger's word counts too
            return SEEDED if self.books.randomness == "seed" else None
        return SEEDED if "seeded" in warning else warning.replace("NOT PRIVATE", "not private")

    @property
    def seeded(self) -> bool:
        """Whether anyone with the seed can regenerate the noise."""
        return self.not_private == SEEDED

    @property
    def unclaimed(self) -> str | None:
        """Return why nothing is claimed: a part that ε rests on is not FedBlur's, and passed no audit."""
        unaudited = self.books.randomness == "unaudited part"
        return self.privacy.unclaimed or (NO_AUDIT if unaudited else None)

    @property
    def in_floats(self) -> bool:
        """Whether version 0.1 made the run: its Gaussian noise was added in floating point (docs/privacy.md).

        Its ledgers do not say where noise comes from; later ones do, and their noise is of whole numbers.
        """
        whole = not self.privacy.votes and self.config["mechanism"]["name"] in ("ddgauss", "skellam")
        return read_randomness(self.books.chain) is None and not whole

    @property
    def chosen(self) -> Selection | None:
        """Return how a private search found this run; None for a run of its own."""
        return self.privacy.selection

    @property
    def start(self) -> str:
        """Return the type of the model that the caller gave, with its starting weights; "" for one made by name."""
        return str((self.config.get("own") or {}).get("model") or "")

    @property
    def scored(self) -> int:
        """Validation clients whose scores decided without noise."""
        return self.chosen.score_clients if self.chosen and not self.chosen.score_clients_protected else 0

    def epsilons(self) -> dict[str, float | None]:
        """Return ε by accountant, recomputed from the ledger; infinite where a part of the run forbids a claim."""
        if self.unclaimed:
            return dict.fromkeys(ACCOUNTANTS, math.inf)
        return {name: self.books.epsilon(name) for name in ACCOUNTANTS}

    def one_line(self) -> str:
        """Return the whole claim in a line, and which parts are not FedBlur's."""
        own = [part.words + (f" (audit {part.audit})" if part.audit else "") for part in self.privacy.own_parts or ()]
        others = f"; not FedBlur's: {', '.join(own)}" if own else ""
        if self.unclaimed:
            seeded = "; not private either way: seeded noise" if self.seeded else ""
            return f"{UNCLAIMED}: {self.unclaimed}{seeded}"
        return self._figures() + others

    def _figures(self) -> str:
        delta, other = self.books.budget.delta, "rdp" if self.books.budget.accountant == "pld" else "pld"
        main, second = self.epsilons()[self.books.budget.accountant], self.epsilons()[other]
        also = "" if second is None else f"; {other.upper()} {rounded_up(second)}"
        verified = "ledger verified" if not self.findings else "LEDGER NOT VERIFIED"
        claim = (
            f"ε = {rounded_up(main)} at δ = {delta:.3g} ({self.books.budget.accountant.upper()}{also}), "
            f"{self.privacy.adjacency}, {counted(len(self.books.spends), 'release')}, {verified}"
        ) + (f", NOT for the {self.scored} validation clients" if self.scored else "")
        if self.in_floats:
            claim += ", NOT against someone with the exact released numbers: version 0.1 added noise in floating point"
        return f"{self.not_private.upper()} (with secret noise: {claim})" if self.not_private else claim

    def shown(self) -> str:
        """Return the claim in a line, and where the statement is."""
        return f"Privacy: {self.one_line()}. Statement: {self.run / 'statement.md'} (.html, .json)"

    @cached_property
    def made(self) -> str:
        """When the statement was made."""
        return now()

    def facts(self) -> dict[str, Any]:
        """Return the machine-readable form."""
        with RunFolder(self.run).reading():
            own = config_hash(from_dict({key: value for key, value in self.config.items() if key != "own"}))
        claim, runs = to_json(replace(self.privacy, ledger=None)), [self.books, *self.also]
        total_delta, total = compose(runs)
        return {
            "statement": "fedblur privacy statement, version 1",
            "made": self.made,
            "private": self.not_private is None,
            "not_private_because": self.not_private,
            "claims_nothing_because": self.unclaimed,
            "own_parts": [to_json(part) for part in self.privacy.own_parts or ()],
            "epsilon": self.epsilons(),
            "delta": self.books.budget.delta,
            "delta_times_clients": self.books.budget.delta * self.summary.clients,
            "zcdp_rho": zcdp(self.books.event()),
            "clients": self.summary.clients,
            "releases": len(self.books.spends),
            "claim": {key: value for key, value in claim.items() if key not in ("epsilon", "warning", "own_parts")},
            "runs_composed": len(runs),
            "total": {
                "delta": total_delta,
                "epsilon": total,
                "adjacency": self.privacy.adjacency if len(runs) == 1 else neighbours(runs),
                "infinite_because": unprotected([self.books, *self.also]),
            },
            "tuning": self.tuning or None,
            "personal": self.config.get("personal") or None,
            "assumed": assumed(self.seeded, self.privacy.sampling),
            "not_protected": not_protected(
                self.in_floats, self.privacy.votes, self.scored, self.start, self.summary.headline[0]
            ),
            "seed": self.config.get("seed"),
            "versions": self.summary.versions,
            "config_hash": own,
            "ledger": {"lines": len(self.books.chain.links), "head": self.books.chain.head},
            "ledger_findings": self.findings,
        }

    def mechanism(self) -> str:
        """Describe the noise."""
        settings = self.config["mechanism"]
        if self.privacy.votes or settings["name"] not in _MECHANISMS:
            return self.privacy.mechanism
        others = ", ".join(f"{key} = {value}" for key, value in settings.items() if key != "name")
        return _MECHANISMS[settings["name"]] + (f" ({others})" if others else "")

    def bound(self) -> str:
        """Say how a client's update is bounded, and by which S."""
        now, rule = self.privacy.clip_norm, str(self.privacy.clipping)
        if not self.config.get("clipping"):
            return rule.replace("clip_norm", f"S = {now:g}", 1)
        rule = rule.replace("clip_norm", "the round's S", 1)
        return rule.replace(" and adapts", f", has come to {now:g} and adapts", 1)

    def noise(self) -> str:
        """Say how much there is on the sum; σ alone would be untrue where a bit or a larger cohort changes it."""
        sigma = self.privacy.noise_multiplier
        if self.config.get("clipping"):
            with RunFolder(self.run).reading():
                rule = build("clipping", self.config["clipping"])
            alone = rule.vector_multiplier(sigma, self.privacy.expected_cohort)
            return (
                f"σ = {sigma:.4g} for an update and its clip bit together: {alone:.4g} times the round's S on the sum"
            )
        least = self.config["mechanism"].get("min_cohort")
        more = f" of {least} clients, and √(n/{least}) times that on the sum of n" if least else ""
        return f"σ = {sigma:.4g}, standard deviation σ·S on the sum{more}"

    def choice_of_settings(self) -> str:
        """Say how the settings were chosen, as far as anybody recorded it."""
        recorded = self.privacy.tuning if self.privacy.tuned else ""  # by `fedblur tune`: which way, and what it cost
        uncounted = "" if recorded or self.also or not self.tuning else "what that cost is not counted here"
        unknown = "how they were chosen is not recorded; if on these clients, it is not free"
        return "; ".join(filter(None, (recorded, self.tuning, uncounted))) or unknown

    def personal(self) -> str:
        """Say what stays on each client, and what that means; nothing where all is shared."""
        names, here = self.config.get("personal") or [], (self.run / "personal").exists()
        if not names and not here:
            return ""
        what = f"its own {', '.join(names)}" if names else "what its local method remembers"
        where = (
            "in this simulation the folder personal/ holds it, local only, for the machine's owner"
            if here
            else "it stays on the clients' own machines"
        )
        return (
            f"each client keeps {what}: trained without noise, never bounded, sent or released; {where}. "
            "ε covers the shared part of the model; it covers no client against someone who is shown that client's "
            "personal part, or predictions made with it"
        )

    def notice(self) -> str:
        """Say what a reader must know first; nothing for a private run with a whole ledger."""
        lines = []
        if self.unclaimed:
            lines.append(
                f"No ε is claimed for this run: {self.unclaimed}. Only the author of that part knows what its noise "
                "and its cohorts are."
            )
        elif self.not_private:
            lines.append(f"This run is {self.not_private}.")
        if self.seeded:
            lines.append(
                "The seed is on this page: anyone can compute the noise and subtract it. The figures below would hold "
                "for the same settings with noise and cohorts from the operating system."
            )
        if self.findings:
            lines.append(f"The ledger could not be verified: {'; '.join(self.findings)}.")
        return " ".join(lines)

    def audits(self) -> list[tuple[str, int]]:
        """Return what audits of this configuration found, and with how many canaries."""
        found = [_read_audit(path) for path in sorted((self.run / "audit").glob("*.json"))]
        kept = [audit for audit in found if "attacks" in audit and not audit.get("noise_removed")]
        return [
            (", ".join(f"{name} ε = {attack['epsilon']:.2f}" for name, attack in audit["attacks"].items()),
             audit["canaries"])
            for audit in kept
        ]  # fmt: skip


def _read_audit(path: Path) -> dict[str, Any]:
    audit = read_json(path, "delete it, and run the audit again")
    demand_digest(audit, path, "delete it, and run the audit again")
    return audit


def read_statement(run: Path, also: Sequence[Path] = (), tuning: str = "") -> Statement:
    """Read everything about a finished run."""
    folder = RunFolder(run)
    config, summary = folder.resolved(), folder.read_summary()
    demand_form(config, folder.config)
    if summary is None:
        raise RunError(f"{run} has no summary.json: the run never ended; go on with: fedblur resume {run}")
    return Statement(
        run,
        summary,
        config,
        read_books(run),
        verify(run, stated=False),
        tuple(read_books(other) for other in also),
        tuning,
    )


def write_statement(run: str | Path, also: Sequence[Path] = (), tuning: str = "") -> tuple[Statement, Path]:
    """Write statement.md, .html and .json into the run folder; return the statement and the Markdown's path."""
    run = Path(run)
    statement = read_statement(run, also, tuning)
    page = page_of(statement)
    write_atomically(run / "statement.md", page.markdown.encode())
    write_atomically(run / "statement.html", html(page).encode())
    facts = json.loads(canonical(statement.facts()))
    write_atomically(run / "statement.json", (json.dumps(facts, indent=2) + "\n").encode())
    return statement, run / "statement.md"


def page_of(statement: Statement) -> Page:
    """Return the statement as a page."""
    config, spends, budget = statement.config, statement.books.spends, statement.books.budget
    metric, value = statement.summary.headline
    text = render_markdown(
        "statement.md.jinja",
        s=statement,
        facts=statement.facts(),
        summary=statement.summary,
        metric=measure_of(metric).words,
        figure=measure_of(metric).shown(value, 1) if measure_of(metric).percent else words_of_figure(metric, value),
        privacy=statement.privacy,
        budget=budget,
        releases=len(spends),
        repeated=len(spends) - len({round_ for round_, _ in spends}),
        model=statement.start or config["model"]["name"],
        methods=[method["name"] for method in config["method"]],
        meaning=meaning(
            statement.epsilons()[budget.accountant], budget.delta, statement.seeded, statement.privacy.adjacency
        ),
        step="release" if statement.privacy.votes or statement.chosen else "round",
        limit=f"ε = {budget.epsilon:g} or " if math.isfinite(budget.epsilon) else "",
        delta_against=delta_against,
        words_of_total=words_of_total,
        words_of_population=words_of_population,
    )
    return Page("Privacy statement", statement.one_line(), statement.notice(), text)


def assumed(seeded: bool, sampling: str) -> list[str]:
    """List what the claim rests on; a seeded run lacks a part. Who came matters where sampling counts."""
    scheduled = sampling.startswith(("minimum separation", "in turn"))  # where who takes part is no secret
    what = "Noise is" if scheduled else "Noise and cohorts are"
    lines = [
        "Each person is one client. Someone with k clients has k·ε, and δ times (e^(kε) − 1)/(e^ε − 1).",
        "Who is in the population, and N itself, were decided without looking at private data; N and p are public.",
        "The trusted party named above runs this code unchanged and releases only the models.",
        f"{what} secret, drawn by the operating system's random generator, and that is sound."
        + (f" {_FAILS}" if seeded else ""),
    ]
    if scheduled or sampling.startswith("cyclic Poisson"):
        lines.append(
            "The trusted party's record is true: no client took part sooner or more often than the sampling says."
        )
    if sampling.startswith("cyclic Poisson"):
        lines.append(
            "Inside its group, a client's taking part is an independent draw that only the trusted party learns."
        )
    secret = "only the trusted party learns who took part."
    if "amplifies nothing" not in sampling and sampling.startswith("Poisson"):
        lines.append(f"Clients' participations in a round are independent draws; {secret}")
    if "amplifies nothing" not in sampling and sampling.startswith("fixed"):
        lines.append(f"The clients of a round are drawn at random; {secret}")
    return lines


def not_protected(
    in_floats: bool, pool: bool = False, scored: int = 0, start: str = "", metric: str = "accuracy"
) -> list[str]:
    """List what the claim does not cover.

    `in_floats`: the noise was added in floating point; `pool`: labels of public samples were bought; `scored`:
    validation clients whose scores chose the settings without noise; `start`: the type of a model whose starting
    weights the caller gave; `metric`: the headline.
    """
    others = []
    if in_floats:
        others.append(
            "Clients against someone who has the exact numbers of any released model: version 0.1 added noise in "
            "floating point, whose low bits can tell who took part with certainty, and in its blocks one client's size "
            "changed what others sent (docs/privacy.md, Before version 0.2)."
        )
    if pool:
        others.append(
            "Whoever the public pool belongs to (see the note about the data): its samples are used as they are."
        )
    if scored:
        others.append(f"The {scored} validation clients: settings were chosen by their scores, without noise.")
    if start:
        others.append(
            f"Whoever the starting weights learned from: the caller gave them ({start}). If they are not public, for "
            "instance because an earlier run trained them on these clients, what they tell is outside this claim; that "
            "run's ε and δ are added to these."
        )
    return [
        *others,
        "What the population as a whole teaches: the model learns it, and that is the purpose.",
        "A client against whoever holds its data, or against the trusted party itself.",
        f"Whoever the data behind the {metric} belong to: it was measured without noise. Where they are clients too "
        "(see the note about the data), publishing it tells something about them that ε does not count.",
        "Figures marked local_only in the run folder (norms, cohort sizes, times): made without noise; publishing "
        "them voids the claim.",
        "Other runs and other publications about the same clients: ε and δ both add up (see Tuning).",
        "Side channels, such as timing and memory.",
    ]


def meaning(epsilon: float | None, delta: float, seeded: bool, adjacency: str) -> str:
    """Return the definition between the neighbours that are stated, and what it allows an adversary to learn."""
    if epsilon is None or math.isinf(epsilon):
        return "No noise bounds what its releases tell about a client: nothing is claimed."
    sure = 100 / (1 + math.exp(-epsilon))
    one, other, wanted = next(words for start, words in _NEIGHBOURS.items() if adjacency.startswith(start))
    bound = (
        f"(ε, δ)-differential privacy with ε = {rounded_up(epsilon)} and δ = {delta:.4g}: for any event E about "
        f"everything that the run released, P[E {one}] ≤ e^ε · P[E {other}] + δ, and the other way round. Someone for "
        f"whom {wanted} was an even bet may become {sure:.0f} % sure of it, not more, apart from δ."
    )
    return f"With secret noise and cohorts it would have had {bound}" if seeded else f"It has {bound}"


def delta_against(delta: float, clients: int) -> str:
    """Compare δ with 1/N."""
    share = delta * clients
    if share > 0.999:
        words = (
            "That is not below 1/N: by itself the guarantee would permit publishing one client's data in full, on "
            "average, in every run. The usual advice is far less."
        )
    else:
        words = "Not far below 1/N; the usual advice is far less." if share > 0.1 else "Well below 1/N."
    return f"δ·N = {share:.3g} for N = {clients:,} clients. {words}"


def words_of_total(books: list[Books], digits: int = 3) -> str:
    """Say what runs on the same clients cost together, or why that is infinite; nothing without a bound."""
    why = unprotected(books)
    if why is not None:
        return f"ε = ∞, since {why}"
    delta, total = compose(books)
    known = [f"{name.upper()} {rounded_up(value)}" for name, value in total.items() if value is not None]
    weakest = neighbours(books)
    mixed = weakest is not None and len({neighbours([book]) for book in books if book.spends}) > 1
    relation = f", for {weakest}" if mixed else ""
    return f"ε = {', '.join(known)} at δ = {delta:.{digits}g}{relation}" if known else ""
