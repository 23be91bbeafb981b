"""What each part of accel/ brings on this machine's CPU: CPU time of a round without the part, by that with it.

    python benchmarks/accel_parts.py [--parts …] [--workloads W W-small] [--turns 3]

Each figure is the least of several turns, with and without alternating in processes of their own, so that it can be
taken on a machine that also does other work. A part under 1.05 on every workload is not worth its lines.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent

# How to do without a part: what its function is replaced by before a run is set up. "" is the environment.
PARTS = {
    "replay": ("fedblur.accel.replay", "_MOST", "0"),
    "rewrites: products": ("fedblur.accel.replay", "add_in_products", "lambda *_: None"),
    "rewrites: memory": ("fedblur.accel.replay", "reuse_memory", "lambda *_: None"),
    "replay: merge repeated": ("fedblur.accel.replay", "_merge_repeated", "lambda *_: None"),
    "replay: direct calls": ("fedblur.accel.replay", "_DIRECT", "{}"),
    "malloc": ("fedblur.accel.cpu", "keep_freed_memory", "lambda: False"),
    "cpu_layers: bias": (
        "fedblur.accel.kernels.cpu_layers",
        "_convolution",
        "lambda c: module._note_convolution(c, c.by_torch())",
    ),
    "cpu_layers: dense": ("fedblur.accel.kernels.cpu_layers", "_has_onednn", "lambda: False"),
    "cpu_layers: flatten": ("fedblur.accel.kernels.cpu_layers", "_flat", "lambda func, *args: func(*args)"),
    "pooled": ("", "FEDBLUR_NATIVE", "off"),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=PARTS)
    parser.add_argument("--workloads", nargs="+", default=["W", "W-small"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--round", nargs=2, help=argparse.SUPPRESS)  # a process of its own: workload, part or "all"
    return parser.parse_args()


def without(part: str) -> None:
    """Switch a part off in this process, before anything of it is imported elsewhere."""
    name, attribute, value = PARTS[part]
    if not name:
        os.environ[attribute] = value
        return
    module = importlib.import_module(name)
    if not hasattr(module, attribute):
        raise SystemExit(f"{name} has no {attribute}: correct PARTS")
    setattr(module, attribute, eval(value, {"module": module}))  # noqa: S307


def round_time(name: str) -> float:
    """Return the CPU seconds of a round: all threads, the system's part too."""
    from harness.workloads import WORKLOADS
    from peers.ours import prepare_run, run_round, suitable_threads

    workload = next(workload for workload in WORKLOADS if workload.name == name)
    task, best = workload.task(), float("inf")
    rounds = 60 if name == "W-small" else 3
    with tempfile.TemporaryDirectory() as folder:
        setup = prepare_run(task, Path(folder))
        with suitable_threads(setup.initial.device, setup.protocol.layout.total):
            for _ in range(3):
                run_round(task, setup)
            for _ in range(5):
                began = time.process_time()
                for _ in range(rounds):
                    run_round(task, setup)
                best = min(best, (time.process_time() - began) / rounds)
    return best


def in_process(workload: str, part: str) -> float:
    command = [sys.executable, __file__, "--round", workload, part]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{workload} without {part}: {done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def main() -> None:
    options = parse()
    if options.round:
        workload, part = options.round
        if part != "all":
            without(part)
        print(round_time(workload))
        return
    print("CPU time of a round without the part, by that with it:")
    for part in options.parts:
        figures = []
        for workload in options.workloads:
            turns = [(in_process(workload, part), in_process(workload, "all")) for _ in range(options.turns)]
            apart, together = (min(times) for times in zip(*turns, strict=True))
            figures.append(f"{workload} {apart / together:.3f}")
        print(f"  {part:22} {', '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
