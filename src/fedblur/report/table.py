"""A table of results, rendered from result files, never typed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedblur.experiments.forecast import Forecast
from fedblur.experiments.table import Line
from fedblur.learning.metrics.measures import ACCURACY

_NARROWEST = 12  # of folded labels
_ANY = 10_000  # columns: no terminal's


def render(title: str, lines: Sequence[Line]) -> Table:
    """Return rows with mean ± standard deviation over seeds, and a paper's figures beside them where there are any."""
    with_expected = any(line.expected is not None for line in lines)
    axes = list(dict.fromkeys(name for line in lines for name in line.axes))
    measure = lines[0].measure if lines else ACCURACY
    sign, digits = " %" if measure.percent else "", measure.digits
    paper = [f"paper{sign}"] if with_expected else []
    columns = [f"{measure.words}{sign}", *paper, "seeds", "noise σ", "ε spent", "clipped"]
    table = _table(title, [line.label for line in lines], [*axes, *columns])
    for line in lines:
        expected = "" if line.expected is None else f"{line.expected:.{digits}f}"
        table.add_row(
            escape(line.label),
            *(escape(str(line.axes.get(name, "–"))) for name in axes),
            f"{line.mean:.{digits}f}" + (f" ± {line.spread:.{digits}f}" if line.seeds > 1 else ""),
            *([expected] if with_expected else []),
            str(line.seeds),
            f"{line.noise_multiplier:.3f}",
            f"{line.epsilon:.3f}",
            "–" if line.clipped is None else f"{100 * line.clipped:.0f} %",
        )
    return table


def render_forecast(forecast: Forecast) -> Table:
    """Return cells in the order in which they would run."""
    axes = list(dict.fromkeys(name for cell in forecast.cells for name in cell.axes))
    columns = ["seed", "order", "rounds", "noise σ", "R", "time"]
    table = _table(forecast.title, [cell.name for cell in forecast.cells], [*axes, *columns])
    for cell in forecast.cells:
        table.add_row(
            escape(cell.name),
            *(escape(str(cell.axes.get(name, "–"))) for name in axes),
            "–" if cell.seed is None else str(cell.seed),
            str(cell.priority),
            str(cell.rounds),
            "unknown" if cell.noise_multiplier is None else f"{cell.noise_multiplier:.3f}",
            "–" if cell.signal_to_noise is None else f"{cell.signal_to_noise:.2f}",
            ("done, " if cell.done else "") + ("unknown" if cell.seconds is None else f"{cell.seconds:.0f} s"),
        )
    return table


def print_whole(table: Table, console: Console) -> None:
    """Print without cutting: a table wider than the terminal keeps its width, and the terminal folds it."""
    for column in table.columns:
        if column.no_wrap:  # figures: whole cells, not their longest words
            texts = [str(column.header), *map(str, column.cells)]
            column.min_width = max(cell_len(line) for text in texts for line in text.split("\n"))
    least = table.__rich_measure__(console, console.options.update(width=_ANY)).minimum
    table.width = least if least > console.width else None
    console.print(table, crop=False, overflow="ignore")


def _table(title: str, labels: Sequence[str], names: Sequence[str]) -> Table:
    """Return a table without rows. Labels fold where a terminal is narrow, so that no figure is left out."""
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold", min_width=min(_NARROWEST, max(map(len, labels), default=0)))
    for name in names:  # dotted names are long: two lines
        table.add_column(escape(name).replace(".", ".\n"), justify="right", no_wrap=True)
    return table
