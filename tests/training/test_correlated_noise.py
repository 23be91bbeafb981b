"""Runs with correlated noise: what is released, resume, kills, and where the noise's keys are."""

import shutil

import numpy as np
import pytest

import fedblur
from fedblur.core.errors import FedBlurError, PrivacyError, RunError
from fedblur.privacy import noise_key
from fedblur.privacy.mechanisms.correlated import CorrelatedNoise
from fedblur.privacy.noise_key import NoiseKey
from fedblur.training.run_folder import RunFolder
from fedblur.training.verify_ledger import read_books, verify

ROUNDS = 8
MECHANISMS = [
    {"name": "banded", "bands": 3},
    {"name": "blt", "buffers": 2},
    {"name": "tree", "restart": 4},
]


def config(mechanism: object = MECHANISMS[0], **changes: object) -> fedblur.Config:
    return fedblur.Config(
        **{
            "clients": 30, "sample_rate": 0.2, "rounds": ROUNDS, "epsilon": 20.0, "checkpoint_every": 3,
            "eval_every": 4, "sampling": {"name": "min_separation", "rounds": 3}, "mechanism": mechanism,
            "local": fedblur.LocalTraining(steps=1), **changes,
        }
    )  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBLUR_POPULATIONS", str(tmp_path / "state"))
    return tmp_path / "state"


def stop_at(round_: int, reason: type[BaseException] = KeyboardInterrupt):
    def watch(row: dict) -> None:
        if row["round"] == round_:
            raise reason

    return watch


def stopped(path, **changes: object) -> RunFolder:
    with pytest.raises(KeyboardInterrupt):
        fedblur.train(config(**changes), out=path, watch=stop_at(5))
    return RunFolder(path)


def keys(home) -> list:
    return sorted(home.glob(".noise/*.json"))


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda each: each["name"])
def test_seeded_run__that_is_stopped_ends_with_the_same_bytes(tmp_path, mechanism) -> None:
    whole = fedblur.train(config(mechanism, seed=3), out=tmp_path / "whole")
    stopped(tmp_path / "stopped", mechanism=mechanism, seed=3)
    again = fedblur.resume(tmp_path / "stopped")
    assert (whole.path / "model.safetensors").read_bytes() == (again.path / "model.safetensors").read_bytes()
    assert verify(again.path) == verify(whole.path) == []


def test_private_run__that_is_stopped_goes_on_with_keys_that_lie_elsewhere_and_go_in_the_end(tmp_path, home) -> None:
    folder = stopped(tmp_path / "run")
    (path,) = keys(home)
    secrets = [key.encode() for _, key in noise_key.json.loads(path.read_text())["keys"]]
    for file in folder.path.rglob("*"):
        if file.is_file():
            assert not any(secret in file.read_bytes() for secret in secrets), file
    run = fedblur.resume(folder.path)
    assert run.record.status == "complete"
    assert verify(run.path) == []
    assert len(read_books(run.path).spends) == ROUNDS
    assert keys(home) == []
    assert fedblur.resume(run.path).record.status == "complete"  # which needs no keys


def test_private_run__whose_keys_are_not_here_is_refused_in_one_line(tmp_path, home) -> None:
    folder = stopped(tmp_path / "run")
    shutil.rmtree(home)
    with pytest.raises(RunError, match="noise keys of this run are not here"):
        fedblur.resume(folder.path)


def test_step__that_was_served_before_a_kill_is_paid_and_not_repeated(tmp_path, home, monkeypatch) -> None:
    """The kill comes between the note that noise is served and the ledger's row."""
    serve = NoiseKey.serve

    def killed(self: NoiseKey, step: int) -> None:
        serve(self, step)
        if step == 5:
            raise MemoryError

    monkeypatch.setattr(NoiseKey, "serve", killed)
    with pytest.raises(MemoryError):
        fedblur.train(config(), out=tmp_path / "run")
    monkeypatch.undo()
    monkeypatch.setenv("FEDBLUR_POPULATIONS", str(home))
    assert len(read_books(tmp_path / "run").spends) == 4
    with pytest.raises(PrivacyError, match="budget is spent"):  # rounds 4 and 5 are made again: two releases more
        fedblur.resume(tmp_path / "run")
    assert len(read_books(tmp_path / "run").spends) == ROUNDS
    assert [finding for finding in verify(tmp_path / "run") if "closing line" not in finding] == []


def test_noise__of_a_resumed_run_takes_off_what_earlier_rounds_added(tmp_path, monkeypatch) -> None:
    """Fresh noise, computed back from what was added, is independent and of one size, across the resume."""
    released: dict[int, np.ndarray] = {}
    release = CorrelatedNoise.release

    def heard(self: CorrelatedNoise, total, request, noise):
        released[request.number] = noise.numpy().copy()
        return release(self, total, request, noise)

    monkeypatch.setattr(CorrelatedNoise, "release", heard)
    mechanism = {"name": "banded", "coefficients": [0.5, 0.375]}
    stopped(tmp_path / "run", mechanism=mechanism)
    before = dict(released)
    fedblur.resume(tmp_path / "run")
    assert sorted(released) == list(range(1, ROUNDS + 1))
    assert all((before[number] == released[number]).all() for number in before)
    noise = np.stack([released[number] for number in sorted(released)]).astype(float)
    c = np.eye(ROUNDS) + 0.5 * np.eye(ROUNDS, k=-1) + 0.375 * np.eye(ROUNDS, k=-2)
    fresh = c @ noise  # independent, and all of one size: had the resume forgotten, rounds 6 and 7 would be smaller
    sizes = fresh.std(axis=1)
    np.testing.assert_allclose(sizes, sizes.mean(), rtol=0.15)
    correlation = np.corrcoef(fresh)[np.triu_indices(ROUNDS, 1)]
    assert np.abs(correlation).max() < 0.2
    assert np.abs(np.corrcoef(noise)[5, 4]) > 0.25  # the noise itself is correlated, across the resume


def test_config__holds_the_numbers_that_were_fitted_to_the_server(tmp_path) -> None:
    run = fedblur.train(config("banded", rounds=4, seed=0), out=tmp_path / "run")
    stored = RunFolder(run.path).resolved()["mechanism"]
    assert stored["bands"] == 3
    assert len(stored["coefficients"]) == 2
    assert all(float(value * 2**20).is_integer() for value in stored["coefficients"])


def test_noise__without_a_rule_for_who_takes_part_is_refused(tmp_path) -> None:
    for mechanism in (*MECHANISMS, "blt"):
        with pytest.raises(FedBlurError, match="min_separation"):
            fedblur.train(config(mechanism, sampling="poisson"), out=tmp_path / "run")


def test_mask__that_changes_from_round_to_round_is_refused(tmp_path) -> None:
    with pytest.raises(FedBlurError, match="mask='random' does not go with"):
        fedblur.train(config(mask="random"), out=tmp_path / "run")


def test_noise__that_grows_from_round_to_round_is_refused_before_anything_is_spent(tmp_path) -> None:
    with pytest.raises(FedBlurError, match="grows from round to round"):
        fedblur.train(config({"name": "banded", "coefficients": [2.0]}, rounds=60), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
