"""A table of results, rendered from result files, never typed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedblur.experiments import Line
from fedblur.forecast import Forecast


def render(title: str, lines: Sequence[Line]) -> Table:
    """Rows with mean ± standard deviation over seeds, and a paper's figures beside them where there are any."""
    with_expected = any(line.expected is not None for line in lines)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    axes = list(lines[0].axes) if lines else []
    columns = [
        "accuracy %",
        *(["paper %"] if with_expected else []),
        "seeds",
        "noise σ",
        "ε spent",
        "clipped",
    ]
    _columns(table, [line.label for line in lines], [*axes, *columns])
    for line in lines:
        expected = "" if line.expected is None else f"{line.expected:.2f}"
        table.add_row(
            line.label,
            *(str(line.axes[name]) for name in axes),
            f"{line.accuracy:.2f} ± {line.spread:.2f}" if line.seeds > 1 else f"{line.accuracy:.2f}",
            *([expected] if with_expected else []),
            str(line.seeds),
            f"{line.noise_multiplier:.3f}",
            f"{line.epsilon:.3f}",
            "–" if line.clipped is None else f"{100 * line.clipped:.0f} %",
        )
    return table


def render_forecast(forecast: Forecast) -> Table:
    """Cells in the order in which they would run."""
    table = Table(title=forecast.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    axes = list(dict.fromkeys(name for cell in forecast.cells for name in cell.axes))
    labels = [cell.name for cell in forecast.cells]
    _columns(table, labels, [*axes, "seed", "order", "rounds", "noise σ", "R", "time"])
    for cell in forecast.cells:
        table.add_row(
            cell.name,
            *("–" if name not in cell.axes else str(cell.axes[name]) for name in axes),
            "–" if cell.seed is None else str(cell.seed),
            str(cell.priority),
            str(cell.rounds),
            "unknown" if cell.noise_multiplier is None else f"{cell.noise_multiplier:.3f}",
            "–" if cell.signal_to_noise is None else f"{cell.signal_to_noise:.2f}",
            ("done, " if cell.done else "") + ("unknown" if cell.seconds is None else f"{cell.seconds:.0f} s"),
        )
    return table


_NARROWEST = 12  # of folded labels


def _columns(table: Table, labels: Sequence[str], names: Sequence[str]) -> None:
    """Labels are folded where a terminal is narrow; figures are never left out for them."""
    table.add_column("", overflow="fold", min_width=min(_NARROWEST, max(map(len, labels), default=0)))
    for name in names:
        table.add_column(name.replace(".", ".\n"), justify="right", no_wrap=True)  # dotted names are long: two lines
