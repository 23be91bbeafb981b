"""A federation under `train.py`'s own loop: the simulator's model, resume, rosters, settings. In one process."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from fedblur.core.errors import ConfigError, PrivacyError, RunError
from fedblur.flower import node_training
from fedblur.flower.settings import Settings
from fedblur.privacy.ledger import Chain
from fedblur.privacy.participation import MinSeparationSampler
from fedblur.training.run_folder import RunFolder
from tests.flower.world import SECURE, LoopGrid, Lost, deployment, federated, paid_rounds, simulated, weights

SETTINGS = [
    {},
    {"sample_rate": 0.6, "rounds": 6},
    {"method": ["blur", "lus"], "server": "momentum"},
    {"mask": {"name": "random", "share": 0.5}},
    {"clipping": {"name": "adaptive", "bit_noise": 2.0}},
    {"bounding": "normalise", "averaging": "ema"},
]


@pytest.mark.parametrize("changes", SETTINGS, ids=lambda changes: "+".join(changes) or "plain")
def test_central__gives_the_simulators_model(tmp_path: Path, changes: dict) -> None:
    task = deployment(tmp_path, 4, **changes)
    run = federated(task, LoopGrid(task, 4, "central"), tmp_path / "run", "central")
    plain = simulated(task, tmp_path / "plain")
    assert float((weights(run) - weights(plain)).abs().max()) < 1e-6
    assert run.summary["privacy"]["epsilon"] == plain.summary["privacy"]["epsilon"]
    assert run.summary["privacy"]["warning"] == "NOT PRIVATE: seeded"


SCHEDULES = [
    {"sampling": {"name": "min_separation", "rounds": 2}, "sample_rate": 0.5, "rounds": 5},
    {"sampling": {"name": "in_turn", "groups": 2}, "sample_rate": 0.5, "rounds": 4},
    {"sampling": {"name": "cyclic", "groups": 2}, "sample_rate": 0.3, "rounds": 4},
]


@pytest.mark.parametrize("changes", SCHEDULES, ids=lambda changes: changes["sampling"]["name"])
def test_central__nodes_take_turns_as_simulated_clients_do(tmp_path: Path, changes: dict) -> None:
    task = deployment(tmp_path, 4, **changes)
    grid = LoopGrid(task, 4, "central")
    run = federated(task, grid, tmp_path / "run", "central")
    plain = simulated(task, tmp_path / "plain")
    assert float((weights(run) - weights(plain)).abs().max()) < 1e-6
    asked: dict[int, list[int]] = {}
    for message in grid.asked:
        asked.setdefault(message.metadata.dst_node_id, []).append(int(message.metadata.group_id))
    assert all(b - a >= 2 for rounds in asked.values() for a, b in itertools.pairwise(rounds))
    assert "zero-out" in run.summary["privacy"]["adjacency"]
    if changes["sampling"]["name"] == "min_separation":
        assert sum(map(len, asked.values())) == 10  # two of four nodes in each of five rounds
        records = [Chain(RunFolder(each.path).participation).read()[1:] for each in (run, plain)]
        assert [link.body for link in records[0]] == [link.body for link in records[1]]


def test_central__a_node_that_is_asked_too_early_does_not_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that forgot its record asks the same two nodes in every round; they answer every other one."""
    task = deployment(tmp_path, 4, seed=None, **SCHEDULES[0])
    monkeypatch.setattr(MinSeparationSampler, "may", lambda self, number, past: np.ones(4, dtype=bool))
    monkeypatch.setattr(MinSeparationSampler, "chosen", lambda self, number, past, rng: np.array([0, 1]))
    trained = []
    inside = node_training.update
    monkeypatch.setattr(node_training, "update", lambda *given: trained.append((given[2], given[3])) or inside(*given))
    federated(task, LoopGrid(task, 4, "central"), tmp_path / "run", "central")
    rounds = {node: [round_ for which, round_ in trained if which == node] for node, _ in trained}
    assert set(rounds) == {100, 101}
    assert all(b - a >= 2 for each in rounds.values() for a, b in itertools.pairwise(each))
    assert all(each[0] == 1 for each in rounds.values())


@pytest.mark.parametrize("changes", SETTINGS[2:5], ids=lambda changes: "+".join(changes))
def test_secure_sum__goes_with_methods_masks_and_adaptive_clipping(tmp_path: Path, changes: dict) -> None:
    task = deployment(tmp_path, 4, mechanism=SECURE, rounds=2, **changes)
    run = federated(task, LoopGrid(task, 4, "secure-sum"), tmp_path / "run", "secure-sum")
    assert torch.equal(weights(run), weights(simulated(task, tmp_path / "plain")))


@pytest.mark.parametrize("trust", ["central", "secure-sum"])
def test_randomness__without_a_seed_each_node_draws_its_own(tmp_path: Path, trust: str) -> None:
    """The same question twice (to nodes that forgot the first) is answered with other noise or other batches."""
    mechanism = SECURE if trust == "secure-sum" else "gaussian"
    task = deployment(tmp_path, 4, seed=None, mechanism=mechanism, rounds=1)
    runs = [federated(task, LoopGrid(task, 4, trust), tmp_path / name, trust) for name in "ab"]
    assert not torch.equal(weights(runs[0]), weights(runs[1]))
    assert runs[0].summary["privacy"]["warning"] is None


# --- a server that is killed ---

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.flower.world import *

def kill(question, reply):
    if kind_of(question) == at and question.metadata.group_id == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    return reply

for at, trust in zip(sys.argv[2::2], sys.argv[3::2]):  # forks: what is imported is imported once
    pid = os.fork()
    if not pid:
        folder = Path(sys.argv[1]) / at
        folder.mkdir()
        task = deployment(folder, 4, seed=None, rounds=4, mechanism=SECURE if trust == "secure-sum" else "gaussian")
        federated(task, LoopGrid(task, 4, trust, kill), folder / "run", trust)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
ASKED = {"update": "central", "masked": "secure-sum", "unmask": "secure-sum"}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each question in which a server died, in round 2."""
    folder = tmp_path_factory.mktemp("killed")
    words = [word for pair in ASKED.items() for word in pair]
    command = [sys.executable, "-c", KILLED, str(folder), *words]
    died = subprocess.run(command, env=os.environ, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert died.stdout.split() == [str(-signal.SIGKILL)] * len(ASKED)
    return folder


@pytest.mark.xdist_group("killed servers")
@pytest.mark.parametrize(
    ("question", "before", "after"),
    [
        ("update", [1], [1, 2, 3, 4]),
        ("masked", [1], [1, 2, 3, 4]),
        ("unmask", [1, 2], [1, 2, 2, 3]),  # seen by the server once, so it counts; the budget ends early
    ],
)
def test_kill__a_round_is_never_spent_twice_uncounted(
    killed: Path, question: str, before: list[int], after: list[int]
) -> None:
    tmp_path, trust = killed / question, ASKED[question]
    assert paid_rounds(tmp_path / "run") == before
    task = deployment(tmp_path, 4, seed=None, rounds=4, mechanism=SECURE if trust == "secure-sum" else "gaussian")
    if after[-1] == 4:
        run = federated(task, LoopGrid(task, 4, trust), tmp_path / "run", trust)
        assert run.summary["status"] == "complete"
    else:
        with pytest.raises(PrivacyError, match="the budget is spent"):
            federated(task, LoopGrid(task, 4, trust), tmp_path / "run", trust)
    assert paid_rounds(tmp_path / "run") == after
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["privacy"]["releases"] == 4


WAITING = """
import sys
from pathlib import Path
from tests.flower.world import *

folder = Path(sys.argv[1])
task = deployment(folder, 3)
grid = LoopGrid(task, 3, "central")
grid.get_node_ids = lambda: print("waiting", flush=True) or []
serve(task, grid, Settings(start_timeout=600, out=str(folder / "run")))
"""


def test_kill__a_server_that_waited_for_its_nodes_can_be_started_again(tmp_path: Path) -> None:
    """It has a configuration and no checkpoint. A roster that is there by then is not the new one's."""
    command = [sys.executable, "-c", WAITING, str(tmp_path)]
    with subprocess.Popen(command, env=os.environ, cwd=ROOT, stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        next(line for line in waiting.stdout if "waiting" in line)
        waiting.kill()
    assert (tmp_path / "run/config.json").exists()
    (tmp_path / "run/nodes.json").write_text('{"trust": "central", "nodes": ["7", "8", "9"]}')
    task = deployment(tmp_path, 3)
    run = federated(task, LoopGrid(task, 3, "central"), tmp_path / "run", "central")
    assert run.summary["status"] == "complete"
    assert run.rounds[0]["local_only"]["nodes"]["answered"] == 3
    assert json.loads((tmp_path / "run/nodes.json").read_text())["nodes"] == ["100", "101", "102"]


ROOT = Path(__file__).resolve().parents[2]


def test_resume__a_seeded_run_ends_as_one_that_was_never_stopped(tmp_path: Path) -> None:
    class Stop(BaseException):
        pass

    def stop(question: Message, reply: Message) -> Message:
        if question.metadata.group_id == "3":
            raise Stop
        return reply

    task = deployment(tmp_path, 4, rounds=4)
    with pytest.raises(Stop):
        federated(task, LoopGrid(task, 4, "central", stop), tmp_path / "run", "central")
    run = federated(task, LoopGrid(task, 4, "central"), tmp_path / "run", "central")
    assert torch.equal(weights(run), weights(simulated(task, tmp_path / "plain")))


# --- nodes ---


def test_roster__stays_the_same_when_nodes_come_and_go(tmp_path: Path) -> None:
    task = deployment(tmp_path, 3, rounds=2)
    grid = LoopGrid(task, 3, "central")
    federated(task, grid, tmp_path / "run", "central")
    roster = json.loads((tmp_path / "run/nodes.json").read_text())
    assert roster == {"trust": "central", "nodes": ["100", "101", "102"]}
    more = LoopGrid(task, 3, "central")
    more.contexts[99] = more.contexts[100]
    federated(task, more, tmp_path / "run", "central")  # complete: nobody is asked
    assert not more.asked


def test_roster__another_number_of_nodes_than_clients_is_refused(tmp_path: Path) -> None:
    for nodes in (2, 4):
        task = deployment(tmp_path, 3)
        grid = LoopGrid(task, nodes, "central")
        with pytest.raises(RunError, match=f"{nodes} nodes are online and the configuration says clients=3"):
            federated_soon(task, grid, tmp_path)
        assert not (tmp_path / "run").exists()


def federated_soon(task, grid, tmp_path: Path) -> None:
    from fedblur.flower.server import serve

    serve(task, grid, Settings(start_timeout=0.1, out=str(tmp_path / "run")))


def test_straggler__has_a_deadline_and_counts_as_zero(tmp_path: Path) -> None:
    def late(question: Message, reply: Message) -> Message:
        if question.metadata.dst_node_id == 102:
            raise Lost
        return reply

    task = deployment(tmp_path, 3, rounds=2)
    run = federated(task, LoopGrid(task, 3, "central", late), tmp_path / "run", "central", deadline=0.2)
    nodes = run.rounds[-1]["local_only"]["nodes"]
    assert (nodes["asked"], nodes["answered"], nodes["missing"]) == (3, 2, 1)
    assert run.summary["privacy"]["expected_cohort"] == 3.0  # the denominator stays


def test_resume__refuses_other_settings(tmp_path: Path) -> None:
    task = deployment(tmp_path, 3, rounds=2)
    federated(task, LoopGrid(task, 3, "central"), tmp_path / "run", "central")
    with pytest.raises(RunError, match="another configuration .*clip_norm: 0.5 -> 0.7"):
        federated(
            deployment(tmp_path, 3, rounds=2, clip_norm=0.7), LoopGrid(task, 3, "central"), tmp_path / "run", "central"
        )


def test_run_folder__holds_no_key(tmp_path: Path) -> None:
    task = deployment(tmp_path, 4, mechanism=SECURE)
    grid = LoopGrid(task, 4, "secure-sum")
    federated(task, grid, tmp_path / "run", "secure-sum")
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            assert b"PRIVATE KEY" not in path.read_bytes(), path
    for context in grid.contexts.values():  # and nodes forget theirs when the round is over
        assert b"PRIVATE" not in repr(dict(context.state.config_records["fedblur.member"])).encode()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"trust": "centrall"}, "did you mean 'central'"),
        ({"deadline": 0}, "deadline=0"),
        ({"deadline": "soon"}, "numbers of seconds"),
    ],
)
def test_settings__bad_values_are_named(table: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings.read(table)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "clients = N"),
        ({"method": "knn-dpfl"}, "does not run on Flower"),
        ({"evaluate": "validation"}, "test data of your own"),
    ],
)
def test_server__refuses_what_a_federation_cannot_do(tmp_path: Path, changes: dict, message: str) -> None:
    task = deployment(tmp_path, 3, **changes)
    if not changes:
        task.config.write_text(task.config.read_text().replace("clients = 3\n", ""))
    with pytest.raises(ConfigError, match=message):
        federated(task, LoopGrid(task, 3, "central"), tmp_path / "run", "central")


# --- personal parameters ---

PERSONAL = {"personal": ["*bias"], "rounds": 4}


def states(folder: Path) -> dict[str, Path]:
    """What nodes keep, by node and round."""
    return {f"{path.parents[1].name} {path.stem}": path for path in sorted(folder.rglob("round-*.safetensors"))}


@pytest.mark.parametrize("trust", ["central", "secure-sum"])
def test_personal__gives_the_simulators_model_and_stays_on_its_node(
    tmp_path: Path, trust: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    changes = {"mechanism": SECURE} if trust == "secure-sum" else {"method": {"name": "fedrep", "steps": 2}}
    task = deployment(tmp_path, 4, **PERSONAL, **changes)
    grid = LoopGrid(task, 4, trust)
    run = federated(task, grid, tmp_path / "run", trust)
    plain = simulated(task, tmp_path / "plain")
    assert float((weights(run) - weights(plain)).abs().max()) < 1e-6
    assert not (run.path / "personal").exists()
    kept = states(tmp_path / "home")
    order = json.loads((tmp_path / "run" / "nodes.json").read_text())["nodes"]
    for client, node in enumerate(order):
        (bias,) = load_file(kept[f"personal-{node} round-000004"]).values()
        own = next(p for n, p in plain.personal(client).named_parameters() if n.endswith("bias"))
        assert torch.allclose(bias, own.detach(), atol=1e-6)
        for reply in grid.received:  # what the server gets has room for the shared part alone
            sent = [array.data for record in reply.content.array_records.values() for array in record.values()]
            assert not any(bias.numpy().tobytes() in data for data in sent)
    folders = {folder for path in kept.values() for folder in path.parents[:2]}
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in kept.values()} == {0o600}


def test_personal__a_server_that_goes_back_finds_the_nodes_rows_of_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies after round 3, of which its nodes have rows; its last checkpoint is of round 2."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    task = deployment(tmp_path, 4, **PERSONAL | {"checkpoint_every": 2})
    whole = federated(task, LoopGrid(task, 4, "central"), tmp_path / "whole", "central")
    expected = {name: path.read_bytes() for name, path in states(tmp_path / "home").items()}

    def die(question: Message, reply: Message) -> Message:
        if question.metadata.group_id == "4":
            raise RuntimeError("killed")
        return reply

    with pytest.raises(RuntimeError, match="killed"):
        federated(task, LoopGrid(task, 4, "central", die), tmp_path / "run", "central")
    run = federated(task, LoopGrid(task, 4, "central"), tmp_path / "run", "central")  # nodes were restarted too
    assert torch.equal(weights(run), weights(whole))
    assert {name: path.read_bytes() for name, path in states(tmp_path / "home").items()} == expected


def test_personal__a_node_keeps_no_more_than_a_server_may_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    task = deployment(tmp_path, 4, **PERSONAL | {"rounds": 8})
    federated(task, LoopGrid(task, 4, "central"), tmp_path / "run", "central")
    kept = [name.split("-")[-1] for name in states(tmp_path / "home")]
    assert kept == 4 * ["000006", "000007", "000008"]


def test_personal__a_question_without_first_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    from fedblur.flower import node_training, wire

    task = deployment(tmp_path, 4, **PERSONAL)
    told = {"clip_norm": 0.5, "bit_weight": 0.0, "noise_multiplier": 0.5, "client": 0, "constants": ""}
    start = torch.zeros(640).numpy().tobytes()
    for first in ({}, {"personal": b"\0" * 4}, {"personal": torch.full((10,), float("nan")).numpy().tobytes()}):
        with pytest.raises(wire.Refused, match="personal parameters came for 10"):
            node_training.update(task, {"partition-id": 0}, 7, 1, told, {"start": start, **first})
    assert not (tmp_path / "home").exists()
