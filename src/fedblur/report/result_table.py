"""A table's results for a paper: mean ± standard error over seeds, as CSV, LaTeX, Markdown or JSON.

One row for each setting; runs that protect nobody are marked. Nothing local only is in it. CSV and JSON hold numbers as
they are measured (accuracy as a share), LaTeX and Markdown as people read them (accuracy in percent).
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedblur.core.config import canonical
from fedblur.core.errors import ConfigError, nearest
from fedblur.learning.metrics.measures import Measure
from fedblur.privacy.claim import SEEDED, UNCLAIMED
from fedblur.report.comparison import Line, compare, symbol
from fedblur.report.records import Record, as_number, grouped, measure_named
from fedblur.report.text import in_short

FORMATS = ("csv", "json", "latex", "markdown")
MARKS = ("†", "‡", "§", "¶")
_LATEX_MARKS = {"†": r"$^{\dagger}$", "‡": r"$^{\ddagger}$", "§": r"$^{\S}$", "¶": r"$^{\P}$"}
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "ε": r"$\varepsilon$", "δ": r"$\delta$", "σ": r"$\sigma$",
    "Δ": r"$\Delta$", "λ": r"$\lambda$", "η": r"$\eta$", "κ": r"$\kappa$", "∞": r"$\infty$", "±": r"$\pm$",
    "−": "--", "–": "--", "×": r"$\times$",
    "≤": r"$\le$", "≥": r"$\ge$", "<": r"$<$", ">": r"$>$", "|": r"$|$", "ℓ": r"$\ell$",
}  # fmt: skip


@dataclass(frozen=True)
class ResultTable:
    """Rows of a table in the order of its file, for one or several metrics."""

    title: str
    axes: list[str]
    measures: list[Measure]
    lines: list[list[Line]]  # of each setting: a line for each metric
    baseline: str | None

    @property
    def with_seeds(self) -> bool:
        """Whether some setting has several runs."""
        return any(line.seeds > 1 for lines in self.lines for line in lines)

    @property
    def notes(self) -> dict[str, str]:
        """The mark of each reason why some rows protect nobody."""
        reasons = list(dict.fromkeys(why for lines in self.lines if (why := reason(lines[0]))))
        return {why: MARKS[index] if index < len(MARKS) else f"*{index}" for index, why in enumerate(reasons)}


def make_table(records: Sequence[Record], metrics: Sequence[str] = (), baseline: str | None = None) -> ResultTable:
    """Return the results of these runs; complete runs only."""
    groups = [group for group in grouped(records) if group.complete]
    if not groups:
        raise ConfigError("no run here is complete; there is nothing to export yet")
    measures = [measure_named(name, groups) for name in (metrics or (None,))]
    by_measure = [compare(groups, measure, baseline) for measure in measures]
    lines = [[of[index] for of in by_measure] for index in range(len(groups))]
    titles = list(dict.fromkeys(record.table for record in records if record.table))
    axes = list(dict.fromkeys(axis for group in groups for axis in group.axes))
    return ResultTable("; ".join(titles), axes, measures, lines, baseline)


def written(table: ResultTable, form: str, standalone: bool = False) -> str:
    """Return the table as text. `standalone`: of LaTeX, a whole document."""
    if form not in FORMATS:
        raise ConfigError(f"--format {form!r} is unknown: {nearest(form, FORMATS)}")
    if standalone and form != "latex":
        raise ConfigError(f"--standalone is for --format latex, not for {form}")
    if form == "csv":
        return _csv(table)
    if form == "json":
        rows = [_facts(table, lines) for lines in table.lines]
        return json.dumps(json.loads(canonical({"title": table.title, "rows": rows})), indent=2) + "\n"
    return _markdown(table) if form == "markdown" else _latex(table, standalone)


def reason(line: Line) -> str:
    """Return why the runs of a row protect nobody; nothing where they protect their clients."""
    summaries = [record.summary for record in line.group.complete if record.summary is not None]
    found = sorted({summary.privacy.warning for summary in summaries if summary.privacy.warning})
    return "; ".join(why.removeprefix("NOT PRIVATE: ") for why in found)


def in_full(why: str) -> str:
    """Return a reason as a statement has it: what claims no ε says so itself."""
    return why if why.startswith(UNCLAIMED) else f"NOT PRIVATE: {why}"


def _facts(table: ResultTable, lines: Sequence[Line]) -> dict[str, Any]:
    """Return a row by column, as numbers."""
    group = lines[0].group
    privacy = next(record.summary.privacy for record in group.complete if record.summary is not None)
    facts: dict[str, Any] = {"label": group.label}
    for axis in table.axes:
        number = as_number(group.axes.get(axis))
        facts[axis] = group.axes.get(axis) if number is None else number
    facts["seeds"] = len(group.complete)
    for line in lines:
        name, unit = line.measure.name, line.measure.scaled(1.0)
        facts |= {name: _ratio(line.mean, unit), f"{name}_standard_error": _ratio(line.error, unit)}
        if table.baseline is not None:
            against = line.versus
            facts |= {
                f"{name}_difference": _ratio(against.difference, unit) if against else None,
                f"{name}_difference_standard_error": _ratio(against.error, unit) if against else None,
                f"{name}_difference_low": _ratio(against.low, unit) if against else None,
                f"{name}_difference_high": _ratio(against.high, unit) if against else None,
                f"{name}_pairs": against.n if against and against.paired else None,
                f"{name}_baseline": against.baseline if against else None,
            }
    return facts | {
        "epsilon_spent": lines[0].epsilon, "delta": privacy.delta, "noise_multiplier": privacy.noise_multiplier,
        "not_private": reason(lines[0]) or None,
    }  # fmt: skip


def _ratio(value: float | None, unit: float) -> float | None:
    return None if value is None else float(f"{value / unit:.10g}")


def _csv(table: ResultTable) -> str:
    rows = [_facts(table, lines) for lines in table.lines]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _cells(table: ResultTable) -> tuple[list[str], list[list[str]]]:
    """Return header and rows as people read them; marks come after labels."""
    header = ["", *map(symbol, table.axes)]
    for measure in table.measures:
        header.append(measure.title)
        if table.baseline is not None:
            header += ["Δ", "95 % interval of Δ"]
    header += (["seeds"] if table.with_seeds else []) + ["ε spent"]
    rows = []
    for lines in table.lines:
        group, why = lines[0].group, reason(lines[0])
        row = [f"{group.label}{table.notes.get(why, '')}"]
        row += [_setting(group.axes.get(axis)) for axis in table.axes]
        for line in lines:
            row.append(with_error(line.mean, line.error, line.measure.digits))
            if table.baseline is not None:
                row += _difference(line)
        rows.append(row + ([str(lines[0].seeds)] if table.with_seeds else []) + [in_short(lines[0].epsilon)])
    return header, rows


def _setting(value: Any) -> str:
    number = as_number(value)
    if number is None:
        return "–" if value is None else value if isinstance(value, str) else json.dumps(value)
    return "∞" if math.isinf(number) else f"{number:g}"


def _difference(line: Line) -> list[str]:
    if line.versus is None:
        return ["–", "–"]
    digits = line.measure.digits
    low, high = (f"{value:+.{digits}f}" for value in (line.versus.low, line.versus.high))
    return [f"{line.versus.difference:+.{digits}f} ± {line.versus.error:.{digits}f}", f"[{low}, {high}]"]


def with_error(mean: float | None, error: float | None, digits: int) -> str:
    """Return `81.20 ± 0.31`."""
    if mean is None:
        return "–"
    return f"{mean:.{digits}f}" + (f" ± {error:.{digits}f}" if error is not None else "")


def notes_of(table: ResultTable) -> list[str]:
    """Return what a reader must know of the figures."""
    first = table.lines[0][0].group.complete[0].summary
    assert first is not None  # complete
    words = [f"Final round, {first.evaluated_on} data"]
    if table.with_seeds:
        words.append("mean ± standard error over seeds")
    if table.baseline is not None:
        units = list(dict.fromkeys(measure.unit for measure in table.measures))
        pairs = [line.versus for lines in table.lines for line in lines if line.versus is not None]
        how = "paired by seed" if pairs and all(pair.paired for pair in pairs) else "paired where seeds are shared"
        words.append(f"Δ: difference to {table.baseline} in {' and '.join(units)}, {how}, ± its standard error")
    found = [f"{'; '.join(words)}."]
    records = [record for lines in table.lines for record in lines[0].group.complete]
    deltas = sorted({record.summary.privacy.delta for record in records if record.summary is not None})
    found.append(f"δ = {', '.join(f'{delta:.3g}' for delta in deltas)}.")
    for why, mark in table.notes.items():
        seeded = SEEDED.removeprefix("NOT PRIVATE: ") in why
        more = "; anyone with the seed can regenerate the noise, ε is that of the same run with secret noise"
        found.append(f"{mark} {in_full(why)}{more if seeded else ''}.")
    return found


def _markdown(table: ResultTable) -> str:
    header, rows = _cells(table)
    lines = [header, [":--", *["--:"] * (len(header) - 1)], *rows]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    title = f"**{table.title}**\n\n" if table.title else ""
    notes = "  \n".join(notes_of(table))  # two spaces: a line break
    return f"{title}{text}\n\n{notes}\n"


def _latex(table: ResultTable, standalone: bool) -> str:
    header, rows = _cells(table)
    body, before = [], ""
    for row in rows:
        label = row[0].rstrip("".join(MARKS))
        body += [r"\midrule"] if before and label != before else []
        body.append(" & ".join(map(_tex, row)) + r" \\")
        before = label
    text = [
        r"\begin{table}[t]",
        r"\centering\small\setlength{\tabcolsep}{3pt}",
        *([rf"\caption{{{_tex(table.title)}}}"] if table.title else []),
        rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
        r"\toprule",
        " & ".join(map(_tex, header)) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\par\smallskip\begin{minipage}{\linewidth}\footnotesize",
        *(f"{_tex(note)}\\par" for note in notes_of(table)),
        r"\end{minipage}",
        r"\end{table}",
    ]
    if standalone:
        start = [r"\documentclass{article}", r"\usepackage{booktabs}", r"\begin{document}"]
        return "\n".join([*start, *text, r"\end{document}"]) + "\n"
    return "\n".join([r"% needs \usepackage{booktabs}", *text]) + "\n"


def _tex(text: str) -> str:
    """Return a text as LaTeX; a letter that plain LaTeX does not have becomes a question mark."""
    marks = {**_LATEX, **_LATEX_MARKS}
    letters = "".join(marks.get(letter, letter if ord(letter) < 0x250 else "?") for letter in text)
    return re.sub(r"(?<![\w])([+-])(?=\d)", r"$\1$", letters)  # a sign, not a hyphen
