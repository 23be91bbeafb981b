"""A table as Markdown, ours beside the paper's, under a caption that says what a reader must know."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedblur.core.config import Config
from fedblur.experiments.table_spec import Cell
from fedblur.privacy.claim import SEEDED
from fedblur.voting.protocol import TRUST as VOTING_TRUST
from papers.rendering.document import Document, Group
from papers.rendering.tuning import tuning_state
from papers.rendering.words import grid, in_order, listed, number, setting, symbol

_WIDE = 8  # more methods than this are listed one below the other
NOTHING = "No cell of this table has been measured yet."


def table(document: Document, name: str) -> str:
    """Write the caption, then rows by setting and columns by method; the paper's figure, if any, beneath ours."""
    rows = document.groups(name)
    measured = sum(len(row.results) for row in rows)
    body = _pivot(document, name, rows)
    parts = [caption(document, name), body] if measured or _printed_rows(document, name) else [caption(document, name)]
    return "\n\n".join([*parts, _progress(document, name)])


def caption(document: Document, name: str) -> str:
    """Write the caption from settings alone, so that it is complete before the first result."""
    spec = document.spec(name)
    configs = [cell.config for cell in spec.cells]
    lines = [f"**{spec.title}.** {spec.note.strip()}"]
    if name in document.tuning:
        lines.append(str(tuning_state(document, name)))
    lines.append(_privacy(configs))
    clipped = _clipped(document.groups(name))
    return "\n".join(lines + ([clipped] if clipped else []))


def _privacy(configs: Sequence[Config]) -> str:
    """State invariant 10 in one sentence: ε is on an axis or in the title."""
    deltas = listed(sorted({f"δ = {config.delta}" for config in configs}))
    accountants = listed(sorted({config.accountant.upper() for config in configs}))
    rounds = listed(sorted({f"{config.rounds:,}" for config in configs if config.voting is None}))
    seeds = any(config.seed is not None for config in configs)
    rates = {config.sampling.part_name.capitalize() for config in configs if config.voting is None}
    return (
        f"{rounds} rounds; {deltas}, {accountants} accounting, add or remove one client, {listed(sorted(rates))} "
        f"sampling; accuracy in percent on {listed(sorted({c.evaluate for c in configs}))} data, final round. "
        f"Trust: {'; or '.join(_trust(configs))}. ± is the standard deviation over seeds; without it, one seed."
        + (f" {SEEDED} (to be reproducible)." if seeds else "")
    )


def _trust(configs: Sequence[Config]) -> list[str]:
    models = [VOTING_TRUST if config.voting is not None else str(config.mechanism.trust) for config in configs]
    return list(dict.fromkeys(models))


def _clipped(rows: Sequence[Group]) -> str:
    shares: dict[str, list[float]] = {}
    for row in rows:
        for result in row.results:
            share = result["local_only"].get("clipped_share")
            if share is not None:
                shares.setdefault(row.label, []).append(float(share))
    words = [f"{label} {100 * statistics.mean(values):.0f} %" for label, values in shares.items()]
    return f"Share of updates clipped: {listed(words)}." if words else ""


def _pivot(document: Document, name: str, rows: Sequence[Group]) -> str:
    labels = list(dict.fromkeys(row.label for row in rows))
    axes = list(dict.fromkeys(axis for row in rows for axis in row.axes))
    places = {tuple((axis, row.axes.get(axis)) for axis in axes) for row in rows}
    points = sorted(places, key=lambda point: in_order(value for _, value in point))
    by_place = {(tuple((axis, row.axes.get(axis)) for axis in axes), row.label): row for row in rows}
    ratios = _ratios(document, name)
    if not axes:  # nothing but methods to compare: one below the other
        return _list(document, name, rows, ratios)
    here = [[by_place.get((point, label)) for label in labels] for point in points]
    entries = [["" if row is None else _entry(document, name, row) for row in line] for line in here]
    groups = [[row.cells[0].group for row in line if row is not None] for line in here]
    signal = [next((f"{ratios[group]:.2f}" for group in line if group in ratios), "–") for line in groups]
    values = [["–" if value is None else number(value) for _, value in point] for point in points]
    if len(axes) == 1 and len(labels) > _WIDE:
        heads = [f"{symbol(axes[0])} = {value}" for (value,) in values]
        columns = [[label, *column] for label, *column in zip(labels, *entries, strict=True)]
        return grid(["", *heads], [["R of the first row", *signal], *columns])
    lines = [[*place, ratio, *line] for place, ratio, line in zip(values, signal, entries, strict=True)]
    return grid([*map(symbol, axes), "R", *labels], lines)


def _list(document: Document, name: str, rows: Sequence[Group], ratios: dict[str, float]) -> str:
    lines = []
    for row in rows:
        ratio = ratios.get(row.cells[0].group)
        lines.append([row.label, "–" if ratio is None else f"{ratio:.2f}", _entry(document, name, row)])
    return grid(["", "R", "accuracy %"], lines)


def _ratios(document: Document, name: str) -> dict[str, float]:
    """Return R by row, of the first method at a setting: others differ by the accountant at most."""
    found: dict[str, float] = {}
    for cell in document.forecasts[name].cells:
        group = " | ".join([cell.name, *(f"{axis}={value}" for axis, value in cell.axes.items())])
        if cell.signal_to_noise is not None:
            found.setdefault(group, cell.signal_to_noise)
    return found


def _entry(document: Document, name: str, row: Group) -> str:
    ours = "–" if row.accuracy is None else with_spread(row.accuracy, row.spread)
    theirs = printed_value(document, name, row)
    return ours if theirs is None else f"{ours}<br>paper {with_spread(*theirs)}"


def with_spread(value: float, spread: float | None) -> str:
    """Write `74.48 ± 0.52`."""
    return f"{value:.2f}" if spread is None else f"{value:.2f} ± {spread:.2f}"


def printed_value(document: Document, name: str, row: Group) -> tuple[float, float | None] | None:
    """Return what the paper prints for this row; an axis that the paper does not have (N of Table 2) is left out."""
    rows = _printed_rows(document, name)
    for key, value in rows.items():
        label, *axes = key.split(" | ")
        wanted = {axis: text for axis, _, text in (part.partition("=") for part in axes)}
        mine = {axis: str(value) for axis, value in row.axes.items()}
        extra = mine.keys() - {axis for other in rows for axis in _axes_of(other)}
        if label == row.label and {axis: text for axis, text in mine.items() if axis not in extra} == wanted:
            return value
    return None


def _axes_of(key: str) -> list[str]:
    return [part.partition("=")[0] for part in key.split(" | ")[1:]]


def _printed_rows(document: Document, name: str) -> dict[str, tuple[float, float | None]]:
    return document.printed[document.sources[name]] if name in document.sources else {}


def _progress(document: Document, name: str) -> str:
    cells = document.spec(name).cells
    done = sum(cell.key in document.results.found for cell in cells)
    if not done:
        return f"*{NOTHING}*"
    return "" if done == len(cells) else f"*{done} of {len(cells)} cells measured.*"


def noise_table(document: Document, names: Sequence[str]) -> str:
    """List σ, the noise of a round's mean in units of S, and R: what a setting can carry, before any run."""
    lines: dict[tuple[str, ...], None] = {}
    for name in names:
        cells = zip(_ordered(document, name), document.forecasts[name].cells, strict=True)
        for cell, ahead in sorted(cells, key=lambda pair: (pair[0].config.clients or 0, pair[0].config.epsilon or 0)):
            config, ratio, sigma = cell.config, ahead.signal_to_noise, ahead.noise_multiplier
            if ratio is None or sigma is None or config.accountant != "pld" or not config.clients:
                continue
            where = {"clients": config.clients, "epsilon": config.epsilon, "rounds": config.rounds}
            over = config.rounds**0.5 / ratio  # σ√d/P̄ = √T/R
            title = f"{config.dataset.part_name}, {config.model.part_name}"
            lines[(title, setting(where), f"{sigma:.3f}", f"{over:.1f}", f"{ratio:.2f}")] = None
    return grid(["data, model", "setting", "σ", "noise of a round ÷ S", "R"], list(lines), left=2)


def _ordered(document: Document, name: str) -> list[Cell]:
    return sorted(document.spec(name).cells, key=lambda cell: cell.priority)
