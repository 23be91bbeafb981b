"""`make bench`: this library and its peers on the same model, batches and cohort, in one run on this machine's CPU.

    python benchmarks/run.py [--rounds 7] [--systems loop ours pfl flower fedjax] [--workloads W W-small] [--out FOLDER]

Peers are installed on the first run into `benchmarks/.envs/`. One that cannot be installed or fails is reported with
the reason, and the others go on. At the end it measures what noise costs (`noise.py`). The exit status is 1 if any
system failed or computed another sum.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import noise
from harness.environments import BENCHMARKS, Unavailable, python_of
from harness.front import render_front
from harness.measure import SYSTEMS, measure
from harness.report import make_report, markdown, render, write
from harness.workloads import WORKLOADS


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of each system")
    parser.add_argument("--systems", nargs="+", default=[*SYSTEMS], choices=SYSTEMS)
    parser.add_argument("--threads", type=int, help="of PyTorch in each process; default: as many as PyTorch chooses")
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--workloads", nargs="+", default=names, choices=names)
    parser.add_argument("--out", type=Path, help="write only to this folder, not to benchmarks/results and the pages")
    return parser.parse_args()


def install(systems: tuple[str, ...]) -> None:
    """Environments first: installing must not run beside a measurement."""
    for name in systems:
        try:
            python_of(name)
        except Unavailable as reason:
            print(reason, file=sys.stderr, flush=True)  # the table reports it too


def main() -> int:
    options = parse()
    systems = ("loop", *(name for name in SYSTEMS[1:] if name in options.systems))  # the loop is always measured
    install(systems)
    chosen = [workload for workload in WORKLOADS if workload.name in options.workloads]
    measured = []
    for workload in chosen:
        print(f"{workload.name}: {workload.words}", flush=True)
        measured.append(measure(workload, systems, options.rounds, options.threads))
    report = make_report(measured, options.rounds, options.threads)
    write(report, options.out or BENCHMARKS / "results")
    drawn = noise.measure(repeats=5)
    noise.write(drawn, options.out or BENCHMARKS / "results")
    if not options.out:
        render(report, BENCHMARKS / "results", BENCHMARKS / "README.md")
        render_front()
        noise.render(drawn, BENCHMARKS / "README.md")
    print(markdown(report, "cpu.svg"), noise.table(drawn), sep="\n")
    return int(any(row.error for each in measured for row in each.rows))


if __name__ == "__main__":
    sys.exit(main())
