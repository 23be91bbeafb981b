"""How often an audit calls correct code broken.

    PYTHONPATH=src python benchmarks/audit_alarms.py [--audits 100] [--canaries 20 60 100] [--worst-case]

Without --worst-case: the one-shot audit, by the number of canaries; why `audit` refuses fewer than 100. Each audit is
one of two rounds on 30 clients of digits. With it: the worst-case check with 400 repetitions and all its tests of noise
and cohorts, and the smallest p-value of them all. Noise comes from the operating system, so counts differ from time to
time. About half a second and about three seconds an audit.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import torch

from fedblur.core.config import Config, from_dict
from fedblur.experiments.audit import Finding, WorstCase, check_worst_case, one_shot

SETTINGS: tuple[dict[str, object], ...] = (
    {"rounds": 1, "sample_rate": 1.0, "sampling": "full"},
    {"rounds": 50, "sample_rate": 0.1, "mask": "random", "clipping": "adaptive"},
    {"rounds": 1, "sample_rate": 0.3, "sampling": "fixed", "accountant": "rdp"},
    {"rounds": 1, "sample_rate": 1.0, "mechanism": "ddgauss", "accountant": "rdp"},
)


def verdicts(canaries: int, audits: int) -> Counter[str]:
    config = Config(rounds=2, clients=30, sample_rate=0.5, epsilon=2.0)
    found: Counter[str] = Counter()
    for _ in range(audits):
        with tempfile.TemporaryDirectory() as folder:
            found[one_shot.audit(config, Path(folder), canaries=canaries, held_out=canaries).verdict] += 1
    return found


def findings(audits: int) -> list[Finding]:
    """Worst-case checks of correct code, the settings in turn."""
    return [check_worst_case(WorstCase(from_dict(SETTINGS[i % len(SETTINGS)])), 400) for i in range(audits)]


def smallest(found: list[Finding]) -> float:
    """p-value of all tests in all audits; each is already multiplied by the number of tests in its audit."""
    return min(check.p_value for one in found for check in one.checks if check.p_value is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--canaries", nargs="+", type=int, default=[20, 60, 100])
    parser.add_argument("--audits", type=int, default=100)
    parser.add_argument("--worst-case", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worst_case:
        found = findings(options.audits)
        broken = sum(one.broken for one in found)
        print(f"{options.audits} worst-case checks: {broken} broken, smallest p-value {smallest(found):.2g}")
        return
    one_shot._FEWEST = 2  # those that it would refuse are what is measured
    for canaries in options.canaries:
        print(f"{canaries} canaries: {dict(verdicts(canaries, options.audits))}", flush=True)


if __name__ == "__main__":
    main()
