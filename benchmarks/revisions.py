"""Compare a round of this checkout with one of an earlier revision: ratios in one run on this machine's CPU.

    python benchmarks/revisions.py REVISION [--rounds 9] [--workloads W W-small]

Both revisions run the same inputs, alternating, in a process each. Prints the median of the ratios of neighbouring
turns, so that other work on the machine hits both alike. The exit status is 1 if their clipped sums differ.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
from harness.environments import BENCHMARKS
from harness.measure import TOLERANCE, relative
from harness.process import System
from harness.workloads import WORKLOADS, Workload
from peers.task import save_task

HERE = BENCHMARKS.parent


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("revision", help="what git calls the earlier code, such as v0.2.0 or 1cdc24b")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each revision")
    parser.add_argument("--workloads", nargs="+", default=names, choices=names)
    return parser.parse_args()


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Yield a folder with the files of a revision; it is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="fedblur-revision-") as name:
        archive = subprocess.run(["git", "archive", revision], cwd=HERE, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", name, "src", "benchmarks"], input=archive, check=True)
        yield Path(name)


def compare(workload: Workload, earlier: Path, turns: int) -> bool:
    """Print one workload's ratio; return whether both revisions computed the same sum."""
    with ExitStack() as stack:
        systems = []
        for tree in (HERE, earlier):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedblur-bench-")))
            save_task(workload.task(), folder / "inputs.npz")
            systems.append(stack.enter_context(closing(System("ours", folder / "inputs.npz", folder, None, tree))))
        sums = [system.round()[1] for system in systems]  # warm-up
        seconds: tuple[list[float], list[float]] = ([], [])
        for turn in range(turns):
            for side in (0, 1) if turn % 2 else (1, 0):
                seconds[side].append(systems[side].round()[0])
    now, before = (sorted(times)[len(times) // 2] for times in seconds)
    difference = float(np.linalg.norm(sums[0] - sums[1]) / np.linalg.norm(sums[1]))
    print(
        f"{workload.name}: now {now:.5f} s, before {before:.5f} s a round; now / before = {relative(*seconds):.3f} "
        f"(median of {turns} turns); the sums differ by {difference:.1e}",
        flush=True,
    )
    return difference <= TOLERANCE


def main() -> int:
    if shutil.which("git") is None:
        sys.exit("git is needed to read the earlier revision")
    options = parse()
    chosen = [workload for workload in WORKLOADS if workload.name in options.workloads]
    with checkout(options.revision) as earlier:
        same = [compare(workload, earlier, options.rounds) for workload in chosen]  # measure them all
        return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
