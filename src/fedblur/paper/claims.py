"""Verdicts on a paper's claims, each by a rule that is stated beside it (`rules.py`). In: a document. Out: Verdicts.

Rules decide by means over seeds. `chance` is two standard errors of a difference; a verdict that a change of that size
would overturn is marked as within chance.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedblur.errors import ConfigError, nearest
from fedblur.paper.document import Document
from fedblur.paper.finding import OPEN, Finding, combine
from fedblur.paper.gains import Part
from fedblur.paper.rules import RULES


@dataclass(frozen=True)
class Verdict:
    """A claim with what its parts come to."""

    name: str
    says: str
    source: str
    expect: str  # said where nothing is measured
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> str:
        return combine([finding.verdict for finding in self.findings if finding.counts])

    @property
    def narrow(self) -> bool:
        return any(finding.narrow for finding in self.findings if finding.counts)

    @property
    def partial(self) -> bool:
        """Some of what decides is not measured."""
        deciding = [finding.verdict for finding in self.findings if finding.counts]
        return OPEN in deciding and self.verdict != OPEN

    @property
    def words(self) -> str:
        notes = [note for holds, note in ((self.narrow, "within chance"), (self.partial, "in part")) if holds]
        return self.verdict + (f" ({', '.join(notes)})" if notes else "")


def verdicts(document: Document) -> list[Verdict]:
    """All claims of a paper."""
    return [
        Verdict(
            claim["name"],
            claim["says"],
            claim["source"],
            claim.get("expect", ""),
            tuple(_finding(document, part) for part in claim["parts"]),
        )
        for claim in document.claims
    ]


def _finding(document: Document, part: Part) -> Finding:
    rule = RULES.get(part["rule"])
    if rule is None:
        raise ConfigError(f"claims.toml: rule {part['rule']!r} is unknown: {nearest(part['rule'], RULES)}")
    return rule(document, part)
