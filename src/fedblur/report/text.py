"""A run's result on the terminal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from fedblur.report.rounding import in_short


class Finished(Protocol):
    """A run, or the winner of a search."""

    @property
    def path(self) -> Path: ...

    @property
    def summary(self) -> dict[str, Any]: ...


def print_summary(run: Finished, console: Console) -> None:
    """Accuracy first, then what the privacy claim states, then where everything is."""
    summary, privacy = run.summary, run.summary["privacy"]
    table = Table(show_header=False, box=None, pad_edge=False)
    clipped = summary["local_only"]["clipped_share"]
    lines = {
        "status": summary["status"],
        "accuracy": f"{100 * summary['accuracy']:.2f} % ({summary['evaluated_on']} data, final round), "
        f"loss {summary['loss']:.3f}",
        "privacy": f"ε = {in_short(privacy['epsilon'])} at δ = {privacy['delta']:.3g} "
        f"({privacy['accountant'].upper()}), {privacy['adjacency']}",
        "noise": _noise(privacy),
        "sampling": privacy["sampling"],
        "trust": privacy["trust_model"],
        "clipped": "–" if clipped is None else f"{100 * clipped:.0f} % of updates (local only, not released)",
        **_voters(summary["local_only"]),
        "data": f"{summary['data']}, {summary['clients']} clients, {summary['parameters']:,} parameters",
        "run": str(run.path),
    }
    if "tuned" in privacy:  # by `fedblur tune`: which way, and what it cost
        lines["tuning"] = privacy["tuning"]
    if summary["data_note"]:
        lines["note"] = summary["data_note"]
    if privacy.get("cautions"):
        lines["CAUTION"] = "; ".join(privacy["cautions"])
    if privacy["warning"]:
        lines["WARNING"] = privacy["warning"]
    for name, value in lines.items():
        table.add_row(f"[bold]{name}[/bold]", value)
    console.print(table)


def _noise(privacy: dict[str, Any]) -> str:
    if "queries" in privacy:
        return f"σ_v = {privacy['vote_noise_std']:.4g} votes on each of {privacy['queries']:,} labels"
    ratio = _number(privacy["signal_to_noise"])
    return f"σ = {privacy['noise_multiplier']:.4g}, clip norm {privacy['clip_norm']:g}, signal-to-noise R = {ratio}"


def _voters(local_only: dict[str, Any]) -> dict[str, str]:
    """How good single voters are, where there are any."""
    quartiles = local_only.get("teacher_accuracy_quartiles")
    if quartiles is None:
        return {}
    low, median, high = (f"{100 * value:.1f}" for value in quartiles)
    return {"teachers": f"median accuracy {median} %, quartiles {low} to {high} % (local only, not released)"}


def _number(value: float | str) -> str:
    value = float(value)
    return f"{value:.2f}" if math.isfinite(value) else "∞"
