"""Show that a long run that evaluates in every round costs the same in each: CPU seconds, memory and file sizes.

    python benchmarks/long_run.py [--rounds 10000] [--accountant rdp]

Prints a line for each tenth of the run. The last line compares the last tenth with the second. An evaluation states
epsilon, and PLD takes longer the more rounds it composes; RDP does not.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import fedblur
from fedblur.core.callbacks import Row

MOST_MEGABYTES = 20.0  # ledger and rounds together


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--accountant", choices=("pld", "rdp"), default="pld")
    given = parser.parse_args()
    rounds: int = given.rounds
    config = fedblur.Config(
        dataset="digits", clients=300, sample_rate=0.02, noise_multiplier=30.0, rounds=rounds, eval_every=1,
        checkpoint_every=100, accountant=given.accountant, local=fedblur.LocalTraining(steps=1, batch_size=4),
    )  # fmt: skip
    spent: list[float] = []
    began = time.process_time()

    def watch(row: Row) -> None:
        if row["round"] % (rounds // 10) == 0:
            spent.append(time.process_time() - began - sum(spent))
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"round {row['round']:6d}: {spent[-1]:6.1f} s of CPU for this tenth, peak memory {memory:.0f} MiB",
                flush=True,
            )

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        fedblur.train(config, out=run, watch=watch)
        sizes = {name: (run / name).stat().st_size / 1e6 for name in ("ledger.jsonl", "rounds.jsonl")}
    print(", ".join(f"{name} {size:.1f} MB" for name, size in sizes.items()))
    print(f"the last tenth took {spent[-1] / spent[1]:.2f} times the CPU time of the second")
    return int(sum(sizes.values()) > MOST_MEGABYTES)


if __name__ == "__main__":
    sys.exit(main())
