"""What was measured as Markdown, JSON and a plot, and the Markdown again inside README.md, between its markers."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from harness.front import NAMES
from harness.measure import TOLERANCE, Measured, Row, relative
from harness.pictures import save_svg
from harness.workloads import Workload

BEGIN, END = "<!-- make bench writes from here -->", "<!-- to here -->"
BUSY = 10.0  # percent of the machine


@dataclass(frozen=True)
class Report:
    """One run of the benchmark."""

    day: str
    machine: str
    turns: int
    threads: int | None  # the limit that PyTorch's processes were given
    workloads: list[Measured]

    def notes(self) -> list[str]:
        """What a reader must know before using the figures."""
        worst = max(measured.others for measured in self.workloads)
        notes = [
            f"Median of {self.turns} turns after a warm-up; in a turn each system has rounds for three seconds, and at "
            "least one (their mean). A round is: train every client with plain SGD, clip, sum; no "
            "noise, no evaluation. Ratios compare rounds of the same turn. "
            f"All sums are checked against the loop's to {TOLERANCE:.0e} (relative l2).",
        ]
        if self.threads:
            notes.append(f"PyTorch had {self.threads} thread{'s'[: self.threads - 1]} in each process (--threads).")
        if worst > BUSY:
            notes.append(
                f"**Rough figures**: the machine was busy with other work, which took {worst:.0f} % of it while every "
                "system waited; that slows processes with several threads most. To be run again on a quiet machine."
            )
        return notes


def describe_machine() -> str:
    """Cores and the CPU's model name."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = names[0] if names else name
    return f"{os.cpu_count()} CPU cores, {name}"


def make_report(workloads: list[Measured], turns: int, threads: int | None) -> Report:
    """What was measured, with today's date and this machine."""
    return Report(f"{date.today():%-d %B %Y}", describe_machine(), turns, threads, workloads)


def markdown(report: Report, picture: str) -> str:
    """The tables, with machine, date and notes."""
    parts = [f"{report.machine}, {report.day}.", *report.notes()]
    for measured in report.workloads:
        parts.append(f"**{measured.workload.name}**: {measured.workload.words}")
        parts.append(_table(measured))
    parts.append(f"![Time of a round against the plain loop]({picture})")
    return "\n\n".join(parts) + "\n"


def _table(measured: Measured) -> str:
    ours = next((row.seconds for row in measured.rows if row.system == "ours" and not row.error), [])
    lines = [
        "| system | s a round (fastest to slowest) | time, loop = 1 | its time ÷ FedBlur's | sum differs by | how |",
        "|---|---|---|---|---|---|",
    ]
    for row in measured.rows:
        cells = [f"{NAMES[row.system]}, {row.version}".rstrip(", "), *_figures(row, ours), row.how]
        lines.append(f"| {' | '.join(cells)} |")
    failures = [f"{NAMES[row.system]} does not count: {row.error}." for row in measured.rows if row.error]
    return "\n".join(lines) + "".join(f"\n\n{failure}" for failure in failures)


def _figures(row: Row, ours: list[float]) -> list[str]:
    if row.error or row.median is None:
        return ["not measured", "–", "–", "–" if row.deviation is None else f"{row.deviation:.0e}"]
    seconds = f"{row.median:.3g} ({min(row.seconds):.3g} to {max(row.seconds):.3g})"
    ratio = "–" if row.ratio is None else f"{row.ratio:.2g}"
    faster = "–" if not ours or row.system == "ours" else f"{relative(row.seconds, ours):.3g}"
    return [seconds, ratio, faster, "0" if not row.deviation else f"{row.deviation:.0e}"]


def as_json(report: Report) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        "date": report.day,
        "machine": report.machine,
        "rounds": report.turns,
        "threads": report.threads,
        "notes": report.notes(),
        "workloads": [
            {
                "workload": asdict(measured.workload),
                "other_work_percent": measured.others,
                "systems": [{**asdict(row), "median": row.median} for row in measured.rows],
            }
            for measured in report.workloads
        ],
    }


def read_report(path: Path) -> Report:
    """The inverse of `as_json`."""
    table = json.loads(path.read_text(encoding="utf-8"))
    measured = [
        Measured(
            Workload(**{**each["workload"], "shape": tuple(each["workload"]["shape"])}),
            [Row(**{key: value for key, value in row.items() if key != "median"}) for row in each["systems"]],
            each["other_work_percent"],
        )
        for each in table["workloads"]
    ]
    return Report(table["date"], table["machine"], table["rounds"], table["threads"], measured)


def write(report: Report, folder: Path) -> None:
    """cpu.md, cpu.json and cpu.svg in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.md").write_text("# CPU\n" + markdown(report, "cpu.svg"))
    (folder / "cpu.json").write_text(json.dumps(as_json(report), indent=2, ensure_ascii=False) + "\n")
    plot(report, folder / "cpu.svg")


def render(report: Report, folder: Path, readme: Path) -> None:
    """The tables between the README's markers."""
    text = readme.read_text()
    picture = Path(os.path.relpath(folder / "cpu.svg", readme.parent)).as_posix()
    before, rest = text.split(BEGIN, 1)
    readme.write_text(f"{before}{BEGIN}\n{markdown(report, picture)}{END}{rest.split(END, 1)[1]}")


def plot(report: Report, path: Path) -> None:
    """Time against the loop, one panel a workload, logarithmic."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, measured in zip(
        figure.subplots(1, len(report.workloads), squeeze=False)[0], report.workloads, strict=True
    ):
        rows = [row for row in reversed(measured.rows) if row.ratio is not None and not row.error]
        labels = [NAMES[row.system].strip("*") for row in rows]
        colours = ["tab:orange" if row.system == "ours" else "tab:gray" for row in rows]
        ratios = [float(row.ratio or 1) for row in rows]
        # From 1: a logarithmic axis has no zero, and a bar from anywhere else has a length that says nothing.
        bars = axes.barh(labels, [ratio - 1 for ratio in ratios], left=1, color=colours)
        axes.bar_label(bars, [f"{ratio:.2g}" for ratio in ratios], padding=3)
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.margins(x=0.3)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_title(f"{measured.workload.name}: time of a round, loop = 1", fontsize=10)
    save_svg(figure, path)
