"""Rounds of all systems, each in turn, so that other work on the machine hits them alike."""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray
from peers.task import save_task

from harness.environments import Unavailable
from harness.process import System
from harness.workloads import Workload

SYSTEMS = ("loop", "ours", "pfl", "flower", "fedjax")  # the first one is what the others are compared with
TOLERANCE = 1e-5  # relative l2 distance to the loop's clipped sum


@dataclass
class Row:
    """What one system did on one workload."""

    system: str
    version: str = ""
    how: str = ""
    seconds: list[float] = field(default_factory=list)  # of rounds after the warm-up
    ratio: float | None = None  # to the loop: median over turns of this round's time by the loop's
    deviation: float | None = None  # of the clipped sum from the loop's, the largest of all rounds
    error: str = ""  # why it has no figures, or why they do not count

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


@dataclass
class Measured:
    """All systems on one workload."""

    workload: Workload
    rows: list[Row]
    others: float  # share of the machine that other work took while every system waited, in percent


def measure(workload: Workload, systems: tuple[str, ...], turns: int, threads: int | None) -> Measured:
    """One warm-up round each, then `turns` times each system in turn."""
    with tempfile.TemporaryDirectory(prefix="fedblur-bench-") as name:
        folder = Path(name)
        inputs = folder / "inputs.npz"
        save_task(workload.task(), inputs)
        rows = {system: Row(system) for system in systems}
        running = _start(rows, inputs, folder, threads)
        sums: dict[str, list[NDArray[np.float64]]] = {system: [] for system in systems}
        try:
            busy = [_take_turn(workload, running, rows, sums, turn) for turn in range(turns)]
        finally:
            for system in running.values():
                system.close()
        _compare(rows, sums)
        return Measured(workload, list(rows.values()), round(statistics.mean(busy), 1))


def _start(rows: dict[str, Row], inputs: Path, folder: Path, threads: int | None) -> dict[str, System]:
    running = {}
    for name, row in rows.items():
        print(f"  {name}: starting", flush=True)
        try:
            system = System(name, inputs, folder, threads)
            row.version, row.how = system.greeting["version"], system.greeting["how"]
            warm_up, _ = system.round()
        except Unavailable as reason:
            row.error = str(reason)
            print(f"  {reason}", file=sys.stderr, flush=True)
            continue
        running[name] = system
        print(f"  {name}: {row.version}, first round {warm_up:.2f} s", flush=True)
    return running


def _take_turn(
    workload: Workload,
    running: dict[str, System],
    rows: dict[str, Row],
    sums: dict[str, list[NDArray[np.float64]]],
    turn: int,
) -> float:
    """A turn of each; first, how busy the machine is with other work."""
    busy = float(psutil.cpu_percent(interval=1.0))
    for name in [*running]:
        try:
            seconds, total = running[name].round()
        except Unavailable as reason:
            rows[name].error = str(reason)
            del running[name]
            continue
        rows[name].seconds.append(seconds)
        sums[name].append(total)
    times = ", ".join(f"{name} {rows[name].seconds[-1]:.3f} s" for name in running)
    print(f"  {workload.name} round {turn + 1}: {times}", flush=True)
    return busy


def relative(seconds: list[float], others: list[float]) -> float:
    """Median over turns of one system's time by another's: other work on the machine hits both of a turn alike."""
    return statistics.median(a / b for a, b in zip(seconds, others, strict=False))


def _compare(rows: dict[str, Row], sums: dict[str, list[NDArray[np.float64]]]) -> None:
    """Ratios and deviations against the loop. A system whose sum differs has measured something else."""
    loop = next(iter(rows.values()))
    if not sums[loop.system]:
        return
    reference = sums[loop.system][0]
    for row in rows.values():
        if not sums[row.system]:
            continue
        distances = [np.linalg.norm(total - reference) for total in sums[row.system]]
        row.deviation = float(max(distances) / np.linalg.norm(reference))
        row.ratio = relative(row.seconds, loop.seconds)
        if not row.deviation <= TOLERANCE:
            row.error = f"its clipped sum differs from the loop's by {row.deviation:.1e}, more than {TOLERANCE:.0e}"
