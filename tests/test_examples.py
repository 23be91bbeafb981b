"""Every example runs as it stands, in a new folder, and says what it promises."""

import importlib.util
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.commandline import forgotten_parts, invoke
from tests.conftest import REAL_DATA

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run an example as a command in a new folder, in this process, as starting one costs seconds."""

    def script(name: str, *words: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return script


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Examples register parts of their own."""
    with forgotten_parts():
        yield


def example(name: str) -> Any:
    """Return an example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_own_model__is_forty_lines_and_private_with_its_statement(tmp_path: Path, run: Callable[..., str]) -> None:
    assert len((EXAMPLES / "own_model.py").read_text(encoding="utf-8").splitlines()) <= 40
    said = run("own_model.py")
    accuracy, epsilon = map(float, re.search(r"accuracy ([\d.]+) .* epsilon ([\d.]+)", said).groups())  # type: ignore[union-attr]
    assert accuracy > 0.7
    assert epsilon == 4.0
    (statement,) = (tmp_path / "runs").glob("arrays-*/statement.md")
    assert "not private" not in statement.read_text(encoding="utf-8")


def test_own_method__is_used_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line: tests/core/test_plugins.py."""
    monkeypatch.chdir(tmp_path)
    words = ["run", str(EXAMPLES / "own_method.toml"), "--set", "method.project.radius=2", "--rounds", "3", "--quiet"]
    with forgotten_parts():
        assert re.search(r"^status +complete\b", invoke(*words))
    (config,) = (tmp_path / "runs").glob("*/config.json")
    assert '"name": "project"' in config.read_text(encoding="utf-8")


def test_own_method__the_commands_in_its_docstring_are_right() -> None:
    text = (EXAMPLES / "own_method.py").read_text(encoding="utf-8")
    assert "--plugin examples/own_method.py --method project" in text
    assert "fedblur run examples/own_method.toml" in text


def test_ratings__are_divided_within_each_user() -> None:
    ratings = example("ratings")
    data = ratings.stand_in(users=50)
    part = ratings.parts(data.users)
    for user in range(50):
        mine = part[data.users == user]
        assert (mine == ratings.TEST).sum() == len(mine) // 5
        assert (mine == ratings.VALIDATION).sum() == 3 * len(mine) // 10 - len(mine) // 5
    tuned, final = ratings.federation(data, "validation"), ratings.federation(data)
    assert len(final.train.y) == (part != ratings.TEST).sum()  # what validated trains in the end
    assert len(tuned.train.y) + len(tuned.test) == len(final.train.y)
    assert final.test_owners is not None
    assert (final.test_owners.numpy() == data.users[part == ratings.TEST]).all()


@pytest.mark.parametrize("model", ["linear", "linear, one more parameter a title", "linear, own bias and taste"])
def test_ratings__a_user_s_own_parts_stay_and_help(tmp_path: Path, model: str) -> None:
    ratings = example("ratings")
    data = ratings.stand_in(users=100)
    run = ratings.train(data, model, out=tmp_path / "run", rounds=8, sample_rate=0.5, seed=0)
    titles, features = data.features.shape
    own = model == "linear, own bias and taste"
    shared = features + 1 + titles * (model == "linear, one more parameter a title")
    assert run.record.parameters == shared  # a bias and a taste are not among them
    left = data.stars - data.mean_rating[data.titles]  # what the public mean rating does not say
    plain = float(np.sqrt(np.mean(left[ratings.parts(data.users) == ratings.TEST] ** 2)))
    assert (ratings.rmse(run) < 0.8 * plain) == own
    assert ratings.rmse(run) < 1.01 * plain


def test_ratings__local_steps_are_stable_whatever_a_user_rates() -> None:
    """Gradient descent on squared errors converges for steps below 1 / |what a prediction is linear in|²."""
    ratings = example("ratings")
    data = ratings.stand_in(users=30)
    model = ratings.Taste(data, bias=True, tastes=16)
    lengths = model.features.square().sum(1) + 1 + 1 + model.kinds.square().sum(1)  # and two biases
    assert ratings.WITH_OWN_PARTS["local"].learning_rate < 1 / lengths.max()
    everything = ratings.Taste(data, bias=True, tastes=10**6)
    assert everything.kinds.square().sum(1).max() < 1 + 1e-5  # however many directions there are


def test_ratings__of_many_ratings_count_more() -> None:
    ratings = example("ratings")
    data = ratings.stand_in(users=30)
    train = ratings.federation(data, counted=10).train
    sizes = np.bincount(data.users[ratings.parts(data.users) != ratings.TEST])
    assert train.y[:, 1].tolist() == pytest.approx(np.repeat(np.minimum(sizes, 10) / 10, sizes))
    weighted = ratings.loss(torch.tensor([[5.0], [5.0]]), torch.tensor([[7.0, 0.5], [5.0, 1.0]]))
    assert weighted.tolist() == [2.0, 0.0]


def test_next_game__holds_out_a_game_of_each_user_who_has_two() -> None:
    games = example("next_game")
    data = games.stand_in(users=60)
    own = [set(data.games[data.users == user]) for user in range(60)]
    for evaluate, least in (("test", 2), ("validation", 3)):
        train, held = games.histories(data, evaluate)
        assert [game >= 0 for game in held] == [len(each) >= least for each in own]
        assert not any(game in games_of for game, games_of in zip(held, train))
        assert all({*games_of} <= each for games_of, each in zip(train, own))
    _, tests = games.histories(data, "test")
    tuned, _ = games.histories(data, "validation")
    assert not any(game in games_of for game, games_of in zip(tests, tuned))  # a test game is in nothing that tunes
    federation = games.federation(data)
    assert not (federation.train.x == federation.train.y[:, None]).any()
    assert not (federation.test.x == federation.test.y[:, None]).any()


@pytest.mark.parametrize("model", ["popularity and names", "popularity and vectors that begin with names"])
def test_next_game__is_told_by_names(tmp_path: Path, model: str) -> None:
    games = example("next_game")
    data = games.stand_in(users=150)
    run = games.train(data, model, out=tmp_path / "run", rounds=8, sample_rate=0.5, seed=0)
    train, held = games.histories(data, "test")
    count = np.bincount(np.concatenate(train), minlength=len(data.names))
    before = [(np.delete(count, own) > count[game]).sum() for own, game in zip(train, held) if game >= 0]
    assert run.metrics["hit_rate@10"] > 0.1 + (np.array(before) < 10).mean()  # the most popular games
    scores = run.module(torch.tensor([[0, 1] + [len(data.names)] * (games.MOST - 3)]))
    assert (scores[0, :2] == -100).all()  # never again
    assert (scores[0, 2:] > -100).all()


def test_recommendations__the_guide_shows_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import recommendations

    guide = (ROOT / "docs" / "guides" / "recommendations.md").read_text(encoding="utf-8")
    for study in recommendations.STUDIES:
        assert recommendations.table(study, recommendations.RESULTS) in guide
    rows = json.loads(recommendations.RESULTS.read_text(encoding="utf-8"))
    assert all(row["rmse"] < 1.25 for row in rows if row["name"] == "linear, own bias and taste")


def test_recommendations__a_run_that_is_in_the_results_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import recommendations

    asked: list[object] = []

    def study(folder: Path, evaluate: str) -> Iterator[tuple[str, float, int, Callable[[], dict[str, float]]]]:
        for seed in (0, 1):

            def measure(seed: int = seed) -> dict[str, float]:
                asked.append((evaluate, seed))
                return {"rmse": 1.0 + seed, "parameters": 3.0}

            yield "a model", float("inf"), seed, measure

    monkeypatch.setitem(recommendations.STUDIES, "ratings", study)
    kept = tmp_path / "results.json"
    recommendations.run_study("ratings", tmp_path, "validation", kept, None, (0,))
    assert not kept.exists()  # figures on validation data are for tuning
    recommendations.run_study("ratings", tmp_path, "test", kept, None, (0,))
    recommendations.run_study("ratings", tmp_path, "test", kept, None, (0, 1))
    recommendations.run_study("ratings", tmp_path, "test", kept, None, (0, 1))
    assert asked == [("validation", 0), ("test", 0), ("test", 1)]
    assert "| a model | 3 | 1.5000 ± 0.5000 | – | – |" in recommendations.table("ratings", kept)


@pytest.mark.long
@pytest.mark.parametrize("name", ["ratings", "next_game"])
def test_recommendations__run_as_their_docstrings_say(name: str, run: Callable[..., str]) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert f"python examples/{name}.py " in text
    assert "ε = 4.000 at δ" in run(f"{name}.py", "--epsilon", "4")


@pytest.mark.long
def test_ratings__of_real_users_are_below_what_their_own_means_give(tmp_path: Path) -> None:
    """All figures: python -m benchmarks.recommendations."""
    if not (REAL_DATA / "anime_ratings.tsv.gz").exists():
        pytest.skip("the real ratings are not here (../shared/data beside the repository)")
    ratings = example("ratings")
    data = ratings.load(REAL_DATA)
    assert ratings.rmse(ratings.train(data, "linear", out=tmp_path / "shared", epsilon=2.0, seed=0)) < 1.472
    own = ratings.train(data, "linear, own bias and taste", out=tmp_path / "own", epsilon=2.0, seed=0)
    assert ratings.rmse(own) < 1.25


@pytest.mark.long
def test_next_game__of_real_users_is_above_popularity(tmp_path: Path) -> None:
    if not (REAL_DATA / "steam_purchases.tsv.gz").exists():
        pytest.skip("the real purchases are not here (../shared/data beside the repository)")
    games = example("next_game")
    run = games.train(games.load(REAL_DATA), "popularity and names", out=tmp_path / "run", epsilon=2.0, seed=0)
    assert run.metrics["hit_rate@10"] > 0.2522  # popularity without noise


@pytest.fixture
def lora(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))  # it imports ratings.py, as a script beside it does
    torch.manual_seed(0)
    return example("lora_ratings")


def adapted_titles(lora: Any) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """Return a transformer, its adapted last layer on cached states, the tokens of titles and their embeddings."""
    bert, tokens = lora.random_weights(lora.stand_in(users=5, titles=20).texts)
    below, top = lora.hidden_states(bert, tokens, (1, 2))
    words = (tokens > 0).float()
    embeddings = lora.mean_of_words(top, words)
    adapted = lora.Adapted(bert, below, words, embeddings)
    torch.nn.init.normal_(adapted.head.weight)
    return bert, adapted, tokens, embeddings


@torch.no_grad()
def test_lora_ratings__cached_states_give_what_the_whole_transformer_gives(lora: Any) -> None:
    bert, adapted, tokens, _ = adapted_titles(lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    # the adapters are in the transformer's own layer
    whole = bert(tokens, attention_mask=(tokens > 0).long()).last_hidden_state
    wanted = adapted.head(adapted.whiten(lora.mean_of_words(whole, (tokens > 0).float())))
    torch.testing.assert_close(adapted(torch.arange(len(tokens))[:, None]), wanted, rtol=0, atol=1e-4)


def test_lora_ratings__the_tangent_is_lora_to_first_order(lora: Any) -> None:
    _, adapted, tokens, embeddings = adapted_titles(lora)
    numbers = torch.arange(len(tokens))[:, None]
    tangent = lora.Tangent(adapted, embeddings)
    model = tangent.module()
    start = adapted(numbers).detach()
    torch.testing.assert_close(model(numbers).detach(), start, rtol=0, atol=1e-4)
    torch.nn.init.normal_(model[-1].weight[:, embeddings.shape[1] :], std=1e-3)
    told = (model(numbers) - start).detach()
    found = (tangent.put_in(model[-1])(numbers) - start).detach()
    assert told.abs().max() > 1e-4
    assert (found - told).norm() < 0.05 * told.norm()


def test_lora_ratings__runs_on_a_stand_in(
    lora: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, since importing transformers takes seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lora_ratings.py", "--seed", "0", "--through-the-layer"])
    lora.main()
    rows = re.findall(r"^(.+?) +RMSE ([\d.]+)  ε = ([\d.]+)", capsys.readouterr().out, re.MULTILINE)
    rmse = {name: float(figure) for name, figure, _ in rows}
    assert [name for name, _, _ in rows][-2:] == ["LoRA, through the layer", "LoRA"]
    assert [epsilon for _, _, epsilon in rows] == ["8.00", "8.00", "4.00", "4.00", "4.00"]  # the last two: 4 + 4
    assert rmse["frozen embeddings"] < rmse["genres"]


def test_quickstart__has_three_rows_and_make_run_ends_with_the_report_s_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rule = re.search(r"^run:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert rule is not None
    table, report = (line.split("fedblur ")[1].split() for line in rule[1].splitlines())
    assert table == ["table", "examples/quickstart.toml", "--out", "runs/quickstart"]
    assert report == ["report", "runs/quickstart"]
    short = ["--set", "rounds=2", "--set", "eval_every=1"]
    invoke("table", EXAMPLES / "quickstart.toml", *table[2:], *short, "--quiet")
    last = invoke(*report).splitlines()[-1]
    page = (tmp_path / last.removeprefix("Report: ")).read_text(encoding="utf-8")
    for label in ("DP-FedAvg", "DP-FedAvg + BLUR + LUS", "recipe, untuned"):
        assert label in page
