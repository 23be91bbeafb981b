"""The cost of the results and of the missing ones: GPU minutes, from result files and `cost_model.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedblur.experiments.forecast import CellForecast
from fedblur.experiments.result_store import Result
from papers.rendering.document import Document
from papers.rendering.words import grid, listed, minutes, number, symbol


def spent_seconds(document: Document) -> float:
    """Return the seconds of all results on a GPU, each once."""
    return sum(float(result["seconds"] or 0.0) for result in document.own_results() if _on_gpu(result))


def _on_gpu(result: Result) -> bool:
    return "cuda" in str(result.get("machine", ""))


def spent(document: Document) -> str:
    """State minutes, cells, machine and dates in one sentence."""
    results = document.own_results()
    if not results:
        return "No cell has been measured yet, so no GPU minute has been spent."
    on_gpu = [result for result in results if _on_gpu(result)]
    machines = listed(sorted({str(result["hardware"]) for result in on_gpu}))
    dates = sorted({str(result["date"]) for result in results})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    total = len({cell.key for spec in document.specs.values() for cell in spec.cells})
    others = len(results) - len(on_gpu)
    return (
        f"{minutes(spent_seconds(document))} GPU minutes so far (rounds with their evaluations and compilation), for "
        f"{len(on_gpu)} of {total} cells{f' on {machines}' if machines else ''}"
        f"{f' and {others} more on CPUs' if others else ''}, {when}."
    )


def left(document: Document) -> list[tuple[str, CellForecast]]:
    """Return each (table, cell) without a result, by priority; a cell that tables share is named once."""
    cells = [(name, cell) for name, ahead in document.forecasts.items() for cell in ahead.cells if not cell.done]
    found: dict[str, tuple[str, CellForecast]] = {}
    for name, cell in sorted(cells, key=lambda pair: pair[1].priority):
        found.setdefault(cell.key, (name, cell))
    return list(found.values())


def missing(document: Document) -> str:
    """List every cell without a result and its cost, by priority."""
    rows: dict[tuple[int, str, str], list[CellForecast]] = {}
    for name, cell in left(document):
        rows.setdefault((cell.priority, name, cell.name), []).append(cell)
    if not rows:
        return "Nothing: every cell of every table has been measured."
    lines = [
        [str(priority), f"`{name}`", label, _where(cells), _cost(cells)]
        for (priority, name, label), cells in rows.items()
    ]
    return grid(["order", "table", "method", "settings", "GPU minutes"], lines, left=4)


def _where(cells: Sequence[CellForecast]) -> str:
    """Write `ε = 2, 8; seed = 1, 2`: cells of one row of a file are a product of its axes."""
    axes = [cell.axes | ({} if cell.seed is None else {"seed": cell.seed}) for cell in cells]
    names = list(dict.fromkeys(name for each in axes for name in each))
    parts = []
    for name in names:
        values = list(dict.fromkeys(number(each[name]) for each in axes if name in each))
        parts.append(f"{symbol(name)} = {', '.join(values)}")
    return f"{'; '.join(parts)} ({len(cells)} {'cell' if len(cells) == 1 else 'cells'})"


def _cost(cells: Iterable[CellForecast]) -> str:
    seconds = [cell.seconds for cell in cells]
    known = [value for value in seconds if value is not None]
    return minutes(sum(known)) if len(known) == len(seconds) else "unknown"


def missing_by_order(document: Document) -> str:
    """Count cells and minutes for each priority, so that it is clear how far a session's time goes."""
    steps: dict[int, list[CellForecast]] = {}
    for _, cell in left(document):
        steps.setdefault(cell.priority, []).append(cell)
    lines, total = [], 0.0
    for priority, cells in steps.items():
        total += sum(cell.seconds or 0.0 for cell in cells)
        unknown = sum(cell.seconds is None for cell in cells)
        more = f" and {unknown} of unknown cost" if unknown else ""
        lines.append([str(priority), str(len(cells)), _known(cells) + more, minutes(total)])
    return grid(["order", "cells left", "GPU minutes", "with all before"], lines) if lines else ""


def _known(cells: Iterable[CellForecast]) -> str:
    return minutes(sum(cell.seconds or 0.0 for cell in cells))
