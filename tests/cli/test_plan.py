"""`fedblur plan` from the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fedblur.cli.plan import plan
from fedblur.core.errors import ConfigError

app = typer.Typer()
app.command("plan")(plan)
PAPER = ["--clients", "3400", "--sample-rate", "0.04", "--rounds", "1000"]


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_plan__json_of_the_papers_setting() -> None:
    answer = json.loads(call(*PAPER, "--epsilon", "2", "--delta", "1/N", "--json"))
    assert answer["noise_multiplier"]["pld"] == pytest.approx(2.178, rel=5e-3)
    assert answer["noise_multiplier"]["rdp"] == pytest.approx(2.382, rel=5e-3)
    assert answer["clients"] == 3400
    assert answer["sample_rate"] == 0.04
    assert answer["rounds"] == 1000
    assert answer["delta"] == pytest.approx(1 / 3400)
    assert answer["epsilon"] == {"pld": 2.0, "rdp": 2.0}
    assert answer["expected_cohort"] == pytest.approx(136)
    assert answer["noise_norm"] == pytest.approx(1.616, abs=0.002)
    assert answer["signal_to_noise"]["pld"] == pytest.approx(1.96, abs=0.005)
    assert answer["advice"]


def test_plan__table_in_plain_words() -> None:
    text = call(*PAPER, "--noise-multiplier", "2.178", "--clip-norm", "0.03")
    for words in (
        "PLD",
        "RDP",
        "2.178",
        "136 ± 11.4",
        "add or remove one client",
        "1,018,174 parameters",
        "R = 1.96",
    ):
        assert words in text


def test_plan__fixed_size_shows_a_dash_for_pld() -> None:
    text = call(*PAPER, "--epsilon", "8", "--sampling", "fixed")
    assert "–" in text
    assert "replace one client" in text


def test_plan__no_noise_is_valid_json() -> None:
    answer = json.loads(call(*PAPER, "--epsilon", "inf", "--json"))
    assert answer["noise_multiplier"]["pld"] == 0
    assert float(answer["epsilon"]["pld"]) == math.inf


def test_plan__size_of_a_named_model() -> None:
    shape = ["--shape", "1,28,28", "--classes", "62", "--json"]
    answer = json.loads(call(*PAPER, "--noise-multiplier", "50", "--model", "logistic", *shape))
    assert answer["parameters"] == 28 * 28 * 62 + 62


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "exactly one of epsilon and noise_multiplier"),
        (["--epsilon", "2", "--noise-multiplier", "1"], "exactly one of epsilon and noise_multiplier"),
        (["--epsilon", "2", "--delta", "tiny"], "delta='tiny'"),
        (["--epsilon", "2", "--sampling", "bernoulli"], "sampling 'bernoulli' is unknown"),
        (["--epsilon", "2", "--model", "cnn"], "needs --shape and --classes"),
        (["--epsilon", "2", "--model", "cnn", "--parameters", "9"], "keep one"),
        (["--epsilon", "2", "--shape", "1,2,3"], "--model"),
        (
            ["--epsilon", "2", "--model", "cnn", "--shape", "a,b", "--classes", "3"],
            "--shape=a,b must be whole numbers",
        ),
        (["--epsilon", "2", "--parameters", "0"], "parameters=0"),
    ],
)
def test_plan__bad_input_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        call(*PAPER, *arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sampling", ["poisson", "full"])
def test_plan__plot_is_written(tmp_path: Path, sampling: str) -> None:
    rate = "1" if sampling == "full" else "0.2"
    setting = ["--clients", "50", "--sample-rate", rate, "--rounds", "20", "--sampling", sampling]
    call(*setting, "--epsilon", "0.5", "--plot", str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_plan__plot_refuses_what_it_cannot_draw(tmp_path: Path) -> None:
    small = ["--clients", "50", "--sample-rate", "1", "--rounds", "2", "--sampling", "full"]
    with pytest.raises(ConfigError, match="must end in"):
        call(*small, "--epsilon", "4", "--plot", str(tmp_path / "plan.xyz"))
    with pytest.raises(ConfigError, match="epsilon=inf leaves nothing to plot"):
        call(*small, "--epsilon", "inf", "--plot", str(tmp_path / "plan.png"))
