"""The whole protocol: run folders, what a result states, kill and resume, tables, and the claim that it is for."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import fedblur
from fedblur.cli.app import app
from fedblur.core.errors import PrivacyError, RunError, TimeIsUp
from fedblur.experiments.table import read_spec, run_table
from fedblur.privacy.claim import NOISELESS, SEEDED
from fedblur.privacy.ledger import Ledger, read_spends
from fedblur.privacy.ledger_file import open_ledger
from fedblur.training.machine import Machine
from fedblur.voting import protocol
from tests.training.test_loop import own_world

QUICK = {"name": "ae-dpfl", "teacher_steps": 10, "student_steps": 40, "queries": 30}
SHORT = fedblur.Config(method=QUICK, epsilon=8.0, seed=0)


class Stop(Exception):
    """A kill."""


def stop_at(stage: str, round_: int):
    def watch(row) -> None:
        if row["stage"] == stage and row["round"] >= round_:
            raise Stop

    return watch


def spends(path: Path) -> int:
    return len(read_spends(open_ledger(path / "ledger.jsonl").links))


def weights(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> fedblur.Run:
    """A run that nothing disturbed; tests only read it."""
    return fedblur.train(SHORT, out=tmp_path_factory.mktemp("whole") / "run")


def test_run__writes_a_whole_run_folder(whole: fedblur.Run) -> None:
    run = whole
    assert {p.name for p in run.path.iterdir()} == {
        "config.json", "rounds.jsonl", "ledger.jsonl", "checkpoints", "model.safetensors", "summary.json",
        "statement.md", "statement.html", "statement.json",
    }  # fmt: skip
    stored = load_file(run.path / "model.safetensors")
    assert all(torch.equal(stored[name], p) for name, p in run.module.state_dict().items())
    assert run.rounds[-1]["accuracy"] == run.accuracy
    assert run.epsilon <= 8.0
    assert spends(run.path) == 1


def test_invariant_10__the_result_states_everything(whole: fedblur.Run) -> None:
    run = whole
    summary, privacy = run.summary, run.summary["privacy"]
    stated = "epsilon delta accountant adjacency sampling trust_model tuning unit mechanism"
    for key in stated.split():
        assert privacy[key] not in (None, ""), key
    assert privacy["adjacency"] == "add or remove one client"
    assert privacy["releases"] == 1
    assert privacy["warning"] == SEEDED
    assert privacy["vote_noise_std"] == pytest.approx(privacy["noise_multiplier"] * math.sqrt(30))
    assert summary["clients"] == 359 - 36 == round(1 / privacy["delta"])
    assert "needs a public unlabelled pool of 124 samples that the other methods do not have" in summary["data_note"]


def test_invariant_7__what_was_not_released_is_local_only(whole: fedblur.Run) -> None:
    run = whole
    local = run.summary["local_only"]
    low, median, high = local["teacher_accuracy_quartiles"]
    assert 0 < low <= median <= high < 1
    assert 0.5 < local["labels_equal_plurality"] <= 1
    assert local["answered"] == 30
    statement = json.dumps(run.summary["privacy"])
    assert not any(word in statement for word in ("teacher", "equal_plurality", "margin"))
    assert not (run.path / "local_only").exists()  # counts without noise are gone once the labels are out
    assert "counts" not in load_file(next((run.path / "checkpoints").glob("*.safetensors")))


def test_run__without_a_seed_is_private_and_without_noise_is_not(tmp_path: Path) -> None:
    private = fedblur.train(replace(SHORT, seed=None), out=tmp_path / "private")
    assert private.summary["privacy"]["warning"] is None
    silent = fedblur.train(replace(SHORT, epsilon=math.inf), out=tmp_path / "silent")
    assert silent.summary["privacy"]["warning"] == NOISELESS
    assert silent.summary["local_only"]["labels_equal_plurality"] == 1.0


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_run__either_accountant_and_confident_voting(tmp_path: Path, accountant: str) -> None:
    method = QUICK | {"threshold": 0.25, "queries": 20, "checks": 60}
    run = fedblur.train(replace(SHORT, method=method, accountant=accountant), out=tmp_path / "run")
    assert 7.9 < run.epsilon <= 8.0
    assert 0 < run.summary["local_only"]["answered"] <= 20
    assert run.summary["privacy"]["check_noise_std"] == pytest.approx(3 * run.summary["privacy"]["vote_noise_std"])


def test_run__nothing_to_learn_from_is_said(tmp_path: Path) -> None:
    method = QUICK | {"threshold": 0.99, "queries": 20, "checks": 60}
    with pytest.raises(RunError, match="no sample passed threshold=0.99"):
        fedblur.train(replace(SHORT, method=method), out=tmp_path / "run")


def test_run__own_data_and_own_model(tmp_path: Path) -> None:
    model = nn.Linear(8, 3)
    config = replace(SHORT, method=QUICK | {"queries": 10})
    run = fedblur.train(config, out=tmp_path / "run", federation=own_world(), module=model)
    assert run.module is not model
    assert run.accuracy > 0.7
    with pytest.raises(RunError, match="with its own data"):
        fedblur.resume(run.path)


def test_run__what_cannot_start_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(fedblur.FedBlurError, match="queries=5000 but the public pool has 124"):
        fedblur.train(replace(SHORT, method=QUICK | {"queries": 5000}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- the test set ---


def test_run__nobody_learns_from_the_test_set(tmp_path: Path) -> None:
    world = own_world()
    other = replace(world, test=type(world.test)(world.test.x * 0 + 7, world.test.y))
    config = replace(SHORT, method=QUICK | {"queries": 10})
    ends = [fedblur.train(config, out=tmp_path / str(i), federation=w).path for i, w in enumerate((world, other))]
    assert weights(ends[0]) == weights(ends[1])


def test_evaluate__validation_never_looks_at_test_data(tmp_path: Path) -> None:
    world = own_world(validation_share=0.2)
    poisoned = replace(world, test=type(world.test)(torch.full_like(world.test.x, math.nan), world.test.y))
    config = replace(SHORT, method=QUICK | {"queries": 10}, evaluate="validation")
    run = fedblur.train(config, out=tmp_path / "run", federation=poisoned)
    assert run.summary["evaluated_on"] == "validation"
    assert math.isfinite(run.summary["loss"])


def test_run__nobody_learns_from_the_labels_of_the_pool(tmp_path: Path) -> None:
    world = own_world()
    config = replace(SHORT, method=QUICK | {"queries": 10})
    plain = fedblur.train(config, out=tmp_path / "plain", federation=world)
    from fedblur.voting.setup import reserve

    pool = reserve(world.train, config.voting, config.data_seed)
    train = world.train
    y = torch.zeros_like(train.y)
    for client in pool.voters.tolist():
        own = slice(int(train.starts[client]), int(train.starts[client] + train.sizes[client]))
        y[own] = train.y[own]
    assert not torch.equal(y, train.y)
    blind = fedblur.train(config, out=tmp_path / "blind", federation=replace(world, train=replace(train, y=y)))
    assert weights(blind.path) == weights(plain.path)


# --- kill and resume ---


@pytest.mark.parametrize(("stage", "round_"), [("teachers", 1), ("teachers", 200), ("student", 1), ("student", 13)])
def test_resume__goes_on_bit_identically(tmp_path: Path, whole: fedblur.Run, stage: str, round_: int) -> None:
    with pytest.raises(Stop):
        fedblur.train(SHORT, out=tmp_path / "broken", watch=stop_at(stage, round_))
    if stage == "teachers":
        assert spends(tmp_path / "broken") == 0
        assert (tmp_path / "broken" / "local_only").stat().st_mode & 0o077 == 0
    seen = []
    resumed = fedblur.resume(tmp_path / "broken", watch=lambda row: seen.append((row["stage"], row["round"])))
    assert weights(resumed.path) == weights(whole.path)
    assert seen[0][1] > round_ or seen[0][0] != stage  # nothing that was done is done again
    assert spends(resumed.path) == 1
    assert [row["accuracy"] for row in resumed.rounds] == [row["accuracy"] for row in whole.rounds]
    local, expected = ({**r.summary["local_only"], "voting_seconds": 0} for r in (resumed, whole))
    assert local == expected


@pytest.mark.parametrize("moment", ["before the spend", "after the spend", "before the checkpoint"])
def test_invariant_6__labels_are_drawn_once_and_paid_before_they_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """An unseeded run killed around the release goes on with the very labels that it drew, paid for once."""
    drawn = []
    real_release, real_spend = protocol.release_labels, Ledger.spend

    def draw(*args):
        drawn.append(real_release(*args))
        return drawn[-1]

    def die(*args, **kwargs) -> None:
        if moment == "after the spend":
            real_spend(*args, **kwargs)
        raise Stop

    config = replace(SHORT, seed=None)
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "release_labels", draw)
        target = (protocol, "local_figures") if moment == "before the checkpoint" else (Ledger, "spend")
        patch.setattr(*target, die)
        with pytest.raises(Stop):
            fedblur.train(config, out=tmp_path / "run")
        assert "labels" not in load_file(next((tmp_path / "run" / "checkpoints").glob("*.safetensors")))
    monkeypatch.setattr(protocol, "release_labels", draw)
    run = fedblur.resume(tmp_path / "run")
    assert len(drawn) == 1
    assert spends(run.path) == 1
    newest = max((run.path / "checkpoints").glob("*.safetensors"))
    assert torch.equal(load_file(newest)["labels"], drawn[0])


def test_invariant_6__a_second_draw_would_be_a_second_release(tmp_path: Path) -> None:
    """Paid for, but the labels are lost: fresh noise would be another release, which the budget does not hold."""
    config = replace(SHORT, seed=None)
    with pytest.raises(Stop):
        fedblur.train(config, out=tmp_path / "run", watch=stop_at("teachers", 323))
    run = tmp_path / "run"
    election = protocol.prepare(config, run / "ledger.jsonl", Machine(), None, None)
    election.ledger.spend(1, election.event, replay=False)
    with pytest.raises(PrivacyError, match="the budget is spent"):
        fedblur.resume(run)


def test_resume__a_finished_run_stays_what_it_is(tmp_path: Path) -> None:
    run = fedblur.train(replace(SHORT, seed=None), out=tmp_path / "run")
    before = weights(run.path)
    again = fedblur.resume(run.path)
    assert weights(again.path) == before
    assert again.summary["privacy"] == run.summary["privacy"]


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, TimeIsUp])
def test_stop__a_student_that_was_interrupted_says_so_and_goes_on(stopped: type[BaseException], tmp_path: Path) -> None:
    def interrupt(row) -> None:
        if row["stage"] == "student" and row["round"] == 5:
            raise stopped

    with pytest.raises(stopped):
        fedblur.train(SHORT, out=tmp_path / "run", watch=interrupt)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "stopped after 10 of 40 steps of the student"
    assert fedblur.resume(tmp_path / "run").summary["status"] == "complete"


# --- the command line and tables ---


def test_cli__run_says_what_teachers_are_worth(tmp_path: Path) -> None:
    few = ["--set", "method.ae-dpfl.student_steps=40", "--set", "method.ae-dpfl.teacher_steps=10"]
    words = [*few, "--set", "method.ae-dpfl.teacher=mlp", "--seed", "1"]
    result = CliRunner().invoke(app, ["run", "--method", "ae-dpfl", *words, "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "σ_v = " in text
    assert "votes on each of 62 labels" in text
    assert "median accuracy" in text
    assert "needs a public unlabelled pool of 124 samples" in text


TABLE = """
[base]
rounds = 2
seed = 0
[[rows]]
label = "DP-FedAvg"
[[rows]]
label = "AE-DPFL"
method = { name = "ae-dpfl", student_steps = 20, teacher_steps = 20 }
[[rows]]
label = "kNN-DPFL"
method = { name = "knn-dpfl", student_steps = 20 }
"""


def test_table__a_row_can_vote_and_the_table_says_what_that_assumes(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(TABLE)
    result = CliRunner().invoke(app, ["table", str(tmp_path / "t.toml"), "--out", str(tmp_path / "out"), "--quiet"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for title in ("AE-DPFL", "kNN-DPFL"):
        assert f"{title} needs a public unlabelled pool of 124 samples that the other methods do not have" in text


def test_table__a_cell_that_was_stopped_goes_on(tmp_path: Path) -> None:
    row = '[[rows]]\nlabel = "v"\nmethod = { name = "ae-dpfl", student_steps = 20, teacher_steps = 20 }\n'
    (tmp_path / "t.toml").write_text(f"[base]\nseed = 0\n{row}")
    spec = read_spec(tmp_path / "t.toml")
    with pytest.raises(Stop):
        run_table(spec, tmp_path / "out", Machine(), lambda cell, index: stop_at("teachers", 100))
    seen = []
    run_table(spec, tmp_path / "out", Machine(), lambda cell, index: lambda row: seen.append(row))
    assert seen[0]["stage"] == "teachers"
    assert seen[0]["round"] > 100


# --- what it is for ---


@pytest.mark.long  # in make test: test_voting__on_digits_the_student_beats_its_median_teacher_by_far
@pytest.mark.xdist_group("real data")
def test_mnist_by_writer__the_student_beats_its_median_teacher_by_far(
    tmp_path: Path, hub: Callable[[str], Path]
) -> None:
    """A short form of the claim at ε = 2: 200 writers, logistic teachers; all 485 do better."""
    method = {"name": "ae-dpfl", "teacher": "logistic", "queries": 200, "teacher_steps": 60, "student_steps": 400}
    config = fedblur.Config(dataset="mnist", clients=200, model="mlp", method=method, epsilon=2.0, seed=0)
    run = fedblur.train(config, out=tmp_path / "run", machine=Machine(data_dir=hub("mnist")))
    median = run.summary["local_only"]["teacher_accuracy_quartiles"][1]
    assert run.epsilon <= 2.0
    assert 0.4 < median < 0.7
    assert run.accuracy > median + 0.1
