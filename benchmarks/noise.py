"""What noise costs: ours against other ways to draw it, for 10^4, 10^6 and 10^7 coordinates on one and two threads.

And what a private round costs beside a seeded one: CNN-B, 8 clients × 5 steps × batch 64, in turns.

    PYTHONPATH=src python benchmarks/noise.py [--repeats 5] [--out FOLDER]

Part of `make bench`; a minute or two alone. Writes noise.json and the table in this folder's README. The fastest of the
repeats counts: other work only ever adds time. Random words come from AES everywhere but in torch.randn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from harness.report import BUSY, describe_machine
from numpy.typing import NDArray
from private_rounds import rounds

from fedblur.core.rng import Lane, System
from fedblur.privacy.mechanisms import rounded_gaussian
from fedblur.privacy.mechanisms.ddgauss import sample_discrete_gaussian

BEGIN, END = "<!-- make bench writes the noise from here -->", "<!-- end of the noise -->"
COUNTS, THREADS = (10**4, 10**6, 10**7), (1, 2)
SCALE = 2.0**20 * 1.3  # standard deviation in grid steps: what a run has
_PART = 2**18  # coordinates that the two peers draw at once
_SLOW = 10.0  # seconds from which one repeat is enough

Values = NDArray[np.int64]


class Coins:
    """Bernoulli(exp(−x)) by comparing runs of uniform numbers (von Neumann), vectorised."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane

    def uniform(self, count: int) -> NDArray[np.float64]:
        return np.asarray((self.lane.words(count) >> np.uint64(11)) * 2.0**-53)

    def heads(self, x: NDArray[np.float64]) -> NDArray[np.bool_]:
        """For 0 ≤ x ≤ 1: how long uniform numbers fall, beginning below x, is even with probability exp(−x)."""
        even, last, alive = np.ones(len(x), bool), x.copy(), np.arange(len(x))
        while len(alive):
            u = self.uniform(len(alive))
            alive, u = alive[u < last[alive]], u[u < last[alive]]
            last[alive] = u
            even[alive] ^= True
        return even


def canonne(count: int, lane: Lane) -> Values:
    """Discrete Gaussian of Canonne, Kamath and Steinke (2020): a discrete Laplace proposal, accepted by one coin."""
    coins, t, found = Coins(lane), int(SCALE) + 1, []
    while count > 0:
        tries = int(1.4 * count) + 32
        rest = np.floor(coins.uniform(int(1.6 * tries)) * t)
        rest = rest[coins.heads(rest / t)][:tries]
        size = rest + t * _successes(len(rest), 1.0, coins)
        negative = coins.uniform(len(size)) < 0.5
        y = np.where(negative, -size, size)[~(negative & (size == 0))]
        excess = (np.abs(y) - SCALE**2 / t) ** 2 / (2 * SCALE**2)
        accepted = y[_large_heads(excess, coins)][:count]
        found.append(accepted.astype(np.int64))
        count -= len(accepted)
    return np.concatenate(found)


def karney(count: int, lane: Lane) -> Values:
    """Karney's normal variables (2016), rounded: x = k + a fraction, each part accepted by comparisons alone."""
    coins, found = Coins(lane), []
    while count > 0:
        k = _successes(int(2.2 * count) + 32, 0.5, coins)  # P(k) in proportion to exp(−k/2)
        k = k[_runs(k * (k - 1), 0.5, coins)]
        x = coins.uniform(len(k))
        kept = np.ones(len(k), bool)
        for trial in range(int(k.max(initial=0)) + 1):  # k + 1 coins of exp(−x(2k + x)/(2k + 2))
            at = np.flatnonzero(kept & (k >= trial))
            kept[at] = coins.heads(x[at] * (2 * k[at] + x[at]) / (2 * k[at] + 2))
        y = (k + x)[kept][:count] * np.where(coins.uniform(int(kept.sum()))[:count] < 0.5, -1, 1)
        found.append(np.rint(SCALE * y).astype(np.int64))
        count -= len(y)
    return np.concatenate(found)


def _successes(count: int, x: float, coins: Coins) -> NDArray[np.float64]:
    """How often a coin of exp(−x) comes up before it fails."""
    total, alive = np.zeros(count), np.arange(count)
    while len(alive):
        alive = alive[coins.heads(np.full(len(alive), x))]
        total[alive] += 1
    return total


def _runs(lengths: NDArray[np.float64], x: float, coins: Coins) -> NDArray[np.bool_]:
    """Whether a coin of exp(−x) comes up so many times in a row."""
    left, alive = lengths.copy(), np.flatnonzero(lengths > 0)
    held = np.ones(len(lengths), bool)
    while len(alive):
        up = coins.heads(np.full(len(alive), x))
        held[alive[~up]] = False
        alive = alive[up]
        left[alive] -= 1
        alive = alive[left[alive] > 0]
    return held


def _large_heads(x: NDArray[np.float64], coins: Coins) -> NDArray[np.bool_]:
    """Bernoulli(exp(−x)) for any x ≥ 0: ⌊x⌋ coins of exp(−1), and one of the rest."""
    whole = np.floor(x)
    held = _runs(whole, 1.0, coins)
    at = np.flatnonzero(held)
    held[at] = coins.heads((x - whole)[at])
    return held


def in_parts(draw: Callable[[int, Lane], Values], count: int, threads: int) -> Values:
    """A peer's draws, in parts that fit into a cache, on so many threads."""
    source, sizes = System().keystream(), [min(_PART, count - first) for first in range(0, count, _PART)]
    with ThreadPoolExecutor(threads) as pool:
        return np.concatenate(list(pool.map(lambda job: draw(job[1], source.lane(job[0])), enumerate(sizes))))


def floats(count: int, threads: int) -> torch.Tensor:
    """Float noise, which is not private in the arithmetic that runs: the speed to compare with."""
    torch.set_num_threads(threads)
    return torch.randn(count).mul_(1.3)


WAYS: dict[str, Callable[[int, int], object]] = {
    "**rounded Gaussian, bins (FedBlur)**": lambda n, k: rounded_gaussian.draw(SCALE, n, System().keystream(), k),
    "discrete Gaussian, bins (FedBlur's DDGauss)": lambda n, k: sample_discrete_gaussian(
        SCALE, n, System().keystream(), k
    ),
    "discrete Gaussian, Canonne et al. 2020, vectorised": lambda n, k: in_parts(canonne, n, k),
    "rounded Gaussian, Karney 2016, vectorised": lambda n, k: in_parts(karney, n, k),
    "float32, torch.randn: not private": floats,
}


def measure(repeats: int) -> dict[str, Any]:
    """Milliseconds of every way, count and number of threads."""
    rows, others = [], []
    for name, draw in WAYS.items():
        others.append(float(psutil.cpu_percent(interval=1.0)))
        for count in COUNTS:
            for threads in THREADS:
                seconds: list[float] = []
                while len(seconds) <= repeats and sum(seconds) < _SLOW:  # the first one warms up
                    began = time.perf_counter()
                    draw(count, threads)
                    seconds.append(time.perf_counter() - began)
                best = min(seconds[1:] or seconds)
                rows.append({"way": name, "count": count, "threads": threads, "milliseconds": round(best * 1e3, 3)})
                print(f"{name}, {count:,} on {threads}: {best * 1e3:.3g} ms", flush=True)
    return {
        "date": f"{date.today():%-d %B %Y}",
        "machine": describe_machine(),
        "repeats": repeats,
        "other_work_percent": round(statistics.mean(others), 1),
        "rows": rows,
        "round": rounds(repeats=9, clients=8, steps=5, device="cpu", engine="sequential"),
    }


def table(results: dict[str, Any]) -> str:
    """Ways × counts and threads, in milliseconds."""
    found = {(row["way"], row["count"], row["threads"]): row["milliseconds"] for row in results["rows"]}
    keys = [(count, threads) for count in COUNTS for threads in THREADS]
    heads = [f"10^{len(str(count)) - 1}, {threads} thread{'s'[: threads - 1]}" for count, threads in keys]
    lines = [
        f"{results['machine']}, {results['date']}, the fastest of {results['repeats']} after one to warm up, in ms:"
    ]
    lines += ["", f"| noise | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for way in WAYS:
        lines.append(f"| {way} | {' | '.join(_figure(found[(way, *key)]) for key in keys)} |")
    lines += [
        "",
        "A private round of CNN-B (8 clients × 5 steps × batch 64) takes "
        f"{results['round']['private ÷ seeded']:.2f} times as long as a seeded one (median of 9 pairs, in turns), and "
        f"with correlated noise of four buffers {results['round']['BLT ÷ private']:.2f} times as long as that.",
    ]
    if results["other_work_percent"] > BUSY:
        lines += ["", f"The machine was busy with other work ({results['other_work_percent']:.0f} %): rough figures."]
    return "\n".join(lines) + "\n"


def _figure(milliseconds: float) -> str:
    return f"{milliseconds:.3g}" if milliseconds < 1000 else f"{milliseconds:,.0f}"


def render(results: dict[str, Any], readme: Path) -> None:
    """Put the table between the README's markers."""
    before, rest = readme.read_text().split(BEGIN, 1)
    readme.write_text(f"{before}{BEGIN}\n{table(results)}{END}{rest.split(END, 1)[1]}")


def write(results: dict[str, Any], folder: Path) -> None:
    """noise.json in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "noise.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write only to this folder, not to benchmarks/results and the README")
    options = parser.parse_args()
    results, here = measure(options.repeats), Path(__file__).resolve().parent
    write(results, options.out or here / "results")
    if not options.out:
        render(results, here / "README.md")


if __name__ == "__main__":
    main()
