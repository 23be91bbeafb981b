"""The short table of docs/performance.md, rendered from results/cpu.json and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.environments import BENCHMARKS
from harness.measure import relative

BEGIN, END = "<!-- make bench writes this table -->", "<!-- end of the table -->"
NAMES = {
    "loop": "plain PyTorch loop",
    "ours": "**FedBlur**",
    "pfl": "pfl",
    "flower": "Flower on Ray",
    "fedjax": "FedJAX",
}


def front_table(results: dict[str, Any]) -> str:
    """Systems × workloads: seconds a round, and by how much FedBlur is faster in the same run."""
    workloads = results["workloads"]
    heads = "".join(f" {w['workload']['name']}: s a round | its time ÷ FedBlur's |" for w in workloads)
    lines = [f"| system |{heads}", f"|---|{'---|---|' * len(workloads)}"]
    for system in [row["system"] for row in workloads[0]["systems"]]:
        cells = [cell for workload in workloads for cell in _cells(workload["systems"], system)]
        lines.append(f"| {NAMES[system]} | {' | '.join(cells)} |")
    words = "; ".join(f"{w['workload']['name']} is {w['workload']['words']}" for w in workloads)
    where = (
        f"{results['machine']}, {results['date']}, `make bench`, median of {results['rounds']} turns after a warm-up."
    )
    busy = max(w["other_work_percent"] for w in workloads)
    caution = f" The machine was busy with other work ({busy:.0f} %): rough figures." if busy > 10 else ""
    return "\n".join([*lines, "", f"{where} {words}.{caution}"]) + "\n"


def _cells(rows: list[dict[str, Any]], system: str) -> list[str]:
    row = next(row for row in rows if row["system"] == system)
    ours = next((row["seconds"] for row in rows if row["system"] == "ours" and not row["error"]), [])
    if row["error"] or row["median"] is None:
        return ["not measured", "–"]
    faster = "–" if not ours or system == "ours" else f"{relative(row['seconds'], ours):.3g}"
    return [f"{row['median']:.2g}", faster]


def render_front(folder: Path = BENCHMARKS / "results", page: Path = BENCHMARKS.parent / "docs/performance.md") -> None:
    """Put the table between the page's markers."""
    table = front_table(json.loads((folder / "cpu.json").read_text()))
    before, rest = page.read_text().split(BEGIN, 1)
    page.write_text(f"{before}{BEGIN}\n{table}{END}{rest.split(END, 1)[1]}")
