"""`fedblur plan --min-separation`: kinds of noise at one epsilon, and what each assumes of whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from fedblur.cli.plan import plan
from fedblur.core.errors import ConfigError
from fedblur.privacy.accounting import ZERO_OUT, ZERO_OUT_IN_GROUP, calibrate, epsilon
from fedblur.privacy.events import BltNoise, CyclicSampled, Gaussian, MinSeparated, PoissonSampled, ToeplitzNoise
from fedblur.training.noise_comparison import CYCLIC, POISSON, SEPARATED, Comparison, Question, compare

app = typer.Typer()
app.command("plan")(plan)
SMALL = ["--clients", "400", "--sample-rate", "0.05", "--rounds", "60", "--min-separation", "12"]


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def small() -> Comparison:
    return compare(Question(400, 0.05, 60, 4.0, 12, delta=1e-4))


@pytest.mark.parametrize("mechanism", ["tree", "banded", "blt", "gaussian"])
def test_plan__json_has_noise_against_independent_noise_and_what_it_assumes(mechanism: str) -> None:
    answer = json.loads(call(*SMALL, "--epsilon", "4", "--mechanism", mechanism, "--json"))
    assert answer["mechanism"]["name"] == mechanism
    assert answer["noise_multiplier"] > 0
    assert answer["sensitivity"] >= 5**0.5  # five rounds of one client, at least
    assert "no client take part twice within 12 rounds" in answer["assumes"]
    assert ("noise of all rounds stays secret" in answer["assumes"]) == (mechanism != "gaussian")
    assert answer["adjacency"] == ZERO_OUT
    by_name = {each["name"]: each for each in answer["compared"]}
    assert list(by_name) == [POISSON, SEPARATED, "tree", "banded", "blt", CYCLIC]
    for other, ratio in answer["noise_in_final_model_over"].items():
        assert ratio == answer["noise_in_final_model"] / by_name[other]["noise_in_final_model"]
    assert answer["recommendation"]


def test_plan__table_words_and_plot(tmp_path: Path) -> None:
    text = call(*SMALL, "--epsilon", "4", "--mechanism", "blt", "--plot", str(tmp_path / "noise.png"))
    for words in (
        "blt *",
        "independent, separated",
        "Assumed for tree; banded; blt",
        "take banded",
        "20 of them a round",
    ):
        assert words in text
    assert (tmp_path / "noise.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mechanism", "blt"], "give --min-separation"),
        (["--min-separation", "12", "--mechanism", "ddgauss"], "does not go with --min-separation"),
        (["--min-separation", "12", "--mechanism", "skellam"], "does not go with --min-separation"),
        (["--min-separation", "12", "--sampling", "fixed"], "--sampling fixed does not go with"),
        (["--min-separation", "12", "--recipe", "best"], "--recipe does not go with"),
        (["--min-separation", "25"], "need 500 clients, and there are 400"),
        (["--min-separation", "12", "--server", "sdg"], "server 'sdg' is unknown"),
        (["--min-separation", "0"], "sampling.rounds=0"),
        (["--at-most", "3"], "are for --min-separation"),
        (["--min-separation", "12", "--at-most", "-1"], "sampling.at_most=-1"),
    ],
)
def test_plan__bad_input_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        call("--clients", "400", "--sample-rate", "0.05", "--rounds", "60", "--epsilon", "4", *arguments)
    assert "\n" not in str(caught.value)


def test_plan__needs_a_finite_epsilon_and_the_basics() -> None:
    for arguments, message in (
        (["--noise-multiplier", "2"], "give --epsilon and no σ"),
        (["--epsilon", "inf"], "leaves no noise to compare"),
    ):
        with pytest.raises(ConfigError, match=message):
            call(*SMALL, *arguments)
    with pytest.raises(ConfigError, match="--clients is missing"):
        call("--min-separation", "12", "--epsilon", "4")


def test_compare__each_kind_meets_the_target_by_its_own_event(small: Comparison) -> None:
    def spent(name: str) -> float:
        choice: Any = small.named(name)
        sigma, matrix = choice.noise_multiplier, choice.matrix
        event = {
            POISSON: lambda: PoissonSampled(0.05, Gaussian(sigma)),
            SEPARATED: lambda: MinSeparated(12, 0, "", Gaussian(sigma)),
            "banded": lambda: MinSeparated(12, 0, "", ToeplitzNoise(sigma, matrix.coefficients)),
            "blt": lambda: MinSeparated(12, 0, "", BltNoise(sigma, matrix.decays, matrix.weights)),
            CYCLIC: lambda: CyclicSampled(12, 12 * 0.05, "", ToeplitzNoise(sigma, matrix.coefficients)),
        }[name]()
        return epsilon(event, 60, 1e-4)

    for name in (POISSON, SEPARATED, "banded", "blt", CYCLIC):
        assert 3.99 < spent(name) <= 4.0


def test_compare__noise_in_the_final_model_is_that_of_the_whole_sum(small: Comparison) -> None:
    """With plain steps the model is the sum of all rounds: ‖C⁻ᵀ1‖ by solving, times σS/pN."""
    for choice in small.choices:
        inverse = np.linalg.inv(choice.matrix.matrix(60))
        noise = choice.noise_multiplier * 0.1 / 20 * np.linalg.norm(small.weights[-1] @ inverse)
        assert choice.final_noise == pytest.approx(noise, rel=1e-9)
        assert small.over_rounds(choice.name, [1, 60])[-1] == pytest.approx(choice.final_noise, rel=1e-9)
    alone = calibrate(Gaussian, 5, 4.0, 1e-4)
    assert small.named(SEPARATED).noise_multiplier == alone
    assert small.named(SEPARATED).final_noise == pytest.approx(alone * 0.1 / 20 * 60**0.5, rel=1e-9)


def test_compare__only_coins_hide_who_takes_part(small: Comparison) -> None:
    assert {choice.name for choice in small.choices if choice.coins} == {POISSON, CYCLIC}
    assert small.named(CYCLIC).adjacency == ZERO_OUT_IN_GROUP
    assert "coin" in small.named(CYCLIC).assumes
    assert small.best_without_coins.name in ("tree", "banded", "blt")


def test_compare__one_round_has_nothing_to_correlate() -> None:
    answer = compare(Question(400, 0.05, 1, 4.0, 12, delta=1e-4))
    assert "correlated noise brings nothing here" in answer.recommendation[0]
