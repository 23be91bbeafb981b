"""Flower's simulation runtime: the same app on Ray, with 50 virtual nodes; and docs/deploy.md's own commands for it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from benchmarks.harness.machines import ROOT, Machines, free_ports, wait_for

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
    try:
        machines.start(
            "superlink", "flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port",
            str(machines.inner), "--disable-runtime-dependency-installation",
        )  # fmt: skip
        wait_for(lambda: machines._open(machines.inner), 600, "the SuperLink")
        nodes = "num-supernodes=50 client-resources-num-cpus=1"
        run = machines.run("--federation-config", nodes, "--run-config", f'trust="{trust}"')
        run.wait(timeout=900)
        wait_for((tmp_path / "f/run/summary.json").exists, 600, machines.log("run")[-3000:])
    finally:
        machines.close()
    summary = json.loads((tmp_path / "f/run/summary.json").read_text())
    assert summary["status"] == "complete"
    assert summary["clients"] == 50
    assert summary["privacy"]["warning"] is None
    rows = [json.loads(line) for line in (tmp_path / "f/run/rounds.jsonl").read_text().splitlines()]
    asked = [row["local_only"].get("nodes", {"answered": 0})["answered"] for row in rows]
    assert sum(asked) > 20  # four answers of about ten nodes, twice


def test_ray__the_guides_commands_work_as_written(tmp_path: Path) -> None:
    """Only the port differs, a free one."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/deploy.md").read_text(), re.DOTALL)
    (port,) = free_ports(1)
    server, run = (text.replace("8000", str(port)) for text in blocks)
    machines = Machines(tmp_path / "unused", "--insecure")
    machines.folder = tmp_path
    del machines.env["FLWR_HOME"]  # the commands set it
    try:
        machines.start("superlink", "sh", "-eu", "-c", server)
        wait_for(lambda: machines._open(port), 600, "the SuperLink")
        machines.sh("sh", "-eu", "-c", run, seconds=900)
    finally:
        machines.close()
    summary = json.loads((tmp_path / "federation/run/summary.json").read_text())
    assert (summary["status"], summary["clients"]) == ("complete", 50)
    last = json.loads((tmp_path / "federation/run/rounds.jsonl").read_text().splitlines()[-1])
    assert last["local_only"]["nodes"]["answered"] == 50
