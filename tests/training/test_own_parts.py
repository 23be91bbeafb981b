"""A run names every part that is not FedBlur's, and claims nothing where ε rests on one that is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedblur
from fedblur.cli.app import app
from fedblur.core import registry
from fedblur.core.config import LocalTraining
from fedblur.core.errors import PrivacyError
from fedblur.core.rng import Seeded
from fedblur.learning.methods.base import Method
from fedblur.privacy.claim import SEEDED, UNCLAIMED
from fedblur.privacy.mechanisms.base import Noise, Release
from fedblur.privacy.mechanisms.gaussian import Gaussian
from fedblur.privacy.populations import Limit, Population
from fedblur.privacy.sampling import Sampler
from fedblur.report.statement import read_statement
from fedblur.training.own_parts import UNCHECKED, own_parts
from fedblur.training.round import run_round
from fedblur.training.verify_ledger import compose, read_books, verify
from fedblur.voting.ae_dpfl import AeDpfl
from tests.privacy.test_part_audit import Constant, Doubled, Half, Often, Twice
from tests.training.test_round import first_state, protocol

SHORT = fedblur.Config(
    dataset="digits", clients=40, rounds=2, sample_rate=0.2, epsilon=4.0, local=LocalTraining(steps=1, batch_size=4)
)


@dataclass(frozen=True)
class Nothing(Gaussian):
    """States a Gaussian, and adds no noise."""

    def draw(self, release: Release, rng: Any) -> Noise:
        return super().draw(dataclasses.replace(release, noise_multiplier=0.0), rng)


@dataclass(frozen=True)
class Halved(Half):
    """Half of the noise."""


@dataclass(frozen=True)
class Generous(Doubled):
    """Twice the noise."""


@dataclass(frozen=True)
class SameCohort:
    def sampler(self, clients: int, rate: float) -> Sampler:
        return Constant(clients, rate)


@dataclass(frozen=True)
class MoreOften:
    def sampler(self, clients: int, rate: float) -> Sampler:
        return Often(clients, rate)


@dataclass(frozen=True)
class Plain(Method):
    """Does nothing."""


PARTS: dict[tuple[str, str], type] = {
    ("mechanism", "nothing"): Nothing,
    ("mechanism", "half"): Halved,
    ("mechanism", "generous"): Generous,
    ("sampling", "same"): SameCohort,
    ("sampling", "often"): MoreOften,
    ("method", "plain"): Plain,
}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for (kind, name), part in PARTS.items():
        registry.parts(kind)  # type: ignore[arg-type]
        monkeypatch.setitem(registry._PARTS[kind], name, part)
        monkeypatch.setattr(part, "part_name", name, raising=False)


def stated(run: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((run / "statement.json").read_text())
    return facts


@pytest.mark.parametrize(
    ("kind", "name"),
    [("mechanism", "nothing"), ("mechanism", "half"), ("sampling", "same"), ("sampling", "often")],
    ids=str,
)
def test_dishonest_part__its_run_claims_nothing_anywhere(kind: str, name: str, tmp_path: Path) -> None:
    run = fedblur.train(replace(SHORT, **{kind: name}), out=tmp_path / "run")
    assert run.epsilon == math.inf
    warning = run.record.privacy.warning or ""
    assert warning.startswith(
        f"{UNCLAIMED}: {kind} '{name}' from module {PARTS[kind, name].__module__} is not FedBlur's"
    )
    assert "and its audit failed (" in warning
    assert ("there is none, the sum itself is released" in warning) == (name == "nothing")
    line = read_statement(run.path).one_line()
    assert line == warning
    assert "ε = " not in line
    facts = stated(run.path)
    assert facts["private"] is False
    assert set(facts["epsilon"].values()) == {"inf"}
    assert facts["claims_nothing_because"] in warning
    assert [part["audit"] for part in facts["own_parts"]] == ["failed"]
    assert "No ε is claimed for this run" in (run.path / "statement.md").read_text()
    assert verify(run.path) == []  # the books are in order: they say so themselves
    assert set(compose([read_books(run.path)])[1].values()) == {math.inf}
    out = CliRunner().invoke(app, ["ledger", "verify", str(run.path)]).output
    assert f"claims no ε: {kind} '{name}'" in out
    assert "ε = 4" not in out


def test_noise_free_mechanism__with_a_seed_says_both(tmp_path: Path) -> None:
    run = fedblur.train(replace(SHORT, mechanism="nothing", seed=1), out=tmp_path / "run")
    assert run.record.privacy.warning == SEEDED
    assert run.epsilon == math.inf
    line = read_statement(run.path).one_line()
    assert line.startswith(f"{UNCLAIMED}: mechanism 'nothing'")
    assert line.endswith("; not private either way: seeded noise")
    assert verify(run.path) == []


def test_honest_parts__are_named_with_what_nobody_checked(tmp_path: Path) -> None:
    config = replace(SHORT, mechanism="generous", method=["plain"])
    run = fedblur.train(config, out=tmp_path / "run", module=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    assert run.epsilon <= 4.0
    assert run.record.privacy.warning is None
    kinds = {part.kind: part for part in run.record.privacy.own_parts or ()}
    assert {*kinds} == {"mechanism", "method", "model"}
    assert kinds["mechanism"].audit == "passed"
    assert kinds["method"].audit is None
    line = read_statement(run.path).one_line()
    assert "ledger verified; not FedBlur's: method 'plain' from module tests.training.test_own_parts" in line
    assert "mechanism 'generous' from module tests.training.test_own_parts (audit passed)" in line
    page = (run.path / "statement.md").read_text()
    assert all(UNCHECKED[kind] in page for kind in kinds)
    out = CliRunner().invoke(app, ["ledger", "verify", str(run.path)]).output
    assert all(f"unchecked: {UNCHECKED[kind]}" in " ".join(out.split()) for kind in kinds)


def test_own_parts__of_a_run_with_none_are_none(tmp_path: Path) -> None:
    run = fedblur.train(SHORT, out=tmp_path / "run")
    assert run.record.privacy.own_parts is None
    assert stated(run.path)["own_parts"] == []
    assert "not FedBlur's" not in (run.path / "statement.md").read_text()


def test_every_kind_of_part__says_what_is_unchecked() -> None:
    assert {*registry.KINDS} <= {*UNCHECKED}


def test_verify__audits_again_and_finds_a_claim_that_was_edited(tmp_path: Path) -> None:
    run = fedblur.train(replace(SHORT, mechanism="nothing"), out=tmp_path / "run").path
    summary = json.loads((run / "summary.json").read_text())
    (part,) = summary["privacy"]["own_parts"]
    summary["privacy"] |= {"own_parts": [part | {"audit": "passed"}], "warning": None, "epsilon": 4.0}
    (run / "summary.json").write_text(json.dumps(summary))
    findings = " ".join(verify(run))
    assert "summary.json says that mechanism 'nothing' from module" in findings
    assert "passed its audit; here it failed: " in findings
    assert read_statement(run).one_line().startswith(UNCLAIMED)  # the ledger says it too
    del summary["privacy"]["own_parts"]
    (run / "summary.json").write_text(json.dumps(summary))
    assert any("does not say that mechanism 'nothing'" in finding for finding in verify(run))


def test_verify__demands_that_every_own_part_is_named(tmp_path: Path) -> None:
    run = fedblur.train(replace(SHORT, method="plain"), out=tmp_path / "run").path
    assert verify(run) == []
    summary = json.loads((run / "summary.json").read_text())
    del summary["privacy"]["own_parts"]
    (run / "summary.json").write_text(json.dumps(summary))
    assert any("does not say that method 'plain'" in finding for finding in verify(run))


def test_resume__audits_again(tmp_path: Path) -> None:
    config = replace(SHORT, rounds=4, checkpoint_every=1, mechanism="nothing")

    def stop(row: Any) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedblur.train(config, out=tmp_path / "run", watch=stop)
    done = fedblur.resume(tmp_path / "run", tell=lambda line: None)
    assert done.epsilon == math.inf
    assert done.record.privacy.own_parts


def test_population__with_a_budget_refuses_a_part_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBLUR_POPULATIONS", str(tmp_path / "populations"))
    Population("ward").set_limit(Limit(10.0, 1e-2))
    with pytest.raises(PrivacyError, match="passed no audit"):
        fedblur.train(replace(SHORT, mechanism="nothing", population="ward"), out=tmp_path / "run")


def test_own_parts__a_voting_part_that_runs_itself_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Votes(AeDpfl):
        """Asks in another way."""

    @dataclass(frozen=True)
    class Itself(AeDpfl):
        """Does everything on its own."""

        @property
        def run(self) -> Any:
            return None

    for name, part, audit in (("votes", Votes, None), ("itself", Itself, "not run")):
        monkeypatch.setitem(registry._PARTS["voting"], name, part)
        monkeypatch.setattr(part, "part_name", name)
        (found,) = own_parts(fedblur.Config(method=[name]))
        assert (found.kind, found.audit) == ("voting", audit)
        assert (found.unclaimed is None) == (audit is None)


def test_round__refuses_a_cohort_that_names_a_client_twice(tmp_path: Path) -> None:
    own = protocol(tmp_path)
    sampler = Twice(own.plan.sampler.clients, 0.5)
    own = replace(own, plan=replace(own.plan, sampler=sampler))
    with pytest.raises(PrivacyError, match="names a client twice"):
        run_round(own, first_state(own), Seeded.root(3))
    assert torch.is_tensor(sampler.cohort(Seeded.root(3)))
