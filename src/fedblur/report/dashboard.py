"""The HTML report. In: records. Out: one page with style, script and charts in it; it needs no other file.

A content security policy in the page lets the browser load nothing else. `live` is the same page as `fedblur watch`
serves it: it may ask its own server for a newer one.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from fedblur.core.callbacks import figures_of
from fedblur.core.errors import FedBlurError
from fedblur.experiments.table import PlannedCell
from fedblur.learning.metrics.measures import ACCURACY, Measure
from fedblur.privacy.claim import SEEDED, UNCLAIMED
from fedblur.report.charts import Figure, group_figures, percent, run_figures
from fedblur.report.comparison import Line, compare
from fedblur.report.page import Page, asset, template
from fedblur.report.records import Group, Record, flatten, grouped
from fedblur.report.statement import page_of, read_statement, words_of_total
from fedblur.report.text import rounded_up
from fedblur.training.verify_ledger import read_books

MOST_METRICS = 4  # of a run, as tiles
MOST_DETAILS = 12  # groups with figures of their own; more would make the page large
MOST_COMPOSED = 60  # runs whose common cost is computed
_NAMED = 2  # runs that go on, by name
LOCAL_ONLY = "local only: not protected by the guarantee"


@dataclass(frozen=True)
class Detail:
    """One group's own figures, those of its first run, and the statement of that run."""

    key: str
    group: Group
    record: Record
    figures: list[Figure]
    tiles: list[tuple[str, str, str]]  # name, value, a word on it
    statement: Page | None
    why_no_statement: str
    settings: list[tuple[str, str]]


@dataclass(frozen=True)
class Report:
    """Everything that the template shows."""

    title: str
    lead: str
    notice: str
    status: str
    groups: list[Group]
    figures: list[Figure]
    lines: list[Line]
    comparisons: int
    details: list[Detail]
    left_out: int  # groups without details
    common: list[tuple[str, str]]  # settings that all runs share
    together: str
    public: bool
    measure: Measure = ACCURACY  # what is compared
    progress: tuple[int, int] | None = None  # rounds done and planned, of what goes on or has not begun

    def facts(self) -> dict[str, Any]:
        """Return what the comparison says, for `--json`."""
        groups = []
        for line in self.lines:
            facts: dict[str, Any] = {
                "label": line.group.label, "axes": line.group.axes, "seeds": line.seeds, line.measure.name: line.mean,
                "spread": line.spread, "epsilon": line.epsilon,
            }  # fmt: skip
            if not self.public:
                facts["local_only"] = {"clipped_share": line.clipped}
            if (against := line.versus) is not None:
                facts["versus"] = {
                    "baseline": against.baseline, "difference": against.difference,
                    "interval": [against.low, against.high], "p": against.p, "n": against.n, "paired": against.paired,
                    "words": against.words(self.comparisons),
                }  # fmt: skip
            groups.append(facts)
        runs = sum(len(group.records) for group in self.groups)
        return {"runs": runs, "privacy": self.lead, "together": self.together or None, "groups": groups}


def make_report(records: Sequence[Record], public: bool = False, waiting: Iterable[PlannedCell] = ()) -> Report:
    """Gather everything; `public` leaves out what is local only. `waiting`: cells of a table that have not begun."""
    groups = grouped(records)
    lines = compare(groups)
    details = [_detail(f"g{index}", group, public) for index, group in enumerate(groups[:MOST_DETAILS])]
    flat = [dict(flatten(group.records[0].config)) for group in groups]
    later = [*waiting]
    done, going = sum(record.rounds_done for record in records), any(record.summary is None for record in records)
    planned = sum(record.rounds_planned for record in records) + sum(cell.rounds for cell in later)
    return Report(
        title=_title(groups),
        lead=_lead(groups, details),
        notice=_notice(records),
        status=_status(records, later),
        groups=groups,
        figures=group_figures(groups, lines),
        lines=lines,
        comparisons=sum(line.versus is not None for line in lines),
        details=details,
        left_out=len(groups) - len(details),
        common=[
            (key, value) for key, value in flat[0].items() if key != "seed" and all(f.get(key) == value for f in flat)
        ],
        together=_together(records),
        public=public,
        measure=lines[0].measure if lines else ACCURACY,
        progress=(done, planned) if going or later else None,
    )


def render(report: Report, live: str = "") -> str:
    """Return the page. `live` names what is watched; empty for a file."""
    style, script = asset("report.css"), asset("report.js")
    return template("report.html.jinja").render(
        report=report, style=Markup(style), script=Markup(script), policy=policy(live), live=live, local_only=LOCAL_ONLY
    )  # fmt: skip


def render_waiting(live: str, words: str, waiting: Iterable[PlannedCell] = ()) -> str:
    """Return what `fedblur watch` shows before there is a run."""
    cells = [*waiting]
    title, status = (cells[0].table, _status([], cells)) if cells else ("Waiting", words)
    progress = (0, sum(cell.rounds for cell in cells)) if cells else None
    return render(Report(title, "", "", status, [], [], [], 0, [], 0, [], "", False, progress=progress), live)


def policy(live: str) -> str:
    """Allow nothing but what is in the page; a live one may ask its own server."""
    digests = (hashlib.sha256(asset(name).encode()).digest() for name in ("report.css", "report.js"))
    style, script = (base64.b64encode(digest).decode() for digest in digests)
    ask = "'self'" if live else "'none'"
    rules = f"style-src 'sha256-{style}'; script-src 'sha256-{script}'; img-src data:; connect-src {ask}"
    return f"default-src 'none'; {rules}; base-uri 'none'; form-action 'none'"


def _detail(key: str, group: Group, public: bool) -> Detail:
    record, statement, why = group.first, None, ""
    if record.path is None:
        why = "Only this run's result is here, not its ledger; its statement is in the run folder."
    elif record.summary is None:
        why = "The run has not ended; its statement is written at the end, from the ledger."
    else:
        try:
            statement = read_statement(record.path)
        except FedBlurError as error:
            why = str(error)
    shown = None if statement is None else page_of(statement)
    figures = [] if public else run_figures(record, key)
    return Detail(key, group, record, figures, _tiles(record, public), shown, why, flatten(record.config))


def _tiles(record: Record, public: bool) -> list[tuple[str, str, str]]:
    summary, measured = record.summary, record.evaluations()
    last = measured[-1] if measured else None
    so_far = f"by round {last['round']:,}" if last else "no round yet"
    figures = summary.metrics if summary else figures_of(last) if last else {}
    shown = [measure for measure in record.measures if measure.name in figures][:MOST_METRICS] or [ACCURACY]
    where = f"{summary.evaluated_on} data" if summary else so_far
    epsilon = summary.privacy.epsilon if summary else last and last.get("epsilon")
    delta = f"δ = {summary.privacy.delta:.3g}, {summary.privacy.accountant.upper()}" if summary else so_far
    tiles = [
        *((m.capital, m.shown(figures.get(m.name), 1 if m.percent else None), where) for m in shown),
        ("ε spent", "–" if epsilon is None else rounded_up(float(epsilon)), delta),
        ("Rounds", f"{record.rounds_done:,}", f"of {record.rounds_planned:,}"),
    ]
    if summary:
        tiles.append(("Clients", f"{summary.clients:,}", f"{summary.parameters:,} parameters"))
    shares = [share for _, share in record.local_only("clipped_share")]
    if shares and not public:
        tiles.append(("Clipped", percent(sum(shares) / len(shares), 0), LOCAL_ONLY))
    return tiles


def _title(groups: Sequence[Group]) -> str:
    records = [record for group in groups for record in group.records]
    data = sorted(
        {str((record.config.get("own") or {}).get("data") or record.config["dataset"]["name"]) for record in records}
    )
    if len(titles := {record.table for record in records}) == 1 and (title := titles.pop()):
        return title
    what = groups[0].label if len(groups) == 1 else f"{len(groups)} settings compared"
    return f"{what} on {' and '.join(data)}"


def _lead(groups: Sequence[Group], details: Sequence[Detail]) -> str:
    """Return the privacy of what is shown in one line."""
    if len(details) == 1 and len(groups[0].records) == 1:
        statement = details[0].statement
        if statement is not None:
            return statement.lead
        last = [row for row in details[0].record.evaluations() if row.get("epsilon") is not None]
        so_far = (
            f"ε = {rounded_up(last[-1]['epsilon'])} spent by round {last[-1]['round']}" if last else "no ε stated yet"
        )
        return f"{so_far}; the statement follows when the run has ended"
    spent = [s.privacy.epsilon for group in groups for r in group.records if (s := r.summary) is not None]
    if not spent:
        return "no run has ended yet"
    low, high = rounded_up(min(spent)), rounded_up(max(spent))
    each = f"ε = {low}" if low == high else f"ε from {low} to {high}"
    return (
        f"{len(spent)} finished runs, {each} each, user-level; every run on the same clients adds to their privacy loss"
    )


def _notice(records: Sequence[Record]) -> str:
    """Return why some of these runs protect nobody."""
    found = [(s.privacy.warning or "") if (s := r.summary) else "" if r.seed is None else SEEDED for r in records]
    plain = (words.removeprefix("NOT PRIVATE: ").replace(UNCLAIMED, "no ε is claimed") for words in found if words)
    reasons = sorted(set(plain))
    if not reasons:
        return ""
    who = "" if all(found) else f" ({sum(map(bool, found))} of {len(found)} runs)"
    seeded = " Anyone with the seed can regenerate the noise; ε is that of the same run with secret noise."
    return f"NOT PRIVATE{who}: {'; '.join(reasons)}.{seeded if 'seeded' in reasons else ''}"


def _status(records: Sequence[Record], later: Sequence[PlannedCell]) -> str:
    """Count what is done: cells of a table, or runs, and their rounds."""
    running = [record for record in records if record.summary is None]
    if not running and not later:
        return next((s.status for r in records if (s := r.summary) and not r.complete), "Complete")
    total, ended = len(records) + len(later), len(records) - len(running)
    done = sum(record.rounds_done for record in records)
    planned = sum(record.rounds_planned for record in records) + sum(cell.rounds for cell in later)
    rounds = f"round {done:,} of {planned:,}"
    if total == 1 and not later:
        return rounds
    what = "cells" if later or any(record.table for record in records) else "runs"
    now = "".join(f"; now {r.name}: round {r.rounds_done:,} of {r.rounds_planned:,}" for r in running[:_NAMED])
    return f"{ended:,} of {total:,} {what} done, {rounds}{now}"


def _together(records: Sequence[Record]) -> str:
    """Return what all runs on these clients cost together, from their ledgers."""
    paths = [record.path for record in records if record.path is not None and record.summary is not None]
    data = {json.dumps([r.config.get("own"), r.config["dataset"], r.config["data_seed"]]) for r in records}
    if len(paths) < 2 or len(paths) > MOST_COMPOSED or len(data) > 1:
        return ""
    try:
        figures = words_of_total([read_books(path) for path in paths])
    except FedBlurError:
        return ""
    return f"All {len(paths)} runs on these clients together: {figures}" if figures else ""
