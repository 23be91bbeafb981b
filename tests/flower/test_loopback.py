"""A SuperLink, a gateway and SuperNodes on loopback, with TLS and keys for nodes: real processes, real kills.

Flower starts a process for every message and its nodes look for messages every three seconds, so this takes minutes on
a busy machine. Everything is in one group: one federation serves all tests of this file, in their order.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.harness.machines import Machines, wait_for
from fedblur.flower.settings import Deployment
from tests.flower.world import SECURE, deployment, digits, paid_rounds, simulated, weights

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]
LONG = os.environ.get("FEDBLUR_LONG") == "1"
NODES, ROUNDS = (4, 5) if LONG else (2, 3)
TASK = '''"""The task, filled in: each node reads its own file."""

from pathlib import Path

import numpy as np

from fedblur.flower.settings import Deployment


def client_data(node):
    data = np.load(node["data"])
    return data["x"], data["y"]


def test_data():
    data = np.load("{test}")
    return data["x"], data["y"]


task = Deployment(Path(__file__).with_name("fedblur.toml"), (1, 8, 8), 10, client_data, test_data)
'''


class Federation(Machines):
    """The loopback federation of these tests, with its data in files."""

    def begin(self) -> None:
        parts, test = digits(NODES)
        for name, (x, y) in {**{f"part-{i}": part for i, part in enumerate(parts)}, "test": test}.items():
            np.savez(self.folder / f"{name}.npz", x=x, y=y)
        task = TASK.replace("{test}", str(self.folder / "test.npz"))
        (self.folder / "app/federation/task.py").write_text(task)
        self.certificates()
        self.server()
        for i in range(NODES):
            self.register(f"node-{i}")
            self.join(i)
        self.ids = [self.node_id(f"node-{i}") for i in range(NODES)]

    def join(self, i: int) -> None:
        self.nodes = getattr(self, "nodes", {})
        self.nodes[i] = self.node(f"node-{i}", f'data="{self.folder}/part-{i}.npz"')

    @property
    def order(self) -> list[int]:
        """Which part of the data client i of the roster has: nodes are enrolled in the order of their ids."""
        return [self.ids.index(node) for node in sorted(self.ids)]

    def task(self, **changes) -> Deployment:
        return deployment(self.folder / "app/federation", NODES, **changes)

    def train(self, name: str, trust: str, seconds: float, deadline: float = 300.0) -> Path:
        process = self.begin_run(name, trust, deadline)
        assert process.wait(timeout=seconds) == 0
        wait_for((self.folder / name / "summary.json").exists, 600, self.log(name)[-3000:])
        return self.folder / name

    def begin_run(self, name: str, trust: str, deadline: float):
        settings = f'trust="{trust}" deadline={deadline} out="{self.folder / name}"'
        return self.run("--run-config", settings, name=name)

    def seconds(self, name: str) -> list[float]:
        path = self.folder / name / "rounds.jsonl"
        return [json.loads(line)["seconds"] for line in path.read_text().splitlines()] if path.exists() else [200.0]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("federation") / "f"
    machines = Federation(folder)
    try:
        machines.begin()
        yield machines
    finally:
        machines.close()
        shutil.rmtree(folder / "state", ignore_errors=True)


def vector(folder: Path) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in load_file(folder / "model.safetensors").values()])


def same_order(folder: Path, plain: torch.Tensor, run: torch.nn.Module) -> torch.Tensor:
    tensors = load_file(folder / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name, _ in run.named_parameters()]) - plain


def test_central__gets_the_simulators_model(federation: Federation, tmp_path: Path) -> None:
    task = federation.task(rounds=ROUNDS, sample_rate=0.5, seed=6)  # some join, some do not
    folder = federation.train("central", "central", 600)
    plain = simulated(task, tmp_path / "plain", federation.order)
    assert float(same_order(folder, weights(plain), plain.module).abs().max()) < 1e-5
    cohorts = [json.loads(line)["local_only"]["cohort"] for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert 0 < sum(cohorts) < NODES * ROUNDS
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "complete"
    assert summary["privacy"]["releases"] == ROUNDS


@pytest.mark.long
def test_strangers__get_nothing(federation: Federation, tmp_path: Path) -> None:
    """A node whose key is not registered, a node that trusts another authority, and requests without a key."""
    federation.sh("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", "secrets/stranger")
    stranger = federation.node("stranger", f'data="{federation.folder}/part-0.npz"')
    other = tmp_path / "other"
    machines = Machines(other)
    machines.certificates()
    script = (federation.folder / "supernode.sh").read_text()
    (federation.folder / "deceived.sh").write_text(script.replace("secrets/ca.crt", f"{other}/secrets/ca.crt"))
    deceived = federation.start("deceived", "sh", "deceived.sh", "secrets/node-0", "", "0")
    assert stranger.wait(timeout=120) != 0
    assert "SuperNode ID" not in federation.log("stranger")
    wait_for(lambda: "CERTIFICATE_VERIFY_FAILED" in federation.log("deceived") or deceived.poll(), 600, "a refusal")
    federation.end(deceived)
    assert "SuperNode ID" not in federation.log("deceived")

    trust = ssl.create_default_context(cafile=str(federation.folder / "secrets/ca.crt"))
    with httpx.Client(base_url=f"https://127.0.0.1:{federation.port}", verify=trust) as client:
        assert client.post("/v1/fleet/pull-messages", content=b"").status_code in (400, 401, 415, 422)
        for path in ("/v1/control/start-run", "/v1/control/list-nodes", "/v1/runtime/acquire-task", "/docs"):
            assert client.post(path, content=b"").status_code == 404
    wrong = ssl.create_default_context(cafile=str(other / "secrets/ca.crt"))
    with pytest.raises(httpx.ConnectError), httpx.Client(verify=wrong) as client:
        client.post(f"https://127.0.0.1:{federation.port}/v1/fleet/pull-messages")
    with pytest.raises(httpx.HTTPError), httpx.Client() as client:  # no TLS, no answer
        client.post(f"http://127.0.0.1:{federation.port}/v1/fleet/pull-messages")


@pytest.mark.long  # Flower starts a process for each of 80 messages
def test_secure_sum__gets_the_simulators_model(federation: Federation, tmp_path: Path) -> None:
    task = federation.task(rounds=5, mechanism=SECURE)
    folder = federation.train("secure", "secure-sum", 1200)
    plain = simulated(task, tmp_path / "plain", federation.order)
    assert float(same_order(folder, weights(plain), plain.module).abs().max()) == 0.0
    assert json.loads((folder / "summary.json").read_text())["privacy"]["releases"] == 5


def server_process(federation: Federation) -> psutil.Process | None:
    family = psutil.Process(federation.link.pid).children(recursive=True)
    return next((p for p in family if any("flwr-serverapp" in word for word in p.cmdline())), None)


def rounds_done(federation: Federation, name: str) -> int:
    path = federation.folder / name / "rounds.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_until_asked(federation: Federation, i: int, round_: int, kind: str, before: int) -> None:
    """Until node i has got this question of this round."""

    def asked() -> bool:
        return federation.log(f"node-{i}")[before:].count(f"Receiving: train.{kind} message") >= round_

    wait_for(asked, 600, f"node {i}: {kind} of round {round_}")


@pytest.mark.long
def test_kills__nodes_and_server_in_the_middle_of_rounds(federation: Federation) -> None:
    """Round 1 loses a node of four and goes on, round 2 another and is aborted, round 3 the server and one more."""
    federation.task(rounds=3, mechanism=SECURE, seed=None)
    deadline = 5 + 0.8 * max(federation.seconds("secure"))  # of one question; a round has four
    marks = [len(federation.log(f"node-{i}")) for i in range(NODES)]
    process = federation.begin_run("killed", "secure-sum", deadline)

    wait_until_asked(federation, 0, 1, "masked", marks[0])
    federation.end(federation.nodes[0])
    wait_for(lambda: rounds_done(federation, "killed") >= 1, 5 * deadline, "round 1")
    wait_until_asked(federation, 1, 2, "shares", marks[1])
    federation.end(federation.nodes[1])
    wait_for(lambda: rounds_done(federation, "killed") >= 2, 5 * deadline, "round 2")
    wait_until_asked(federation, 3, 3, "keys", marks[3])
    server = server_process(federation)
    assert server is not None
    server.send_signal(signal.SIGKILL)
    process.wait(timeout=120)
    assert paid_rounds(federation.folder / "killed") == [1, 2]  # round 3 was asked for, and nothing of it was seen

    federation.end(federation.nodes[2])
    folder = federation.train("killed", "secure-sum", 1200, deadline)  # goes on where it was
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert ["aborted" in row["local_only"] for row in rows] == [False, True, True]
    assert rows[0]["local_only"]["nodes"]["missing"] >= 1
    assert rows[1]["accuracy"] == rows[0]["accuracy"]  # not applied
    assert paid_rounds(federation.folder / "killed") == [1, 2, 3]  # and paid for


@pytest.mark.long  # after all of the above, in one process
def test_logs_and_folders__hold_no_keys(federation: Federation) -> None:
    """After all of that: nothing that Flower or we wrote, outside of secrets/, holds a private key or a data file."""
    for path in federation.folder.rglob("*"):
        if path.is_file() and "secrets" not in path.parts:
            assert b"PRIVATE KEY" not in path.read_bytes(), path
    packed = [p.name for p in (federation.folder / "state/apps").rglob("*") if p.is_file()]
    assert "task.py" in packed
    assert not [name for name in packed if name.endswith((".key", ".crt", ".npz")) or name.startswith("node-")]
