"""Flower's simulation runtime: the same app on Ray, with 50 virtual nodes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks.harness.machines import Machines, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.xdist_group("flower"),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'fedblur[ray]'"
    ),
]
MECHANISM = {
    "central": 'mechanism = "gaussian"',
    "secure-sum": 'mechanism = { name = "ddgauss", mode = "exact", min_cohort = 3, bits = 20 }\naccountant = "rdp"',
}


@pytest.mark.parametrize("trust", ["secure-sum"])
def test_ray__runs_the_same_app_with_fifty_virtual_nodes(tmp_path: Path, trust: str) -> None:
    machines = Machines(tmp_path / "f", "--insecure")
    config = tmp_path / "f/app/federation/fedblur.toml"
    text = (
        config.read_text().replace("clients = 3 ", "clients = 50 ").replace("sample_rate = 1.0 ", "sample_rate = 0.2 ")
    )
    config.write_text(text.replace("rounds = 3 ", "rounds = 2 ").replace('mechanism = "gaussian"', MECHANISM[trust]))
    task = tmp_path / "f/app/federation/task.py"
    task.write_text(task.read_text().replace("350", "28"))  # 50 parts of 28 digits
    try:
        machines.start(
            "superlink", "flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port",
            str(machines.inner), "--disable-runtime-dependency-installation",
        )  # fmt: skip
        wait_for(lambda: machines._open(machines.inner), 180, "the SuperLink")
        nodes = "num-supernodes=50 client-resources-num-cpus=1"
        run = machines.run("--federation-config", nodes, "--run-config", f'trust="{trust}"')
        run.wait(timeout=900)
        wait_for((tmp_path / "f/run/summary.json").exists, 10, machines.log("run")[-3000:])
    finally:
        machines.close()
    summary = json.loads((tmp_path / "f/run/summary.json").read_text())
    assert summary["status"] == "complete"
    assert summary["clients"] == 50
    assert summary["privacy"]["warning"] is None
    rows = [json.loads(line) for line in (tmp_path / "f/run/rounds.jsonl").read_text().splitlines()]
    asked = [row["local_only"].get("nodes", {"answered": 0})["answered"] for row in rows]
    assert sum(asked) > 20  # four answers of about ten nodes, twice
