"""Seconds and bytes of a round over Flower, in both trust models: CNN-B, ten nodes on loopback, TLS and keys for nodes.

    python benchmarks/flower.py [--nodes 10] [--rounds 3] [--out FILE]

Flower starts a process for every message and nodes look for messages every three seconds: on few cores most of a round
is starting processes. So the table also has the CPU seconds of all processes together.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness.machines import Machines, wait_for  # noqa: E402

TASK = '''"""Random images of EMNIST's shape: what is measured does not depend on them."""

from pathlib import Path

import numpy as np

from fedblur.flower.settings import Deployment


def client_data(node):
    rng = np.random.default_rng(int(node["partition-id"]))
    return rng.integers(0, 256, (100, 1, 28, 28), dtype=np.uint8), rng.integers(0, 10, 100)


def test_data():
    return client_data({"partition-id": 999})


task = Deployment(Path(__file__).with_name("fedblur.toml"), (1, 28, 28), 10, client_data, test_data)
'''
CONFIG = """clients = {nodes}
rounds = {rounds}
sample_rate = 1.0
noise_multiplier = 1.0
delta = 1e-3
clip_norm = 0.5
model = {{ name = "cnn", variant = "b", dropout = false }}
local = {{ steps = 5, batch_size = 20, learning_rate = 0.05 }}
eval_every = 1000
accountant = "rdp"
{mechanism}
"""
MECHANISMS = {
    "central": 'mechanism = "gaussian"',
    "secure-sum": 'mechanism = {{ name = "ddgauss", mode = "exact", min_cohort = {least}, bits = 16 }}',
}


def cpu_seconds(machines: Machines) -> float:
    """Of everything that was started for the federation, with the processes that have ended."""
    total = 0.0
    for _, process in machines.started:
        if not psutil.pid_exists(process.pid):
            continue
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            try:
                times = member.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system + times.children_user + times.children_system
    return total


def measure(machines: Machines, trust: str, nodes: int, rounds: int) -> dict[str, float]:
    """Means over the rounds after the first, in which nodes also install the app."""
    mechanism = MECHANISMS[trust].format(least=max(2, 2 * nodes // 3 + 1))
    config = machines.folder / "app/federation/fedblur.toml"
    config.write_text(CONFIG.format(nodes=nodes, rounds=rounds, mechanism=mechanism))
    out, before = machines.folder / trust, cpu_seconds(machines)
    run = machines.run("--run-config", f'trust="{trust}" deadline=900.0 out="{out}"', name=f"run-{trust}")
    run.wait(timeout=3600)
    wait_for((out / "summary.json").exists, 60, machines.log(f"run-{trust}")[-3000:])
    time.sleep(5)
    spent = cpu_seconds(machines) - before
    rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    later = rows[1:] or rows
    traffic = [row["local_only"]["nodes"] for row in later]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return {
        "seconds": mean([row["seconds"] for row in later]),
        "cpu_seconds": spent / len(rows),
        "bytes_sent": mean([t["bytes_sent"] for t in traffic]),
        "bytes_received": mean([t["bytes_received"] for t in traffic]),
        "answered": mean([t["answered"] for t in traffic]),
    }


def report(trust: str, row: dict[str, float]) -> dict[str, float]:
    """Print one line, as soon as it is known."""
    print(
        f"{trust:11s} {row['seconds']:7.1f} s a round, {row['cpu_seconds']:7.1f} CPU s, down "
        f"{row['bytes_sent'] / 1e6:7.2f} MB, up {row['bytes_received'] / 1e6:7.2f} MB "
        f"({os.cpu_count()} cores, load {os.getloadavg()[0]:.1f})",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        machines = Machines(Path(folder) / "federation")
        try:
            (machines.folder / "app/federation/task.py").write_text(TASK)
            machines.certificates()
            machines.server()
            for i in range(options.nodes):
                machines.register(f"node-{i}")
                machines.node(f"node-{i}", f"partition-id={i}")
            for i in range(options.nodes):
                machines.node_id(f"node-{i}")
            figures = {
                trust: report(trust, measure(machines, trust, options.nodes, options.rounds)) for trust in MECHANISMS
            }
        finally:
            machines.close()
    ratio = {key: figures["secure-sum"][key] / figures["central"][key] for key in figures["central"]}
    print("secure-sum / central: " + ", ".join(f"{key} {value:.2f}" for key, value in ratio.items()))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
