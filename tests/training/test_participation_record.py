"""The record of who took part: on disk before anyone trains, never behind the ledger, checked when it is read."""

from __future__ import annotations

import itertools
import json
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedblur
from fedblur.cli.app import app
from fedblur.core.config import Config
from fedblur.core.errors import ConfigError, FedBlurError, PrivacyError, RunError
from fedblur.experiments.audit.listening import demand_private_updates
from fedblur.privacy import events
from fedblur.privacy.accounting import ZERO_OUT, epsilon
from fedblur.privacy.ledger import Chain, read_spends
from fedblur.privacy.ledger_file import read_stream
from fedblur.privacy.participation import MinSeparation, MinSeparationSampler, group_of
from fedblur.report.statement import words_of_total
from fedblur.training import round as rounds
from fedblur.training.participation_record import ParticipationRecord
from fedblur.training.run_folder import RunFolder
from fedblur.training.setup import plan_for
from fedblur.training.verify_ledger import compose, neighbours, read_books, verify

STREAM = "ab" * 16
CONFIG = Config(
    dataset="digits", model="logistic", clients=40, sample_rate=0.1, rounds=6, epsilon=8.0, delta=1e-3,
    sampling={"name": "min_separation", "rounds": 4}, checkpoint_every=2, eval_every=6, population="record-tests",
    local=fedblur.LocalTraining(steps=1, batch_size=4),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_populations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBLUR_POPULATIONS", str(tmp_path / "populations"))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [link.body for link in Chain(RunFolder(folder).participation).read()[1:]]


def kept_apart(folder: Path, separation: int = 4) -> bool:
    """Return whether every client's releases are as far apart as is accounted for."""
    seen: dict[int, list[int]] = {}
    for line in lines(folder):
        for client in line["clients"]:
            seen.setdefault(client, []).append(line["number"])
    return all(b - a >= separation for each in seen.values() for a, b in itertools.pairwise(each))


class Killed(BaseException):
    """A kill: nothing of ours catches it, so files stay as they are."""


def killed_run(out: Path, monkeypatch: pytest.MonkeyPatch, at: str, round_: int, config: Config = CONFIG) -> None:
    """Start a run and end it in the middle of a round: before its cohort is asked, or before or after it is paid."""
    asked, paid = rounds.client_job, rounds.Payment.settle
    with monkeypatch.context() as patch:

        def ask(protocol: Any, state: Any) -> Any:
            if at == "asked" and state.round + 1 == round_:
                raise Killed
            return asked(protocol, state)

        def settle(self: Any) -> None:
            if at == "unpaid" and self.round_ == round_:
                raise Killed
            paid(self)
            if at == "paid" and self.round_ == round_:
                raise Killed

        patch.setattr(rounds, "client_job", ask)
        patch.setattr(rounds.Payment, "settle", settle)
        with pytest.raises(Killed):
            fedblur.train(config, out=out)


# --- the file ---


def begun(path: Path, clients: int = 20) -> ParticipationRecord:
    return ParticipationRecord(path / "local_only" / "record.jsonl", clients, STREAM, new=True)


def again(record: ParticipationRecord) -> ParticipationRecord:
    return ParticipationRecord(record.path, len(record.last), STREAM)


def test_record__is_on_disk_and_its_owner_s_alone(tmp_path: Path) -> None:
    record = begun(tmp_path)
    record.note(1, 1, np.array([2, 5]))
    record.note(2, 2, np.array([], dtype=np.int64))
    record.note(3, 2, np.array([5, 7]))
    read = again(record)
    assert read.last.tolist() == record.last.tolist()
    assert read.times.tolist() == record.times.tolist()
    assert read.last[5] == 3
    assert read.times[5] == 2
    assert [c is not None and c.tolist() for c in map(read.cohort, (1, 2, 3, 4))] == [[2, 5], [], [5, 7], False]
    assert read.anchor() == record.anchor()
    assert stat.S_IMODE(record.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(record.path.parent.stat().st_mode) == 0o700


def test_record__a_cohort_is_synced_before_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, synced = begun(tmp_path), []
    monkeypatch.setattr("fedblur.privacy.ledger.os.fsync", lambda file: synced.append(record.latest))
    record.note(1, 1, np.array([3]))
    assert synced == [0]
    assert record.latest == 1


def test_record__cut_at_any_byte_is_torn_or_refused_and_never_shorter_unseen(tmp_path: Path) -> None:
    """A crash leaves a part of the last line: nobody trained for it. What a checkpoint remembers is never dropped."""
    record = begun(tmp_path)
    record.note(1, 1, np.array([2, 5]))
    anchor, whole = record.anchor(), record.path.read_bytes()
    record.note(2, 2, np.array([3, 4]))
    data = record.path.read_bytes()
    for size in range(len(data)):
        record.path.write_bytes(data[:size])
        try:
            cut = again(record)
            cut.demand_anchor(anchor, "the checkpoint")
        except RunError:
            assert size < len(whole)
            continue
        assert size >= len(whole)
        assert cut.latest == 1
    cut.note(2, 2, np.array([1, 9]))  # a torn line gives way to the next one
    assert again(record).cohort(2).tolist() == [1, 9]  # type: ignore[union-attr]


def test_record__any_changed_byte_is_found(tmp_path: Path) -> None:
    record = begun(tmp_path)
    record.note(1, 1, np.array([2, 5]))
    record.note(2, 2, np.array([3, 4]))
    data = record.path.read_bytes()
    for place in range(len(data) - 1):
        record.path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(RunError):
            again(record)


@pytest.mark.parametrize(
    "body",
    [
        {"number": 1, "round": 1, "clients": [5, 5]},
        {"number": 1, "round": 1, "clients": [5, 2]},
        {"number": 1, "round": 1, "clients": [-1]},
        {"number": 1, "round": 1, "clients": [20]},
        {"number": 1, "round": 1, "clients": [True]},
        {"number": 1.0, "round": 1, "clients": [1]},
        {"number": 1, "round": 1},
        {"number": 2, "round": 2, "clients": [1]},
    ],
)
def test_record__a_line_that_names_no_cohort_is_refused(tmp_path: Path, body: dict[str, Any]) -> None:
    record = begun(tmp_path)
    chain = Chain(record.path)
    with chain.writing():
        chain.append(body)
    with pytest.raises(FedBlurError, match="names no cohort|comes after release 0"):
        again(record)


def test_record__of_another_run_is_refused(tmp_path: Path) -> None:
    record = begun(tmp_path)
    for clients, stream in ((21, STREAM), (20, "cd" * 16)):
        with pytest.raises(RunError, match="is the record of another run"):
            ParticipationRecord(record.path, clients, stream)
    with pytest.raises(RunError, match="cannot be opened"):
        ParticipationRecord(tmp_path / "nowhere.jsonl", 20, STREAM)


def test_record__that_somebody_else_wrote_to_is_refused(tmp_path: Path) -> None:
    record = begun(tmp_path)
    other = again(record)
    other.note(1, 1, np.array([2]))
    with pytest.raises(PrivacyError, match="has 1 cohorts, and release 1 is to come"):
        record.note(1, 1, np.array([3]))


# --- runs ---


def test_run__from_configuration_to_statement(tmp_path: Path) -> None:
    """Config → cohort → record → event → ledger → verify → statement."""
    run = fedblur.train(CONFIG, out=tmp_path / "run")
    folder = RunFolder(run.path)
    assert kept_apart(run.path)
    assert [len(line["clients"]) for line in lines(run.path)] == [4] * 6
    spends = read_spends(Chain(folder.ledger).read())
    (event,) = {event for _, event in spends}
    stream = read_stream(folder.ledger)
    sigma = run.record.privacy.noise_multiplier
    assert event == events.MinSeparated(4, 0, stream, events.Gaussian(sigma))
    assert run.epsilon == epsilon(events.Gaussian(sigma), 2, 1e-3) <= 8.0
    assert verify(run.path) == []
    assert "at least 4 rounds apart" in run.record.privacy.sampling
    statement = json.loads((run.path / "statement.json").read_text())
    assert "zero-out" in json.dumps(statement)


def test_run__two_runs_have_streams_of_their_own_and_add_up(tmp_path: Path) -> None:
    one, two = (fedblur.train(CONFIG, out=tmp_path / name) for name in ("one", "two"))
    assert read_stream(RunFolder(one.path).ledger) != read_stream(RunFolder(two.path).ledger)
    _, total = compose([read_books(one.path), read_books(two.path)])
    sigma = one.record.privacy.noise_multiplier
    assert total["pld"] == epsilon(events.Gaussian(sigma), 4, 1e-3)
    shutil.copytree(one.path, tmp_path / "copy")  # which shares the stream's name
    _, copied = compose([read_books(one.path), read_books(tmp_path / "copy")])
    assert copied["pld"] == total["pld"]
    assert two.record.privacy.population is not None
    assert two.record.privacy.population.epsilon == min(
        epsilon(events.Gaussian(sigma), 4, 1e-3, accountant) for accountant in ("pld", "rdp")
    )


def test_audit__of_a_schedule_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="sampling='min_separation' has cohorts that follow from earlier ones"):
        demand_private_updates(CONFIG)


def test_total__with_poisson_runs_names_the_weaker_neighbours(tmp_path: Path) -> None:
    one = fedblur.train(CONFIG, out=tmp_path / "one")
    two = fedblur.train(replace(CONFIG, sampling="poisson"), out=tmp_path / "two")
    books = [read_books(run.path) for run in (one, two)]
    assert neighbours(books[1:]) == "add or remove one client"
    assert neighbours(books) == ZERO_OUT
    assert words_of_total(books).endswith(f"for {ZERO_OUT}")
    assert "zero-out" not in words_of_total(books[:1])
    shown = CliRunner().invoke(app, ["ledger", "show", str(one.path), str(two.path)])
    assert f"weakest of their neighbours: {ZERO_OUT}" in " ".join(shown.output.split())
    facts = json.loads((one.path / "statement.json").read_text())
    assert facts["total"]["adjacency"] == ZERO_OUT
    assert any("no client took part sooner or more often" in line for line in facts["assumed"])
    assert not any("cohorts are secret" in line for line in facts["assumed"])


@pytest.mark.parametrize("at", ["asked", "unpaid", "paid"])
@pytest.mark.parametrize("round_", [1, 4])
def test_resume__a_private_run_keeps_its_distance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, round_: int
) -> None:
    """A round that was paid for and is repeated is another release: nobody of its cohort takes part again too early."""
    config = replace(CONFIG, rounds=8, epsilon=None, noise_multiplier=2.0)
    killed_run(tmp_path / "run", monkeypatch, at, round_, config)
    before = lines(tmp_path / "run")
    assert len(before) == round_
    paid = len(read_spends(Chain(RunFolder(tmp_path / "run").ledger).read()))
    assert paid == round_ - (at != "paid")
    if paid > (2 if round_ == 4 else 0):  # rounds after the checkpoint are paid again, so the last ones are left out
        with pytest.raises(PrivacyError, match="the budget is spent"):
            fedblur.resume(tmp_path / "run")
    else:
        assert fedblur.resume(tmp_path / "run").record.complete
    after = lines(tmp_path / "run")
    assert after[: len(before)] == before  # whoever is recorded took part
    assert kept_apart(tmp_path / "run")
    assert [line["number"] for line in after] == list(range(1, 9))
    assert len(read_spends(Chain(RunFolder(tmp_path / "run").ledger).read())) == 8
    repeated = after[paid]["clients"]
    assert (repeated == before[-1]["clients"]) == (at != "paid")  # a release that was not made keeps its cohort
    assert verify(tmp_path / "run") == []


@pytest.mark.parametrize("mechanism", ["gaussian", "tree"])
def test_resume__a_row_of_the_ledger_that_was_cut_short_is_one_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mechanism: str
) -> None:
    """Its cohort is on record once, and its noise was served once: a second row would have neither."""
    config = replace(
        CONFIG, epsilon=None, noise_multiplier=4.0, mechanism=mechanism, checkpoint_every=1, population=None
    )
    killed_run(tmp_path / "run", monkeypatch, "paid", 4, config)
    ledger = RunFolder(tmp_path / "run").ledger
    ledger.write_bytes(ledger.read_bytes()[:-20])
    with pytest.raises(PrivacyError, match="the budget is spent"):  # round 4 is repeated as the fifth release
        fedblur.resume(tmp_path / "run")
    assert [line["number"] for line in lines(tmp_path / "run")] == list(range(1, 7))
    assert len(read_spends(Chain(ledger).read())) == 6
    assert kept_apart(tmp_path / "run")
    assert verify(tmp_path / "run") == []


@pytest.mark.parametrize("at", ["asked", "unpaid", "paid"])
def test_resume__a_seeded_run_is_the_same_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    config = replace(CONFIG, seed=3)
    whole = fedblur.train(config, out=tmp_path / "whole")
    killed_run(tmp_path / "run", monkeypatch, at, 4, config)
    run = fedblur.resume(tmp_path / "run")
    assert lines(run.path) == lines(whole.path)
    for name in ("model.safetensors",):
        assert (run.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert verify(run.path) == []


@pytest.mark.parametrize("damage", ["gone", "cut", "older", "another", "ahead"])
def test_resume__a_record_that_was_rolled_back_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    killed_run(tmp_path / "run", monkeypatch, "paid", 5)
    folder = RunFolder(tmp_path / "run")
    kept = folder.participation.read_bytes().splitlines(keepends=True)
    ledger = folder.ledger.read_bytes()
    if damage == "gone":
        folder.participation.unlink()
    elif damage == "cut":
        folder.participation.write_bytes(b"".join(kept[:-1]))  # the checkpoint of round 4 does not know this cohort
    elif damage == "older":
        folder.participation.write_bytes(b"".join(kept[:3]))
    elif damage == "another":
        other = fedblur.train(replace(CONFIG, seed=1), out=tmp_path / "other")
        shutil.copy(RunFolder(other.path).participation, folder.participation)
    else:
        chain = Chain(folder.participation)
        with chain.writing():
            chain.read()
            for number in (6, 7):
                chain.append({"number": number, "round": 6, "clients": []})
    with pytest.raises(RunError, match="rolled back|another run|cut or replaced|cannot be opened"):
        fedblur.resume(folder.path)
    assert verify(folder.path) != []
    assert folder.ledger.read_bytes() == ledger  # nothing was released


def test_resume__a_record_that_was_replaced_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of the same run and as many cohorts, with other clients in it."""
    killed_run(tmp_path / "run", monkeypatch, "paid", 5)
    folder = RunFolder(tmp_path / "run")
    kept = lines(folder.path)
    folder.participation.unlink()
    forged = ParticipationRecord(folder.participation, 40, read_stream(folder.ledger), new=True)
    for number, line in enumerate(kept, 1):
        moved = np.sort((np.array(line["clients"]) + 1) % 40)
        forged.note(number, number, moved if number > 4 else np.array([number]))
    with pytest.raises(RunError, match="is not the record that the checkpoint of round 4 remembers"):
        fedblur.resume(folder.path)
    assert "is not the record that" in " ".join(verify(folder.path))


def test_plan__adaptive_clipping_with_correlated_noise_is_refused() -> None:
    config = replace(CONFIG, mechanism="tree", clipping="adaptive", population=None)
    with pytest.raises(
        ConfigError, match="clipping='adaptive' does not go with mechanism='tree': the noise of several"
    ):
        plan_for(config, 40, 50)


def test_verify__a_client_that_came_too_early_is_found(tmp_path: Path) -> None:
    sampler = CONFIG.sampling.sampler(20, 0.1)
    record = begun(tmp_path)
    for number, ids in enumerate(([2, 5], [3, 4], [], [], [2, 7], [2, 8]), 1):
        record.note(number, number, np.array(ids, dtype=np.int64))
    assert [*again(record).violations(sampler)] == ["1 clients of release 6 were not allowed to take part in it yet"]
    late = MinSeparation(rounds=5).sampler(20, 0.1)
    assert len([*again(record).violations(late)]) == 2


def test_verify__a_run_that_let_clients_in_too_early_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of code that was changed: its record, its ledger and its checkpoints agree with each other."""
    with monkeypatch.context() as patch:
        patch.setattr(MinSeparationSampler, "may", lambda self, number, past: past.times < 2)
        run = fedblur.train(replace(CONFIG, sample_rate=0.2), out=tmp_path / "run")
    found = verify(run.path)
    assert found
    assert all("were not allowed to take part in it yet" in each for each in found)


@pytest.mark.parametrize("name", ["in_turn", "cyclic"])
def test_resume__turns_follow_releases_and_not_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A repeated round is another release, so it is the next group's turn: one group would be in two of four else."""
    sampling = {"name": name, "groups": 10 if name == "in_turn" else 4}
    config = replace(CONFIG, rounds=8, epsilon=None, noise_multiplier=2.0, sampling=sampling)
    drawn, groups = [], sampling["groups"]
    original = rounds.cohort_of

    def cohort_of(sampler: Any, past: Any, number: int, *rest: Any) -> Any:
        ids = original(sampler, past, number, *rest)
        drawn.append((number, {*group_of(ids.numpy(), groups).tolist()}))
        return ids

    monkeypatch.setattr(rounds, "cohort_of", cohort_of)
    killed_run(tmp_path / "run", monkeypatch, "paid", 4, config)
    with pytest.raises(PrivacyError, match="the budget is spent"):
        fedblur.resume(tmp_path / "run")
    assert [number for number, _ in drawn] == list(range(1, 9))
    assert all(found <= {number % groups} for number, found in drawn)
    assert verify(tmp_path / "run") == []
    assert not RunFolder(tmp_path / "run").participation.exists()  # who takes part follows from the number alone


def test_folder__a_run_that_never_began_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("fedblur.training.loop._save", fails)
        with pytest.raises(Killed):
            fedblur.train(CONFIG, out=tmp_path / "run")
    assert RunFolder(tmp_path / "run").participation.exists()
    assert RunFolder(tmp_path / "run").stage() == "prepared"
    run = fedblur.train(CONFIG, out=tmp_path / "run")  # it starts again, with another stream
    assert verify(run.path) == []
