"""How often an audit calls a private run broken, by the number of canaries: why `audit` refuses fewer than 100.

    PYTHONPATH=src python benchmarks/audit_alarms.py [--canaries 20 60 100] [--audits 100]

Each audit is one of two rounds on 30 clients of digits with noise from the operating system, so counts differ from
time to time. About half a second an audit.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import torch

from fedblur.audit import one_shot
from fedblur.config import Config


def verdicts(canaries: int, audits: int) -> Counter[str]:
    config = Config(rounds=2, clients=30, sample_rate=0.5, epsilon=2.0)
    found: Counter[str] = Counter()
    for _ in range(audits):
        with tempfile.TemporaryDirectory() as folder:
            found[one_shot.audit(config, Path(folder), canaries=canaries, held_out=canaries).verdict] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--canaries", nargs="+", type=int, default=[20, 60, 100])
    parser.add_argument("--audits", type=int, default=100)
    options = parser.parse_args()
    one_shot._FEWEST = 2  # those that it would refuse are what is measured
    torch.set_num_threads(1)
    for canaries in options.canaries:
        print(f"{canaries} canaries: {dict(verdicts(canaries, options.audits))}", flush=True)


if __name__ == "__main__":
    main()
