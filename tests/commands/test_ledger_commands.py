"""`fedblur ledger`: epsilon recomputed, every tampering found, several runs composed."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from fedblur import accounting
from fedblur.chain import Chain
from fedblur.config import Config
from fedblur.events import Gaussian, PoissonSampled
from fedblur.train import resume, train
from fedblur.verification import verify
from tests.cli import invoke


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Config(rounds=12, noise_multiplier=2.0, sample_rate=0.05, checkpoint_every=5, clients=100)
    return train(config, out=tmp_path_factory.mktemp("ledger") / "run").path


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def test_verify__a_whole_run_is_verified_and_says_its_hash(run: Path) -> None:
    assert verify(run) == []
    head = Chain(run / "ledger.jsonl").read()[-1].hash
    assert head in invoke("ledger", "verify", run)


def test_verify__every_one_of_1000_single_byte_edits_is_found(copy: Path) -> None:
    path, dice = copy / "ledger.jsonl", random.Random(0)
    whole = path.read_bytes()
    for _ in range(1000):
        place = dice.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ dice.randrange(1, 256)]) + whole[place + 1 :])
        assert verify(copy), place
    path.write_bytes(whole)
    assert verify(copy) == []


def test_verify__a_ledger_cut_at_the_end_of_any_line_is_found(copy: Path) -> None:
    path = copy / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in range(len(lines)):
        path.write_bytes(b"".join(lines[:kept]))
        assert "NOT VERIFIED" in invoke("ledger", "verify", copy, status=1)


def test_verify__a_forgotten_round_is_found_even_where_nothing_remembers_the_chain(copy: Path) -> None:
    path = copy / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    findings = " ".join(verify(copy))
    assert "1 rounds left results but no release in the ledger, the first is round 12" in findings
    assert "the ledger that the checkpoint of round 12 remembers" in findings
    assert "the ledger that summary.json remembers" in findings


def test_verify__another_configuration_or_claim_is_found(copy: Path) -> None:
    summary = json.loads((copy / "summary.json").read_text())
    summary["privacy"]["epsilon"] /= 2
    (copy / "summary.json").write_text(json.dumps(summary))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rounds": 13}))
    findings = " ".join(verify(copy))
    assert "summary.json claims epsilon" in findings
    assert "the ledger was opened for configuration" in findings


def test_verify__another_runs_whole_ledger_is_found(copy: Path, tmp_path: Path) -> None:
    config = Config(rounds=12, noise_multiplier=2.0, sample_rate=0.05, checkpoint_every=5, clients=100)
    other = train(config, out=tmp_path / "other").path
    shutil.copy(other / "ledger.jsonl", copy / "ledger.jsonl")
    assert "cut or replaced" in " ".join(verify(copy))


def test_resume__refuses_a_ledger_that_was_cut_or_deleted(copy: Path) -> None:
    path = copy / "ledger.jsonl"
    whole = path.read_bytes()
    for damage in (b"".join(whole.splitlines(keepends=True)[:4]), None):
        path.unlink() if damage is None else path.write_bytes(damage)
        with pytest.raises(Exception, match="cut or replaced"):
            resume(copy)
        assert path.exists() == (damage is not None)


def test_show__composes_runs_over_the_same_clients(run: Path) -> None:
    answer = json.loads(invoke("ledger", "show", run, run, "--json"))
    event = PoissonSampled(0.05, Gaussian(2.0))
    delta = answer["total"]["delta"]
    assert delta == pytest.approx(0.01)
    assert answer["total"]["epsilon"]["pld"] == accounting.epsilon(event, 24, delta, "pld")
    assert answer["total"]["epsilon"]["rdp"] == accounting.epsilon(event, 24, delta, "rdp")
    assert answer["runs"][0]["epsilon"]["pld"] == accounting.epsilon(event, 12, delta, "pld")
    assert "together" in invoke("ledger", "show", run, run)


def test_show__a_folder_without_a_ledger_is_one_line(tmp_path: Path) -> None:
    assert "has no ledger" in invoke("ledger", "show", tmp_path, status=2)
