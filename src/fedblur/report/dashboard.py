"""The HTML report. In: records. Out: one page that needs no other file: style, script and charts are in it.

A content security policy in the page itself lets the browser load nothing else. `live` is the same page as `fedblur
watch` serves it: it may ask its own server for a newer one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from fedblur.errors import FedBlurError
from fedblur.report.comparison import Line, compare
from fedblur.report.figure import Figure, percent
from fedblur.report.group_charts import group_figures
from fedblur.report.page import Page
from fedblur.report.records import Group, Record, flatten, grouped
from fedblur.report.rounding import rounded_up
from fedblur.report.run_charts import run_figures
from fedblur.report.statement import page_of, read_statement, words_of_total
from fedblur.summary import SEEDED
from fedblur.verification import read_books

MOST_DETAILS = 12  # groups with figures of their own; more would make the page large
MOST_COMPOSED = 60  # runs whose common cost is computed
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
    """All that the template shows."""

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
    progress: tuple[int, int] | None = None  # rounds done and planned, of a run that goes on

    def facts(self) -> dict[str, Any]:
        """The machine-readable form: what the comparison says."""
        return {
            "runs": sum(len(group.records) for group in self.groups),
            "privacy": self.lead,
            "together": self.together or None,
            "groups": [_line_facts(line, self.comparisons, self.public) for line in self.lines],
        }


def make_report(records: Sequence[Record], public: bool = False) -> Report:
    """Gather everything; `public` leaves out what is local only."""
    groups = grouped(records)
    lines = compare(groups)
    details = [_detail(f"g{index}", group, public) for index, group in enumerate(groups[:MOST_DETAILS])]
    flat = [dict(flatten(group.records[0].config)) for group in groups]
    return Report(
        title=_title(groups),
        lead=_lead(groups, details),
        notice=_notice(records),
        status=_status(records),
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
        progress=_progress(records),
    )


def render(report: Report, live: str = "") -> str:
    """The page. `live` names what is watched; empty for a file."""
    style, script = _asset("report.css"), _asset("report.js")
    return _environment().from_string(_asset("report.html.jinja")).render(
        report=report, style=Markup(style), script=Markup(script), policy=policy(live), live=live, local_only=LOCAL_ONLY
    )  # fmt: skip


def render_waiting(live: str, words: str) -> str:
    """What `fedblur watch` shows before there is a run."""
    empty = Report("Waiting", "", "", words, [], [], [], 0, [], 0, [], "", False)
    return render(empty, live)


def policy(live: str) -> str:
    """Nothing but what is in the page; a live one may ask its own server."""
    style, script = (_digest(_asset(name)) for name in ("report.css", "report.js"))
    ask = "'self'" if live else "'none'"
    rules = f"style-src '{style}'; script-src '{script}'; img-src data:; connect-src {ask}"
    return f"default-src 'none'; {rules}; base-uri 'none'; form-action 'none'"


def _detail(key: str, group: Group, public: bool) -> Detail:
    record = group.first
    statement, why = _statement(record)
    shown = None if statement is None else page_of(statement)
    return Detail(
        key, group, record, run_figures(record, key, public), _tiles(record, public), shown, why, flatten(record.config)
    )


def _statement(record: Record) -> tuple[Any, str]:
    if record.path is None:
        return None, "Only this run's result is here, not its ledger; the run folder has its statement."
    if record.summary is None:
        return None, "The run has not ended; its statement is made at the end, from the ledger."
    try:
        return read_statement(record.path), ""
    except FedBlurError as error:
        return None, str(error)


def _tiles(record: Record, public: bool) -> list[tuple[str, str, str]]:
    summary, measured = record.summary, record.evaluations()
    last = measured[-1] if measured else {}
    so_far = f"by round {last['round']:,}" if last else "no round yet"
    accuracy = summary["accuracy"] if summary else last.get("accuracy")
    epsilon = summary["privacy"]["epsilon"] if summary else last.get("epsilon")
    tiles = [
        ("Accuracy", percent(accuracy), f"{summary['evaluated_on']} data" if summary else so_far),
        ("ε spent", "–" if epsilon is None else rounded_up(float(epsilon)), _delta(summary) or so_far),
        ("Rounds", f"{record.rounds_done:,}", f"of {record.rounds_planned:,}"),
    ]
    if summary:
        tiles.append(("Clients", f"{summary['clients']:,}", f"{summary['parameters']:,} parameters"))
    shares = [share for _, share in record.local_only("clipped_share")]
    if shares and not public:
        tiles.append(("Clipped", percent(sum(shares) / len(shares), 0), LOCAL_ONLY))
    return tiles


def _delta(summary: Mapping[str, Any] | None) -> str:
    return f"δ = {summary['privacy']['delta']:.3g}, {summary['privacy']['accountant'].upper()}" if summary else ""


def _title(groups: Sequence[Group]) -> str:
    records = [record for group in groups for record in group.records]
    data = sorted(
        {str((record.config.get("own") or {}).get("data") or record.config["dataset"]["name"]) for record in records}
    )
    what = groups[0].label if len(groups) == 1 else f"{len(groups)} settings compared"
    return f"{what} on {' and '.join(data)}"


def _lead(groups: Sequence[Group], details: Sequence[Detail]) -> str:
    """The privacy of what is shown in one line."""
    if len(details) == 1 and len(groups[0].records) == 1:
        statement = details[0].statement
        if statement is not None:
            return statement.lead
        last = [row for row in details[0].record.evaluations() if row.get("epsilon") is not None]
        so_far = (
            f"ε = {rounded_up(last[-1]['epsilon'])} spent by round {last[-1]['round']}" if last else "no ε stated yet"
        )
        return f"{so_far}; the statement is made when the run has ended"
    spent = [float(s["privacy"]["epsilon"]) for group in groups for r in group.records if (s := r.summary) is not None]
    if not spent:
        return "no run has ended yet"
    low, high = rounded_up(min(spent)), rounded_up(max(spent))
    each = f"ε = {low}" if low == high else f"ε from {low} to {high}"
    return f"{len(spent)} finished runs, {each} each, user-level; every run on the same clients adds to what they lose"


def _notice(records: Sequence[Record]) -> str:
    """Why some of these runs protect nobody."""
    found = [str(s["privacy"]["warning"] or "") if (s := record.summary) else _expected(record) for record in records]
    reasons = sorted({words.removeprefix("NOT PRIVATE: ") for words in found if words})
    if not reasons:
        return ""
    who = "" if all(found) else f" ({sum(map(bool, found))} of {len(found)} runs)"
    seeded = " A seed makes noise that can be computed again; ε is that of the same run with secret noise."
    return f"NOT PRIVATE{who}: {'; '.join(reasons)}.{seeded if 'seeded' in reasons else ''}"


def _expected(record: Record) -> str:
    """What a run that goes on will have to say."""
    return SEEDED if record.seed is not None else ""


def _status(records: Sequence[Record]) -> str:
    running = [record for record in records if record.summary is None]
    if not running:
        return (
            "Complete"
            if all(record.complete for record in records)
            else str(records[0].summary and records[0].summary["status"])
        )
    done = f"{len(records) - len(running)} of {len(records)} runs ended; " if len(records) > 1 else ""
    now = max(running, key=lambda record: record.rounds_done)
    return f"{done}round {now.rounds_done:,} of {now.rounds_planned:,}"


def _progress(records: Sequence[Record]) -> tuple[int, int] | None:
    running = [record for record in records if record.summary is None]
    if not running:
        return None
    return sum(r.rounds_done for r in records), sum(r.rounds_planned for r in records)


def _together(records: Sequence[Record]) -> str:
    """What all runs on these clients cost together, from their ledgers."""
    paths = [record.path for record in records if record.path is not None and record.summary is not None]
    data = {json.dumps([r.config.get("own"), r.config["dataset"], r.config["data_seed"]]) for r in records}
    if len(paths) < 2 or len(paths) > MOST_COMPOSED or len(data) > 1:
        return ""
    try:
        figures = words_of_total([read_books(path) for path in paths])
    except FedBlurError:
        return ""
    return f"All {len(paths)} runs on these clients together: {figures}" if figures else ""


def _line_facts(line: Line, comparisons: int, public: bool) -> dict[str, Any]:
    against = line.versus
    facts: dict[str, Any] = {
        "label": line.group.label, "axes": line.group.axes, "seeds": line.seeds, "accuracy": line.mean,
        "spread": line.spread, "epsilon": line.epsilon,
    }  # fmt: skip
    if not public:
        facts["local_only"] = {"clipped_share": line.clipped}
    if against is not None:
        facts["versus"] = {
            "baseline": against.baseline, "difference": against.difference, "interval": [against.low, against.high],
            "p": against.p, "n": against.n, "paired": against.paired, "words": against.words(comparisons),
        }  # fmt: skip
    return facts


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["inline"] = lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text)))
    environment.filters["safe_svg"] = Markup
    environment.filters["epsilon"] = rounded_up
    return environment


def _asset(name: str) -> str:
    return files("fedblur.report").joinpath("templates", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
