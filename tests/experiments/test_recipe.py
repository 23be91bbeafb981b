"""Guarantees of recipe = "best": it looks at no data, follows its documented rule, and the user's settings win."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedblur.cli.app import app
from fedblur.core.config import Config, apply_overrides, config_hash, to_dict
from fedblur.core.errors import ConfigError
from fedblur.core.registry import build
from fedblur.data import federation
from fedblur.experiments import recipe
from fedblur.experiments import recipe_presets as families
from fedblur.experiments.recipe import choose, configure
from fedblur.experiments.recipe_presets import ENOUGH_OF_LIMIT, LARGEST_COHORT
from fedblur.training.setup import plan_for
from fedblur.training.summary import signal_to_noise

EVERY = [
    ("emnist", None), ("femnist", 3200), ("mnist", 480), ("cifar10", 5000), ("digits", None), ("synthetic", None),
    ("plays", 805),
]  # fmt: skip


def table(**settings: Any) -> dict[str, Any]:
    return {"recipe": "best", **settings}


@pytest.mark.parametrize(("dataset", "clients"), EVERY)
@pytest.mark.parametrize("epsilon", [2.0, 8.0])
def test_recipe__gives_a_valid_configuration_for_every_data_set_without_its_data(
    dataset: str, clients: int | None, epsilon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a recipe looks at no data")

    monkeypatch.setattr(federation, "load_federation", never)
    for part in federation.build("dataset", dataset).__class__.__mro__[:1]:
        if hasattr(part, "load"):
            monkeypatch.setattr(part, "load", never)
    settings = table(dataset=dataset, epsilon=epsilon) | ({} if clients is None else {"clients": clients})
    config, chosen = configure(settings), choose(settings)
    assert config.server.part_name == ("sgd" if dataset == "plays" else "momentum")
    falls_in_a_line = config.model.part_name in ("glyphs", "leaves", "char_mlp")
    assert config.server.schedule == ("linear" if falls_in_a_line else "cosine")
    assert config.sample_rate * chosen.clients <= LARGEST_COHORT
    plan = plan_for(config, chosen.clients, chosen.parameters)
    assert signal_to_noise(plan, chosen.parameters) == pytest.approx(chosen.signal_to_noise, rel=1e-3)  # R of the run


def test_recipe__is_what_its_settings_are_spelled_out() -> None:
    short = configure(table(dataset="emnist", epsilon=2.0, seed=0))
    long = configure(to_dict(short))
    assert config_hash(short) == config_hash(long)


def test_recipe__takes_the_largest_model_with_enough_signal() -> None:
    small, large = (choose(table(dataset="emnist", epsilon=epsilon)) for epsilon in (1.25, 8.0))
    assert (small.parameters, large.parameters) == (7_998, 15_934)
    assert small.signal_to_noise >= families.CHARACTERS.enough_signal
    sizes = [choose(table(dataset="emnist", epsilon=e)).parameters for e in (0.25, 0.5, 1.0, 2.0, 4.0, math.inf)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 7_998
    assert sizes[-1] == 15_934
    sizes = [choose(table(dataset="cifar10", clients=n, epsilon=2.0)).parameters for n in (500, 1000, 5000)]
    assert sizes == [2_570, 5_130, 10_250]


def test_recipe__shortens_the_server_step_where_noise_would_lead_it() -> None:
    weak = choose(table(dataset="mnist", clients=480, epsilon=2.0))
    assert weak.signal_to_noise < families.CHARACTERS.full_signal
    share = weak.settings["server"]["learning_rate"] / families.CHARACTERS.server_rate
    assert share == pytest.approx(weak.signal_to_noise / families.CHARACTERS.full_signal, rel=5e-3)
    halved = choose(table(dataset="emnist", epsilon=8.0, clip_norm=0.2))
    whole = choose(table(dataset="emnist", epsilon=8.0)).settings["server"]["learning_rate"]
    assert halved.settings["server"]["learning_rate"] == pytest.approx(whole / 2, rel=5e-3)  # S·η_g stays
    fewer = choose(table(dataset="emnist", epsilon=math.inf, rounds=125))
    assert fewer.settings["server"]["learning_rate"] == pytest.approx(8.0)


def test_recipe__raises_the_sample_rate_while_that_raises_the_signal() -> None:
    few = choose(table(dataset="emnist", clients=300, epsilon=8.0, rounds=50)).settings["sample_rate"]
    many = choose(table(dataset="emnist", clients=300, epsilon=8.0, rounds=3000)).settings["sample_rate"]
    assert few > many
    huge = choose(table(dataset="synthetic", clients=20_000, epsilon=2.0))
    assert huge.settings["sample_rate"] * 20_000 == pytest.approx(LARGEST_COHORT)


def test_recipe__lets_the_users_settings_win_and_says_so() -> None:
    given = table(dataset="emnist", epsilon=2.0, clip_norm=0.3, model="gn_cnn", local={"steps": 7}, averaging="ema")
    config, lines = configure(given), choose(given).lines
    assert (config.clip_norm, config.model.part_name, config.averaging.part_name) == (0.3, "gn_cnn", "ema")
    assert (config.local.steps, config.local.batch_size) == (7, 32)
    for key in ("clip_norm", "model", "local", "averaging"):
        assert any(line.startswith(f"{key} = ") and "given by you (the recipe alone:" in line for line in lines)
    assert any(line.startswith("rounds = 840: T; 2,000,000 local steps") for line in lines)


@pytest.mark.parametrize(
    ("dataset", "model", "kind"),
    [
        ("emnist", "leaves", families.PHOTOGRAPHS),
        ("emnist", {"features": 64}, families.CHARACTERS),
        ("emnist", "gn_cnn", families.GREY_NETWORKS),
        ("cifar10", {"channels": 64}, families.PHOTOGRAPHS),
        ("cifar10", "gn_cnn", families.COLOUR_NETWORKS),
        ("synthetic", "char_mlp", families.TEXT),
    ],
)
def test_recipe__the_rest_of_the_rule_follows_a_model_that_is_given(
    dataset: str, model: Any, kind: families.Family
) -> None:
    settings = choose(table(dataset=dataset, clients=5000, epsilon=8.0, model=model)).settings
    assert settings["local"]["steps"] == kind.local_steps
    assert settings["method"] == list(kind.method)


def test_recipe__is_changed_in_part_by_dotted_settings() -> None:
    changed = apply_overrides(
        table(dataset="emnist", epsilon=2.0), ["server.learning_rate=0.7", "model.features=48", "local.steps=2"]
    )
    config = configure(changed)
    assert (config.server.part_name, config.server.learning_rate, config.server.momentum) == ("momentum", 0.7, 0.9)
    assert (config.model.part_name, config.model.features) == ("glyphs", 48)
    assert (config.local.steps, config.local.learning_rate) == (2, 1.0)


def test_recipe__explains_every_choice_in_one_line() -> None:
    chosen = choose(table(dataset="cifar10", clients=5000, epsilon=8.0))
    keys = {"local", "sample_rate", "rounds", "clip_norm", "model", "method", "server", "averaging", "accountant"}
    assert set(chosen.settings) == keys
    assert len(chosen.lines) == len(keys)
    assert all("\n" not in line and ": " in line for line in chosen.lines)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (table(dataset="femnist"), "must know N before femnist"),
        (table(dataset="mnist"), "must know N before mnist"),
        (table(dataset="digits") | {"recipe": "bets"}, "did you mean 'best'"),
    ],
)
def test_recipe__names_what_it_lacks(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configure(settings)
    assert configure({"dataset": "mnist", "recipe": None}) == Config(dataset="mnist")


def test_plan__explains_a_recipe_before_the_noise() -> None:
    result = CliRunner().invoke(app, ["plan", "--recipe", "best", "--dataset", "emnist", "--epsilon", "2"])
    assert result.exit_code == 0
    assert 'model = { name = "glyphs", features = 256 }: for grey images' in result.output
    assert "15,934 parameters" in result.output
    own = ["--shape", "3,32,32", "--classes", "10", "--clients", "5000", "--epsilon", "8", "--rounds", "300"]
    result = CliRunner().invoke(app, ["plan", "--recipe", "best", *own])
    assert "rounds = 300: given by you (the recipe alone: 500)" in result.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--epsilon", "2"], "--clients is missing"),
        (["--clients", "9", "--epsilon", "2"], "--sample-rate is missing"),
        (["--recipe", "best", "--epsilon", "2"], "--recipe needs --dataset, or --shape"),
        (["--recipe", "best", "--shape", "1,28,28", "--classes", "62", "--epsilon", "2"], "needs --clients"),
        (
            ["--recipe", "best", "--dataset", "emnist", "--parameters", "9", "--epsilon", "2"],
            "--recipe chooses the model",
        ),
        (["--recipe", "worst", "--dataset", "emnist", "--epsilon", "2"], "recipe 'worst' is unknown"),
    ],
)
def test_plan__names_what_a_recipe_lacks_in_one_line(flags: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["plan", *flags])
    assert result.exit_code == 2
    assert words in result.output
    assert result.output.count("\n") == 1


def test_run__follows_a_recipe_on_the_command_line(tmp_path: Path) -> None:
    flags = ["--recipe", "best", "--dataset", "digits", "--epsilon", "2", "--rounds", "2", "--seed", "0"]
    result = CliRunner().invoke(app, ["run", *flags, "--out", str(tmp_path / "run"), "-q", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    written = (tmp_path / "run" / "config.json").read_text()
    assert '"schedule": "cosine"' in written
    assert '"recipe"' not in written


def test_page__states_the_numbers_of_the_table() -> None:
    """docs/recipe.md is the rule in words; its numbers are the table's."""
    page = " ".join((Path(__file__).resolve().parents[2] / "docs" / "recipe.md").read_text().split())
    grey, colour, features, text = families.CHARACTERS, families.PHOTOGRAPHS, families.FEATURES, families.TEXT
    own = {name: getattr(grey, name) for name in ("what", "models", "enough_signal", "full_signal")}
    assert replace(colour, **own) == grey  # the page has one set of numbers for images, but for these
    assert (
        f"η_g is {grey.server_rate} (images) or {features.server_rate} (features), {text.server_rate:g} for text"
        in page
    )
    assert f"{grey.rounds} rounds for images, {features.rounds} for features and text" in page
    assert text.rounds == features.rounds
    assert f"{grey.local_steps} step of {grey.local_rate:g} on all that a client has, up to {grey.batch_size}" in page
    assert f"{features.local_steps} steps of {features.local_rate} on batches of {features.batch_size}" in page
    assert f"R/{grey.full_signal:g} (grey images), R/{colour.full_signal:g} (colour images) or" in page
    assert f"or R/{features.full_signal:g} (features) where R is below" in page
    assert f"Text: {text.local_steps} steps of {text.local_rate} on batches of {text.batch_size}" in page
    assert f"Momentum {grey.momentum} (text: none)" in page
    assert not text.momentum
    assert f"for text R/{text.full_signal:g}" in page
    assert text.enough_signal == features.enough_signal
    mine, other = families.GREY_NETWORKS, families.COLOUR_NETWORKS
    assert f"{mine.local_steps} steps of {mine.local_rate}, {mine.rounds} rounds, augmentation" in page
    assert f"R/{mine.full_signal:g} below R = {mine.full_signal:g}) or {other.server_rate} (colour" in page
    assert ", ".join(f"{rate:g}" for rate in families.SAMPLE_RATES) in page
    assert f"{100 * ENOUGH_OF_LIMIT:.0f} % of the R of p = 1, with cohorts of at most {LARGEST_COHORT:.0f}" in page
    assert f"down to {families.FEWEST_ROUNDS}, where p·N·T·Q would pass {families.MOST_WORK:,.0f}" in page
    assert f"**S = {families.CLIP_NORM}.**" in page
    assert f"R ≥ {grey.enough_signal:g} (grey images) or R ≥ {features.enough_signal:g}" in page
    assert colour.enough_signal == features.enough_signal
    for kind, shape, classes in ((grey, (1, 28, 28), 62), (colour, (3, 32, 32), 10), (text, (8,), 36)):
        sizes = [recipe.parameters_of(build("model", model), shape, classes) for model in kind.models]
        assert ", ".join(f"{round(size / 1000)}k" for size in sizes) in page
