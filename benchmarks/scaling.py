"""How the time of a round grows: with the cohort and the local steps linearly, with the population not at all.

    PYTHONPATH=src python benchmarks/scaling.py [--rounds 7] [--out FOLDER]

Whole rounds (sampling, training, clip, noise, ledger, server step) of an MLP on generated clients, on this CPU, in
about a minute. Writes scaling.json and scaling.svg. The fastest of a few rounds counts: other work only ever adds time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from harness.pictures import save_svg
from harness.report import describe_machine

from fedblur.core.config import Config, LocalTraining
from fedblur.engines import suitable_threads
from fedblur.training.machine import Machine
from fedblur.training.round import run_round
from fedblur.training.setup import prepare

COHORTS = (25, 50, 100, 200, 400, 800)
STEPS = (5, 10, 20, 40, 80)
POPULATIONS = (100, 1_000, 10_000, 100_000, 1_000_000)
COHORT, LOCAL_STEPS, POPULATION = 100, 10, 10_000  # where the others stay


@dataclass(frozen=True)
class Point:
    """One measured round."""

    population: int
    cohort: int
    steps: int
    seconds: float  # by the clock
    cpu_seconds: float  # of this process: what other work on the machine does not change


def configured(population: int, cohort: int, steps: int) -> Config:
    """Return the configuration of which rounds are measured."""
    return Config(
        dataset={"name": "synthetic", "min_samples": 50, "max_samples": 50, "held_out_clients": 1},
        clients=population,
        model={"name": "mlp", "hidden": (32,)},
        sampling="fixed",
        sample_rate=cohort / population,
        noise_multiplier=10.0,
        accountant="rdp",
        rounds=1000,
        local=LocalTraining(steps, 10, 0.1),
        method=["blur", "lus"],
        seed=0,
    )


def round_seconds(population: int, cohort: int, steps: int, rounds: int) -> Point:
    """The fastest of `rounds` rounds after some to warm up: a step is traced after 128 calls at most."""
    warm, config = 2 + 128 // steps, configured(population, cohort, steps)
    with tempfile.TemporaryDirectory() as folder:
        setup = prepare(config, Path(folder) / "ledger.jsonl", Machine(device="cpu", engine="vectorised"))
        protocol, clock, cpu = setup.protocol, [], []
        state = protocol.server.init(setup.initial)
        with suitable_threads(setup.initial.device, protocol.layout.total):
            for number in range(warm + rounds):
                began, began_cpu = time.perf_counter(), time.process_time()
                state = run_round(protocol, state, setup.rng.child("round", number + 1)).state
                clock.append(time.perf_counter() - began)
                cpu.append(time.process_time() - began_cpu)
    return Point(population, cohort, steps, min(clock[warm:]), min(cpu[warm:]))


def measure(rounds: int) -> dict[str, list[Point]]:
    """All points, one after another."""
    axes = {
        "cohort": [(POPULATION, cohort, LOCAL_STEPS) for cohort in COHORTS],
        "steps": [(POPULATION, COHORT, steps) for steps in STEPS],
        "population": [(population, COHORT, LOCAL_STEPS) for population in POPULATIONS],
    }
    found: dict[str, list[Point]] = {}
    for axis, settings in axes.items():
        found[axis] = []
        for setting in settings:
            found[axis].append(round_seconds(*setting, rounds))
            print(f"{axis}: {found[axis][-1]}", flush=True)
    return found


def line(points: list[Point], axis: str) -> dict[str, float]:
    """The straight line through the points (least relative squares), and how far the worst point lies from it."""
    x = np.array([getattr(point, axis) for point in points], dtype=float)
    y = np.array([point.cpu_seconds for point in points])
    slope, fixed = np.polyfit(x, y, 1, w=1 / y)
    worst = float(np.max(np.abs(fixed + slope * x - y) / y))
    return {"fixed_ms": 1000 * float(fixed), "ms_each": 1000 * float(slope), "worst_deviation": worst}


def report(found: dict[str, list[Point]], rounds: int) -> dict[str, Any]:
    """Everything that was measured, with machine and date."""
    return {
        "date": f"{date.today():%-d %B %Y}",
        "machine": describe_machine(),
        "rounds": rounds,
        "what": "MLP 60-32-10 on synthetic clients of 50 samples, batch 10, BLUR + LUS, fixed-size cohorts",
        "axes": {
            axis: {"line": line(points, axis), "points": [vars(point) for point in points]}
            for axis, points in found.items()
        },
    }


def plot(table: dict[str, Any], path: Path) -> None:
    """Three panels, each with its straight line; the population's axis is logarithmic."""
    from matplotlib.figure import Figure

    words = {"cohort": "clients in a round", "steps": "local steps", "population": "clients in the population"}
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    for axes, (axis, found) in zip(figure.subplots(1, 3), table["axes"].items(), strict=True):
        x = np.array([point[axis] for point in found["points"]], dtype=float)
        y = [1000 * point["cpu_seconds"] for point in found["points"]]
        axes.plot(x, y, "o", color="tab:orange", label="measured")
        fit = found["line"]["fixed_ms"] + found["line"]["ms_each"] * x
        axes.plot(x, fit, "--", color="tab:gray", label=f"{found['line']['ms_each']:.2g} ms each")
        if axis == "population":
            axes.set_xscale("log")
        axes.set_ylim(0, 1.25 * max(y))
        axes.set_xlabel(words[axis])
        axes.set_ylabel("ms of CPU time a round")
        axes.legend()
    figure.suptitle(f"{table['what']}; {table['machine']}, {table['date']}", fontsize=9)
    save_svg(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of each point")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    table = report(measure(options.rounds), options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "scaling.json").write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n")
    plot(table, options.out / "scaling.svg")
    for axis, found in table["axes"].items():
        print(axis, found["line"])


if __name__ == "__main__":
    main()
