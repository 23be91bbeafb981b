"""`fedblur ledger`: epsilon recomputed, every tampering found, several runs composed."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import pytest

from fedblur.core.config import Config
from fedblur.core.errors import PrivacyError
from fedblur.privacy import accounting
from fedblur.privacy import ledger as ledgers
from fedblur.privacy.events import Gaussian, PoissonSampled
from fedblur.privacy.ledger import Budget, Chain, Ledger, read_randomness
from fedblur.privacy.ledger_file import open_ledger
from fedblur.report.statement import read_statement
from fedblur.training.loop import train
from fedblur.training.resume import resume
from fedblur.training.verify_ledger import compose, read_books, unprotected, verify
from tests.commandline import invoke


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
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))  # the closing line, too
    findings = " ".join(verify(copy))
    assert "round 12 left results, and round 12 has no release in the ledger" in findings
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


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Config(rounds=2, noise_multiplier=2.0, sample_rate=0.05, clients=100, seed=4)
    return train(config, out=tmp_path_factory.mktemp("seeded") / "run").path


def test_show__a_total_with_a_seeded_run_is_infinite_and_says_why(run: Path, seeded: Path) -> None:
    answer = json.loads(invoke("ledger", "show", run, seeded, "--json"))
    assert set(answer["total"]["epsilon"].values()) == {"inf"}
    assert "1 run drew the noise from a seed" in answer["total"]["infinite_because"]
    assert [each["randomness"] for each in answer["runs"]] == ["operating system", "seed"]
    assert answer["runs"][1]["epsilon"]["pld"] > 0  # alone: what it would be with secret noise
    shown = invoke("ledger", "show", run, seeded)
    assert "ε together is ∞, since 1 run drew the noise from a seed" in shown
    assert "not private: seeded noise" in shown
    assert "∞" not in invoke("ledger", "show", run, run)


def test_statement__a_total_with_a_seeded_run_is_infinite_and_says_why(copy: Path, seeded: Path) -> None:
    invoke("statement", copy, "--also", seeded)
    facts = json.loads((copy / "statement.json").read_text())
    assert set(facts["total"]["epsilon"].values()) == {"inf"}
    assert facts["private"] is True  # this run's own claim stands
    assert "all 2 runs together | ε = ∞, since 1 run drew the noise from a seed" in (copy / "statement.md").read_text()


def test_compose__a_seeded_vote_or_search_makes_the_total_infinite(run: Path, tmp_path: Path) -> None:
    words = ("run", "--method", "knn-dpfl", "--clients", 60, "--seed", 1, "--quiet", "--out", tmp_path / "vote")
    invoke(*words, "--set", "method.knn-dpfl.student_steps=20")
    assert read_randomness(open_ledger(tmp_path / "vote" / "ledger.jsonl")) == "seed"
    assert set(compose([read_books(run), read_books(tmp_path / "vote")])[1].values()) == {math.inf}


def test_compose__a_seeded_run_that_released_nothing_adds_nothing(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(path, Budget(1.0, 1e-2, "pld", 3), randomness="seed")
    assert unprotected([read_books(run), read_books(path)]) is None


def test_ledger__its_first_line_records_the_source_of_the_noise(run: Path, seeded: Path) -> None:
    recorded = [read_randomness(open_ledger(path / "ledger.jsonl")) for path in (run, seeded)]
    assert recorded == ["operating system", "seed"]


def test_verify__a_seeded_run_is_not_stated_as_private(seeded: Path) -> None:
    assert verify(seeded) == []
    assert "not private: seeded noise (with secret noise: ε = " in invoke("ledger", "verify", seeded)


def rewritten(path: Path, **changes: object) -> None:
    """The same ledger with another first line, every hash recomputed, as someone would who lies."""
    bodies = [link.body for link in Chain(path).read()]
    path.unlink()
    with Chain(path).writing() as chain:
        for body in [bodies[0] | changes, *bodies[1:]]:
            chain.append({key: value for key, value in body.items() if value is not None})


def test_verify__a_ledger_that_claims_the_operating_system_beside_a_seed_is_found(seeded: Path, tmp_path: Path) -> None:
    lying = Path(shutil.copytree(seeded, tmp_path / "run"))
    rewritten(lying / "ledger.jsonl", randomness="operating system")
    assert "the ledger says that its noise came from the operating system, config.json has a seed" in verify(lying)
    assert read_books(lying).randomness == "seed"


def test_verify__a_summary_or_total_that_hides_the_seed_is_found(seeded: Path, run: Path, tmp_path: Path) -> None:
    lying = Path(shutil.copytree(seeded, tmp_path / "run"))
    invoke("statement", lying, "--also", run)
    assert verify(lying) == []
    for name in ("summary.json", "statement.json"):
        whole = json.loads((lying / name).read_text())
        told = {"summary.json": {"privacy": whole.get("privacy", {}) | {"warning": None}},
                "statement.json": {"total": {"delta": 0.01, "epsilon": {"pld": 1.0, "rdp": None}}}}  # fmt: skip
        (lying / name).write_text(json.dumps(whole | told[name]))
    assert "summary.json does not say that the noise came from a seed" in verify(lying)
    assert "statement.json adds this run, whose noise came from a seed" in " ".join(verify(lying))


def as_written_by_0_1(path: Path) -> None:
    """Take the source of the noise out of a ledger's first line: version 0.1 did not write it."""
    rewritten(path, randomness=None)


def test_old_ledger__the_source_of_its_noise_is_read_from_config_json(copy: Path, seeded: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(seeded, tmp_path / "old"))
    for path in (copy, old):
        as_written_by_0_1(path / "ledger.jsonl")
    assert [read_books(path).randomness for path in (copy, old)] == ["operating system", "seed"]
    assert math.isinf(compose([read_books(copy), read_books(old)])[1]["pld"] or 0)


def test_old_ledger__without_config_json_the_total_is_infinite_and_says_why(run: Path, copy: Path) -> None:
    as_written_by_0_1(copy / "ledger.jsonl")
    (copy / "config.json").unlink()
    assert read_books(copy).randomness == "unknown"
    assert "1 run did not record where the noise came from" in (unprotected([read_books(run), read_books(copy)]) or "")
    assert "where its noise came from is not recorded" in invoke("ledger", "show", copy)


def test_old_ledger__its_statement_says_that_noise_was_in_floats(run: Path, copy: Path) -> None:
    as_written_by_0_1(copy / "ledger.jsonl")
    words = "NOT against someone with the exact released numbers: version 0.1 added noise in floating point"
    assert words in read_statement(copy).one_line()
    assert words not in read_statement(run).one_line()
    assert any("docs/privacy.md, Before version 0.2" in line for line in read_statement(copy).facts()["not_protected"])


def test_old_ledger__its_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped under version 0.1, whose ledgers begin without a source of randomness; ended by this one."""

    def stop(row: dict[str, object]) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    write = ledgers._first_line
    monkeypatch.setattr(ledgers, "_first_line", lambda budget, about, source, subject: write(budget, about, None, None))
    config = Config(rounds=4, noise_multiplier=2.0, sample_rate=0.05, clients=100)
    with pytest.raises(KeyboardInterrupt):
        train(config, out=tmp_path / "run", watch=stop)
    monkeypatch.undo()
    assert b"randomness" not in (tmp_path / "run" / "ledger.jsonl").read_bytes()
    assert resume(tmp_path / "run").summary["status"] == "complete"
    assert verify(tmp_path / "run") == []


def test_ledger__of_a_run_without_a_seed_is_not_continued_with_one(tmp_path: Path) -> None:
    budget = Budget(1.0, 1e-2, "pld", 3)
    Ledger(tmp_path / "l.jsonl", budget, randomness="operating system")
    Ledger(tmp_path / "l.jsonl", budget, randomness="operating system")
    with pytest.raises(PrivacyError, match="noise from the operating system, not from a seed"):
        Ledger(tmp_path / "l.jsonl", budget, randomness="seed")


def test_show__a_folder_without_a_ledger_is_one_line(tmp_path: Path) -> None:
    assert "has no ledger" in invoke("ledger", "show", tmp_path, status=2)
