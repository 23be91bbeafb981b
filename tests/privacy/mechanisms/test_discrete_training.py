"""Discrete mechanisms from the command line: plans, runs with their epsilon in the ledger, accuracy as DP-FedAvg."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedblur
from fedblur.cli.app import app
from fedblur.core.config import from_dict, read_toml
from fedblur.data.federation import load_federation
from fedblur.privacy.events import PoissonSampled
from fedblur.privacy.ledger import Budget, Ledger

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/quickstart.toml"
PAPER = ["plan", "--clients", "3400", "--sample-rate", "0.04", "--rounds", "1000", "--clip-norm", "0.03"]


def invoke(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize(("target", "sigma"), [("2", 2.409), ("4", 1.463), ("6", 1.151), ("8", 0.982)])
def test_plan__published_multipliers_of_ddgauss(target: str, sigma: float) -> None:
    answer = json.loads(invoke(*PAPER, "--epsilon", target, "--mechanism", "ddgauss", "--bits", "16", "--json"))
    assert answer["noise_multiplier"] == {"pld": None, "rdp": pytest.approx(sigma, rel=5e-3)}
    assert answer["mechanism"]["bits"] == 16
    assert not any("broken" in line for line in answer["advice"])


def test_plan__12_bits_are_broken_and_the_reason_is_named() -> None:
    answer = json.loads(invoke(*PAPER, "--epsilon", "8", "--mechanism", "ddgauss", "--bits", "12", "--json"))
    assert answer["noise_multiplier"]["rdp"] == pytest.approx(5.169, rel=5e-3)
    line = next(line for line in answer["advice"] if "broken" in line)
    assert "rounding 1,048,576 coordinates lengthens an update" in line
    assert "use 14 bits or more" in line


def test_plan__12_bits_cannot_reach_a_small_epsilon_at_all() -> None:
    message = invoke(*PAPER, "--epsilon", "2", "--mechanism", "ddgauss", "--bits", "12", status=2)
    assert "bits=12 is broken here" in message
    assert "raise bits" in message


def test_plan__bits_are_a_setting_of_discrete_mechanisms_only() -> None:
    assert "bits" in invoke(*PAPER, "--epsilon", "2", "--bits", "16", status=2)


def test_plan__shows_skellam_in_plain_words() -> None:
    text = invoke(*PAPER, "--epsilon", "8", "--mechanism", "skellam")
    assert "skellam noise" in text
    assert "16 bits: 1,048,576 coordinates are sent" in text


@pytest.mark.parametrize("words", [["mechanism=ddgauss"], ["mechanism=skellam"], ["mechanism.mode=exact"]])
def test_run__trains_on_digits_with_its_epsilon_in_the_ledger(tmp_path: Path, words: list[str]) -> None:
    chosen = words if words[0].startswith("mechanism=") else ["mechanism=ddgauss", *words]
    sets = [part for word in [*chosen, "accountant=rdp"] for part in ("--set", word)]
    folder = tmp_path / "run"
    answer = json.loads(invoke("run", *sets, "--rounds", "5", "--seed", "0", "--json", "--out", str(folder)))
    privacy = answer["privacy"]
    assert 0 < privacy["epsilon"] <= 2.0
    assert "secure sum modulo 2^16" in privacy["trust_model"]
    ledger = Ledger(folder / "ledger.jsonl", Budget(2.0, privacy["delta"], "rdp", 5))
    assert ledger.epsilon() == privacy["epsilon"]
    assert [round_ for round_, _ in ledger.spends()] == [1, 2, 3, 4, 5]
    event = ledger.spends()[0][1]
    assert isinstance(event, PoissonSampled)
    assert event.inner.dimension == 672  # 650 values in 21 blocks of 32


def test_run__pld_is_refused_with_the_way_out(tmp_path: Path) -> None:
    message = invoke("run", "--set", "mechanism=ddgauss", "--out", str(tmp_path / "run"), status=2)
    assert 'set accountant = "rdp"' in message
    assert not (tmp_path / "run").exists()


def test_run__goes_together_with_adaptive_clipping_and_masks(tmp_path: Path) -> None:
    config = fedblur.Config(
        rounds=3, seed=0, mechanism="ddgauss", accountant="rdp", clipping="adaptive", mask="random", epsilon=8.0
    )
    run = fedblur.train(config, out=tmp_path / "run")
    assert 0 < run.epsilon <= 8.0


@pytest.mark.long
def test_accuracy__ddgauss_is_as_good_as_dp_fedavg_on_digits(tmp_path: Path) -> None:
    """At the same epsilon by RDP, within the spread of five seeds."""
    example = read_toml(EXAMPLE)
    settings = example["base"] | example["shared"]["tuned"]
    base = from_dict(settings)
    data = load_federation(base.dataset, clients=base.clients, validation_share=0.0, seed=0)
    accuracy: dict[str, list[float]] = {}
    for name in ("gaussian", "ddgauss"):
        config = from_dict(settings | {"mechanism": name, "accountant": "rdp", "eval_every": 100})
        runs = (
            fedblur.train(replace(config, seed=seed), out=tmp_path / f"{name}{seed}", federation=data)
            for seed in range(5)
        )
        accuracy[name] = [run.accuracy for run in runs]
    spread = max(statistics.stdev(values) for values in accuracy.values())
    difference = statistics.mean(accuracy["ddgauss"]) - statistics.mean(accuracy["gaussian"])
    assert abs(difference) <= spread, accuracy
    assert statistics.mean(accuracy["ddgauss"]) > 0.6
