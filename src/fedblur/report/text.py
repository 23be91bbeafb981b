"""Text: a run's result on the terminal, and how an ε (never smaller than it is) and a count are written."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context, Decimal
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedblur.learning.metrics.measures import measure_of
from fedblur.privacy.claim import PopulationTotal
from fedblur.training.run_folder import RunSummary


def counted(count: int, word: str) -> str:
    """Return `1 release`, `4 releases`."""
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def rounded_up(value: float | None) -> str:
    """Return an ε with three decimals, rounded up exactly."""
    if value is None:
        return "no bound"
    if not math.isfinite(value):
        return "∞"
    return str(Decimal(value).quantize(Decimal("0.001"), ROUND_CEILING, Context(prec=400)))


def in_short(value: float | None, digits: int = 3) -> str:
    """Return an ε with so many significant digits, rounded up exactly, without trailing zeros."""
    if value is None:
        return "no bound"
    if not math.isfinite(value):
        return "∞"
    return f"{float(Context(digits, ROUND_CEILING).create_decimal(Decimal(value))):.{digits}g}"


def words_of_population(total: PopulationTotal) -> str:
    """Say what everyone has spent on these people."""
    of = "" if total.budget is None else f" of {total.budget:g}"
    line = f"population {total.name}: ε = {in_short(total.epsilon)}{of} at δ = {total.delta:.3g}"
    more = f", ε = {in_short(total.reserved)} with what is reserved" if total.reserved != total.epsilon else ""
    return f"{line}, {counted(total.runs, 'run')}{more}"


def words_of_figure(name: str, value: float) -> str:
    """Return a metric's figure in words: shares in percent, others as numbers."""
    measure = measure_of(name)
    return measure.shown(value) if measure.percent else f"{value:.4g}"


def print_summary(run: Path, summary: RunSummary, console: Console) -> None:
    """Print the headline first, then what the privacy claim states, then where everything is."""
    privacy = summary.privacy
    table = Table(show_header=False, box=None, pad_edge=False)
    clipped, quartiles = (summary.local_only.get(key) for key in ("clipped_share", "teacher_accuracy_quartiles"))
    if privacy.votes:
        noise = f"σ_v = {privacy.vote_noise_std:.4g} votes on each of {privacy.queries:,} labels"
    else:
        ratio = privacy.signal_to_noise
        words = f"{ratio:.2f}" if ratio is not None and math.isfinite(ratio) else "∞"
        noise = f"σ = {privacy.noise_multiplier:.4g}, clip norm {privacy.clip_norm:g}, signal-to-noise R = {words}"
    (metric, figure), *others = summary.metrics.items()
    more = "".join(f"{measure_of(name).words} {words_of_figure(name, value)}, " for name, value in others)
    lines = {
        "status": summary.status,
        measure_of(metric).words: f"{words_of_figure(metric, figure)} ({summary.evaluated_on} data, final round), "
        f"{more}loss {summary.loss:.3f}",
        "privacy": f"ε = {in_short(privacy.epsilon)} at δ = {privacy.delta:.3g} "
        f"({privacy.accountant.upper()}), {privacy.adjacency}",
        "noise": noise,
        "sampling": privacy.sampling,
        "trust": privacy.trust_model,
        "clipped": "–" if clipped is None else f"{100 * clipped:.0f} % of updates (local only, not released)",
    }
    if isinstance(quartiles, list) and len(quartiles) == 3 and None not in quartiles:
        low, median, high = (f"{100 * value:.1f}" for value in quartiles)
        lines["teachers"] = f"median accuracy {median} %, quartiles {low} to {high} % (local only, not released)"
    lines |= {
        "data": f"{summary.data}, {summary.clients} clients, {summary.parameters:,} parameters",
        "run": str(run),
    }
    if privacy.tuned:  # by `fedblur tune`: which way, and what it cost
        lines["tuning"] = privacy.tuning
    if summary.data_note:
        lines["note"] = summary.data_note
    if privacy.own_parts:
        lines["own parts"] = "; ".join(part.told for part in privacy.own_parts)
    if privacy.cautions:
        lines["CAUTION"] = "; ".join(privacy.cautions)
    if privacy.warning:
        lines["WARNING"] = privacy.warning
    for name, value in lines.items():
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    console.print(table)
    if privacy.population is not None:
        console.print(words_of_population(privacy.population), highlight=False, markup=False, soft_wrap=True)
