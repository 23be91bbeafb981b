"""docs/deploy.md, literally: every `sh` block runs as it stands, on loopback and across network namespaces.

Only ports differ (free ones), and in namespaces the host's address; blocks that "stay running" are processes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.machines import BIN, ROOT, Machines, free_ports, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.xdist_group("flower")]
GUIDE = (ROOT / "docs/deploy.md").read_text()
BLOCKS = re.findall(r"```sh\n# ([^\n]+)\n(.*?)```", GUIDE, re.DOTALL)


class Guide(Machines):
    """Follows the guide in a new folder. `prefix` puts a machine's commands into its own network."""

    def __init__(self, folder: Path, host: str, prefixes: dict[str, tuple[str, ...]]) -> None:
        self.folder, self.host, self.prefixes = folder, host, prefixes
        self.started = []
        self.env = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        ports = free_ports(5)
        self.door, self.inner = ports[:2]
        self.changes = dict(zip(("8443", "8000", "9094", "9095", "9096"), map(str, ports), strict=True))
        self.changes["HOST=127.0.0.1"] = f"HOST={host}"

    def literal(self, text: str) -> str:
        for old, new in self.changes.items():
            text = text.replace(old, new)
        return text

    def follow(self, seconds: float) -> None:
        for number, (machine, text) in enumerate(BLOCKS):
            who, _, stays = machine.partition(", ")
            prefix = self.prefixes.get(who, ())
            command = ["sh", "-eu", "-c", self.literal(text)]
            if stays:
                process = self.start(f"{number}-{who}".replace(" ", "-"), *command, prefix=prefix)
                self.wait_until_up(number, process)
            else:
                full = [*prefix, *command]
                done = subprocess.run(
                    full, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=seconds
                )
                assert done.returncode == 0, f"{machine}: {text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"

    def wait_until_up(self, number: int, process: subprocess.Popen[bytes]) -> None:
        text = BLOCKS[number][1]
        name = self.started[-1][0]
        if "superlink.sh" in text:
            wait_for(lambda: self.answers("127.0.0.1", self.inner), 600, self.log(name))
        elif "gateway.sh" in text:
            wait_for(lambda: self.answers(self.host, self.door), 600, self.log(name))
        else:
            wait_for(lambda: "SuperNode ID" in self.log(name), 600, self.log(name))
        assert process.poll() is None, self.log(name)

    def answers(self, host: str, port: int) -> bool:
        with socket.socket() as s:
            s.settimeout(1)
            return s.connect_ex((host, port)) == 0


def followed(folder: Path, host: str, prefixes: dict[str, tuple[str, ...]]) -> dict:
    guide = Guide(folder, host, prefixes)
    try:
        guide.follow(900)
        return json.loads((folder / "federation/run/summary.json").read_text())
    finally:
        guide.close()
        shutil.rmtree(folder / "federation/state", ignore_errors=True)


def test_guide__leads_to_a_federation_on_loopback(tmp_path: Path) -> None:
    assert len(BLOCKS) == 11
    summary = followed(tmp_path, "127.0.0.1", {})
    assert summary["status"] == "complete"
    assert summary["clients"] == 3
    assert summary["privacy"]["warning"] is None


@pytest.fixture
def three_hosts() -> Iterator[tuple[str, dict[str, tuple[str, ...]]]]:
    """Three namespaces behind one bridge; the server stays outside. Each has nothing but its own wire and loopback."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    tag, net = f"fb{os.getpid() % 10000}", f"10.213.{os.getpid() % 250 + 1}"  # what a killed run left is not in the way
    made: list[list[str]] = []

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0

    try:
        if not ip("link", "add", f"{tag}br", "type", "bridge"):
            pytest.skip("network namespaces: this machine does not let us make a bridge")
        made.append(["link", "del", f"{tag}br"])
        assert ip("addr", "add", f"{net}.1/24", "dev", f"{tag}br")
        assert ip("link", "set", f"{tag}br", "up")
        for i in range(3):
            space = f"{tag}n{i}"
            if not ip("netns", "add", space):
                pytest.skip("network namespaces: this machine does not let us make one")
            made.append(["netns", "del", space])
            assert ip("link", "add", f"{tag}v{i}", "type", "veth", "peer", "name", "eth0", "netns", space)
            made.append(["link", "del", f"{tag}v{i}"])
            assert ip("link", "set", f"{tag}v{i}", "master", f"{tag}br", "up")
            assert ip("-n", space, "addr", "add", f"{net}.{10 + i}/24", "dev", "eth0")
            assert ip("-n", space, "link", "set", "eth0", "up")
            assert ip("-n", space, "link", "set", "lo", "up")
        time.sleep(1)
        yield f"{net}.1", {f"node {i}": ("ip", "netns", "exec", f"{tag}n{i}") for i in range(3)}
    finally:
        for words in reversed(made):
            ip(*words)


def test_guide__leads_to_a_federation_across_network_namespaces(
    tmp_path: Path, three_hosts: tuple[str, dict[str, tuple[str, ...]]]
) -> None:
    """Nodes on addresses of their own reach the server's gateway, which is all that listens on the server's address."""
    host, prefixes = three_hosts
    summary = followed(tmp_path, host, prefixes)
    assert summary["status"] == "complete"
    assert summary["clients"] == 3
