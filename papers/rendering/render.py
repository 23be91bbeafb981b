"""A page from its template. Every figure in it comes from results, from the paper's own, or is computed here.

The template is Jinja; the names below are all that it knows. A name that does not exist is an error, not a blank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from fedblur.core.config import to_dict
from fedblur.core.errors import ConfigError
from fedblur.core.files import write_atomically
from papers.rendering import spending, tables
from papers.rendering.claims import OPEN, Verdict, verdicts
from papers.rendering.document import Document, read_document
from papers.rendering.figures import Drawing, drawings
from papers.rendering.gains import chance, gains, printed_gains, span
from papers.rendering.words import grid, listed, minutes, number, setting

TEMPLATE, PAGE = "page/README.md.jinja", "README.md"


@dataclass(frozen=True)
class Page:
    """A rendered page and its figures, not yet written."""

    path: Path
    text: str
    figures: tuple[Drawing, ...]
    stale: tuple[str, ...]  # results that no cell wants

    def outdated(self) -> list[str]:
        """Return the files that do not show the results as they are now."""
        old = [] if self.path.exists() and self.path.read_text(encoding="utf-8") == self.text else [self.path]
        return [str(path) for path in [*old, *(drawing.path for drawing in self.figures if not drawing.current)]]

    def write(self) -> None:
        write_atomically(self.path, self.text.encode())
        for drawing in self.figures:
            drawing.write()


def render_page(folder: Path, results: Path | None = None) -> Page:
    """Read a paper's folder and render its page."""
    document = read_document(folder, results)
    plots = drawings(document)
    template = folder / TEMPLATE
    if not template.is_file():
        raise ConfigError(f"{template} does not exist; a page needs a template")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    try:
        text = environment.from_string(template.read_text(encoding="utf-8")).render(names(document, plots))
    except jinja2.TemplateError as error:
        raise ConfigError(f"{template}: {error}") from None
    command = f"python -m papers.rendering {_short(folder)}"
    head = f"<!-- Made by `{command}` from results and page/: edit those, not this file. -->\n"
    return Page(folder / PAGE, head + text, tuple(plots.values()), tuple(stale(document)))


def _short(folder: Path) -> str:
    """Return the folder as typed at the repository's root."""
    return "/".join(folder.resolve().parts[-2:])


def stale(document: Document) -> list[str]:
    """Name the results whose settings no cell has: they are kept and never used."""
    cells = [cell for spec in document.specs.values() for cell in spec.cells]
    wanted, names = {cell.key: cell.config for cell in cells}, {cell.key: cell.name for cell in cells}
    return [str(item) for item in document.results.stale(wanted, names, document.specs)]


def names(document: Document, plots: Mapping[str, Drawing]) -> dict[str, Any]:
    """Return what a template may use."""
    decided = verdicts(document)
    return {
        "table": lambda name: tables.table(document, name),
        "noise_table": lambda *chosen: tables.noise_table(document, chosen),
        "figure": lambda name: figure(plots, name),
        "claims": lambda: claims_table(decided),
        "rules": lambda: rules_list(decided),
        "verdict": lambda name: next(item for item in decided if item.name == name),
        "decided": lambda word: [item for item in decided if item.verdict == word],
        "spent": lambda: spending.spent(document),
        "missing": lambda: spending.missing(document),
        "missing_by_order": lambda: spending.missing_by_order(document),
        "measured": lambda *chosen: len(document.own_results(chosen or None)),
        "printed": lambda source, row: f"{document.printed[source][row][0]:.2f}",
        "printed_gains": lambda source, method, base: span(printed_gains(document, source, method, base)),
        "our_gains": lambda name, method, base: our_gains(document, name, method, base),
        "printed_rise": lambda source, low, high: printed_rise(document, source, low, high),
        "accuracy": lambda name, label, axes: accuracy(document, name, label, axes),
        "differ": lambda name, label, one, other: differ(document, name, label, one, other),
        "lower": lambda name, label, one, other: lower(document, name, label, one, other),
        "common": lambda name, label, axes: common(document, name, label, axes),
        "late_rise": lambda name, label, axes: late_rise(document, name, label, axes),
        "below": lambda name, label, axes: below(document, name, label, axes),
        "share": lambda name, label, axes, key: share(document, name, label, axes, key),
        "times": lambda a, b: f"{float(a) / float(b):.1f}",
        "chance": lambda name: f"{chance(document, name, 1):.2f}",
        "value": lambda name, key: number(value(document, name, key)),
        "forecast": lambda name, label, axes: ahead(document, name, label, axes),
        "shrink": shrink,
        "inf": math.inf,  # an ε
        "stale": lambda: stale(document),
        "listed": listed,
        "minutes": minutes,
    }


def figure(plots: Mapping[str, Drawing], name: str) -> str:
    """Return a link to the plot, or say that there is none."""
    drawing = plots[name]
    if not drawing.series:
        return f"*{drawing.plot['title']}: not yet measured.*"
    return f"![{drawing.plot['title']}](figures/{drawing.path.name})"


def claims_table(decided: list[Verdict]) -> str:
    """Write one row for each claim: what it says, the verdict and the evidence."""
    rows = [[f"{item.name}. {item.says}", f"**{item.words}**", _evidence(item)] for item in decided]
    return grid(["claim", "verdict", "evidence (percentage points)"], rows, left=3)


def _evidence(item: Verdict) -> str:
    lines = [
        ("" if finding.counts else f"*side result, {finding.verdict}:* ") + finding.evidence
        for finding in item.findings
        if finding.verdict != OPEN
    ]
    return "<br>".join(lines) or f"Not measured. Expected: {item.expect}"


def rules_list(decided: list[Verdict]) -> str:
    """Return the rules, one a line; those of side results do not decide."""
    lines = []
    for item in decided:
        for finding in item.findings:
            lines.append(
                f"- {item.name}{'' if finding.counts else ' (side result)'}: {finding.rule}: {finding.verdict}."
            )
    return "\n".join(lines)


def our_gains(document: Document, name: str, method: str, baseline: str) -> str:
    """Write `+0.60 at ε = 2; …`, or that nothing is measured."""
    found = gains(document, name, method, baseline, {})
    return "; ".join(map(str, found)) if found else OPEN


def value(document: Document, name: str, key: str) -> Any:
    """Return a setting that all cells of a table share: `clip_norm`, `local.steps`."""
    found = set()
    for cell in document.spec(name).cells:
        here: Any = to_dict(cell.config)
        for part in key.split("."):
            here = here[part]
        found.add(here)
    if len(found) != 1:
        raise ConfigError(f"{name}: {key} has {len(found)} values; a page can state only one")
    return found.pop()


def ahead(document: Document, name: str, label: str, axes: Mapping[str, Any]) -> dict[str, str]:
    """Return σ, R and the noise of a round in units of S, of one setting, as text."""
    for cell in document.forecasts[name].cells:
        if cell.name == label and cell.axes == dict(axes) and cell.signal_to_noise and cell.noise_multiplier:
            over = cell.rounds**0.5 / cell.signal_to_noise  # σ√d/P̄ = √T/R
            return {
                "sigma": f"{cell.noise_multiplier:.3f}",
                "ratio": f"{cell.signal_to_noise:.2f}",
                "over": f"{over:.1f}",
            }
    raise ConfigError(f"{name} has no cell {label} at {setting(axes)}")


def accuracy(document: Document, name: str, label: str, axes: Mapping[str, Any]) -> str:
    """Write the mean over seeds with its spread; nothing where nothing is measured."""
    row = document.group(name, label, axes)
    return "" if row is None or row.accuracy is None else tables.with_spread(row.accuracy, row.spread)


def differ(document: Document, name: str, label: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool | None:
    """Return whether two settings of a method differ by more than chance; None where one is not measured."""
    found = _difference(document, name, label, one, other)
    return None if found is None else abs(found[0]) > found[1]


def lower(document: Document, name: str, label: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool | None:
    """Return whether the first setting is less accurate by more than chance; None where one is not measured."""
    found = _difference(document, name, label, one, other)
    return None if found is None else found[0] < -found[1]


def _difference(
    document: Document, name: str, label: str, one: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[float, float] | None:
    """Return the difference of two settings' means in points, and two standard errors of it."""
    rows = [document.group(name, label, axes) for axes in (one, other)]
    means = [row.accuracy for row in rows if row is not None and row.accuracy is not None]
    if len(means) < 2:
        return None
    return means[0] - means[1], chance(document, name, min(len(row.results) for row in rows if row is not None))


def common(document: Document, name: str, label: str, axes: Mapping[str, Any]) -> str:
    """Return how much of its length S an update shares with the others of its cohort, at the end of a run.

    κ is the length of the cohort's mean in units of S. Updates without anything in common would give 1/√P̄, so the rest
    is √(κ² − 1/P̄); over the last tenth of the recorded rounds, as one cohort is a small sample.
    """
    row = document.group(name, label, axes)
    norms = row.results[0]["norms"] if row is not None and row.results else []
    lengths = [item["kappa"] for item in norms if "kappa" in item]
    if row is None or not lengths:
        return OPEN
    last = lengths[-max(1, len(lengths) // 10) :]
    rest = sum(kappa**2 for kappa in last) / len(last) - 1 / row.results[0]["privacy"]["expected_cohort"]
    return f"{100 * max(0.0, rest) ** 0.5:.0f} %"


def share(document: Document, name: str, label: str, axes: Mapping[str, Any], key: str) -> str:
    """Return a share among a result's local figures in percent; the median where it is given by quartiles."""
    row = document.group(name, label, axes)
    found = row.results[0]["local_only"].get(key) if row is not None and row.results else None
    if found is None:
        return OPEN
    return f"{100 * (found[1] if isinstance(found, list) else found):.0f} %"


def below(document: Document, name: str, label: str, axes: Mapping[str, Any]) -> str:
    """Return by how many points we are below the paper there (negative: above)."""
    row = document.group(name, label, axes)
    theirs = None if row is None else tables.printed_value(document, name, row)
    if row is None or row.accuracy is None or theirs is None:
        return OPEN
    return f"{theirs[0] - row.accuracy:.1f}"


def late_rise(document: Document, name: str, label: str, axes: Mapping[str, Any]) -> str:
    """Return by how many points accuracy rose over the last tenth of the rounds: whether it had converged."""
    row = document.group(name, label, axes)
    curve = row.results[0]["curve"] if row is not None and row.results else []
    if not curve:
        return OPEN
    last, end = curve[-1]
    before = max((point for point in curve if point[0] <= 0.9 * last), default=curve[0])
    return f"{100 * (end - before[1]):+.2f}"


def printed_rise(document: Document, source: str, low: str, high: str) -> str:
    """Return the rise between two rows of a table of the paper."""
    rows = document.printed[source]
    return f"{rows[high][0] - rows[low][0]:+.2f}"


def shrink(strength: str, rate: str, steps: str) -> str:
    """Return by how much λ shortens an update if it acts from the first step: 1 − (1 − (1 − λη)^Q)/(Qλη)."""
    x, q = float(strength) * float(rate), int(steps)
    return f"{100 * (1 - (1 - (1 - x) ** q) / (q * x)):.0f} %"
