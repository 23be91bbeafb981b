"""Text: clients are speakers, test words come after training words, and only parts for text take it."""

import math
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedblur
from fedblur.cli.app import app
from fedblur.core.errors import ConfigError, ModelError
from fedblur.data.plays import LETTERS, Plays, encode, speakers
from fedblur.data.population import Federation, Packed, is_text
from fedblur.experiments.result_store import Results
from fedblur.experiments.table import aggregate
from fedblur.experiments.table_spec import read_spec
from fedblur.learning.models import CharGru, CharMlp, Model, make_model
from fedblur.training.machine import Machine

CONFIG = Path(__file__).resolve().parents[2] / "examples/text.toml"


@pytest.fixture(scope="module")
def plays() -> Federation:
    return fedblur.load_federation("plays")


def test_plays__every_speaker_is_a_client(plays: Federation) -> None:
    names = [name for name, _ in speakers()]
    assert len(names) == len(set(names)) == 894
    assert len({name.split("/")[0] for name in names}) == 37
    assert (plays.train.clients, plays.validation_clients) == (806, 88)
    assert set("".join(text for _, text in speakers())) == set(LETTERS)


def test_plays__a_window_holds_the_characters_before_the_next_one() -> None:
    raw, (_, text) = Plays(window=5, test_share=0.2).load(None), speakers()[0]
    cut = round(0.8 * len(text))
    tokens = encode(text)
    assert is_text(raw.train.x)
    assert raw.train.x[7].tolist() == tokens[2:7].tolist()
    assert int(raw.train.y[7]) == int(tokens[7])
    assert raw.train.x[0].tolist() == [0] * 5  # nothing was said before
    assert int(raw.train.y[cut - 1]) == int(tokens[cut - 1])
    assert raw.test.x[0].tolist() == [0] * 5  # the test part reads nothing from before the cut
    assert int(raw.test.y[0]) == int(tokens[cut])


def test_plays__pieces_have_every_character_once_as_a_target_and_see_those_before_it() -> None:
    raw, (_, text) = Plays(window=7, each=True, test_share=0.2).load(None), speakers()[0]
    tokens, cut = encode(text), round(0.8 * len(text))
    rows = -(-cut // 7)
    mine = raw.train.y[:rows].flatten()
    assert mine[:cut].tolist() == tokens[:cut].tolist()
    assert bool((mine[cut:] == -100).all())
    assert raw.train.x[:rows].flatten()[:cut].tolist() == [0, *tokens[: cut - 1].tolist()]
    assert int(raw.test.x[0, 0]) == 0  # the test part reads nothing from before the cut
    assert raw.owners is not None
    assert int((raw.owners == 0).sum()) == rows
    total = sum(len(words) for _, words in speakers())
    assert int((raw.train.y >= 0).sum() + (raw.test.y >= 0).sum()) == total


def test_plays__pieces_are_divided_by_speaker_and_not_by_label() -> None:
    with pytest.raises(ConfigError, match="partition='dirichlet' goes by each sample's one label"):
        fedblur.load_federation({"name": "plays", "each": True}, partition="dirichlet", clients=20)


def test_plays__test_words_are_none_of_the_training_words(plays: Federation) -> None:
    total = sum(len(text) for _, text in speakers())
    assert isinstance(plays.train, Packed)
    assert plays.validation is not None
    assert int(plays.train.sizes.sum()) + len(plays.validation) + len(plays.test) == total


def frequencies(plays: Federation) -> float:
    """The loss of always giving each character its share: not private, for comparison."""
    assert isinstance(plays.train, Packed)
    shares = (torch.bincount(plays.train.y, minlength=len(LETTERS)) + 1).double()
    return float(-(shares / shares.sum()).log()[plays.test.y].mean())


def test_text__trains_with_user_level_privacy_to_a_better_loss_than_its_start(
    plays: Federation, tmp_path: Path
) -> None:
    """A short run at epsilon = 8 with noise from the operating system; docs/text.md has the full one."""
    from fedblur.core.config import from_dict
    from fedblur.core.plugins import read_config

    config = from_dict(read_config(CONFIG) | {"rounds": 25, "eval_every": 25})
    assert config.epsilon == 8.0
    run = fedblur.train(config, out=tmp_path / "run", machine=Machine(device="cpu"))
    before, by_frequency = math.log(len(LETTERS)), frequencies(plays)
    assert run.summary["privacy"]["warning"] is None
    assert run.epsilon <= 8.0
    assert run.loss < by_frequency - 0.2 < before - 0.7  # 2.6 where the start has 3.58
    assert run.accuracy > 0.2


def test_text_page__its_commands_run_and_its_figures_are_those_of_the_data(plays: Federation, tmp_path: Path) -> None:
    page = (CONFIG.parents[1] / "docs/text.md").read_text(encoding="utf-8")
    commands = re.findall(r"^fedblur ([^\n#]+)", page, re.MULTILINE)
    assert len(commands) == 4
    for number, command in enumerate(commands):
        words = [str(CONFIG) if word == "examples/text.toml" else word for word in command.split()]
        short = ["--rounds", "1", "--set", "local.steps=1", "--out", str(tmp_path / str(number))]
        result = CliRunner().invoke(app, [*words, *(short if words[0] == "run" else [])])
        assert result.exit_code == 0, result.output
    shown = [len(plays.test), math.log(len(LETTERS)), frequencies(plays), plays.train.clients]
    assert all(text in page for text in (f"{shown[0]:,}", f"{shown[1]:.3f}", f"{shown[2]:.3f}", f"1/{shown[3]}"))


def test_text_page__the_recipes_figures_are_those_of_its_table() -> None:
    root = CONFIG.parents[1]
    spec = read_spec(root / "papers/beyond/plays.toml")
    assert spec.results is not None
    found = [line for line in aggregate(spec, Results(spec.results).found) if line.label == "best recipe"]
    page = (root / "docs/text.md").read_text(encoding="utf-8")
    assert [line.seeds for line in found] == [3, 3]
    for line in found:
        assert f"{line.accuracy:.1f} ± {line.spread:.1f} % at ε = {line.axes['epsilon']}" in page


@pytest.mark.parametrize("part", [CharMlp(), CharGru(), CharGru(each=True)], ids=repr)
def test_char_models__start_with_all_characters_alike(part: Model, plays: Federation) -> None:
    model = make_model(part, plays.train.shape, plays.train.classes, seed=0)
    assert not model(plays.test.x[:5].float()).any()


def test_char_gru__is_torchs_own_and_sees_nothing_that_comes_later() -> None:
    torch.manual_seed(0)
    model = cast(Any, make_model(CharGru(hidden=6, embedding=4, each=True), (9,), 36, seed=0))
    torch.nn.init.normal_(model.head.weight)
    torchs = torch.nn.GRU(4, 6, batch_first=True)
    names = {"weight_ih_l0": model.into.weight, "bias_ih_l0": model.into.bias}
    torchs.load_state_dict(names | {"weight_hh_l0": model.within.weight, "bias_hh_l0": model.within.bias})
    x = torch.randint(36, (5, 9))
    states, _ = torchs(model.vectors.weight.T[x])
    torch.testing.assert_close(model(x.float()), model.head(states), rtol=0, atol=1e-6)
    later = x.clone()
    later[:, 6:] = 0
    assert torch.equal(model(x.float())[:, :6], model(later.float())[:, :6])


def test_char_gru__learns_next_tokens_on_both_engines(tmp_path: Path) -> None:
    config = fedblur.Config(
        dataset={"name": "plays", "window": 6, "each": True}, task="next-token",
        model={"name": "char_gru", "hidden": 6, "embedding": 4, "each": True}, clients=40, rounds=2, sample_rate=0.2,
        clip_norm=2.0, seed=0, local=fedblur.LocalTraining(steps=4, batch_size=8, learning_rate=2.0),
    )  # fmt: skip
    runs = [
        fedblur.train(config, out=tmp_path / engine, machine=Machine(engine=engine, device="cpu"))
        for engine in ("vectorised", "sequential")
    ]
    assert runs[0].loss == pytest.approx(runs[1].loss, rel=1e-5)
    assert runs[0].loss < math.log(36)
    assert list(runs[0].metrics) == ["perplexity", "accuracy"]


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"model": "mlp"}, ModelError, 'set model = "char_mlp"'),
        ({"model": "cnn"}, ModelError, 'set model = "char_mlp"'),
        ({"dataset": "digits"}, ModelError, 'set model = "mlp"'),
        ({"method": "augment"}, ConfigError, "moves images"),
        ({"method": "knn-dpfl"}, ConfigError, "use a method of rounds"),
        ({"method": "ae-dpfl"}, ConfigError, "use a method of rounds"),
    ],
)
def test_text__parts_for_images_are_refused_before_anything_is_spent(
    settings: dict[str, str], error: type[Exception], words: str, tmp_path: Path
) -> None:
    config = fedblur.Config(**{"dataset": "plays", "model": "char_mlp", "rounds": 1, **settings})
    with pytest.raises(error, match=words):
        fedblur.train(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_text__has_a_recipe_of_its_own() -> None:
    flags = ["plan", "--recipe", "best", "--dataset", "plays", "--clients", "805", "--epsilon"]
    weak, strong = (CliRunner().invoke(app, [*flags, epsilon]).output for epsilon in ("2", "8"))
    assert 'model = { name = "char_mlp", hidden = 32 }: for text, 3,556 parameters' in weak
    assert 'model = { name = "char_mlp", hidden = 64 }: for text, 6,788 parameters' in strong
    assert "clients have much text" in strong


def test_text__own_tokens_are_read_and_numbers_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y, owners = rng.integers(0, 5, (60, 4)), rng.integers(0, 5, 60), np.arange(60) // 6
    config = fedblur.Config(model="char_mlp", rounds=1, seed=0)
    for kind in (np.int64, np.int32, np.float64):
        data = fedblur.federation_from_arrays(x.astype(kind), y, owners, x[:9].astype(kind), y[:9], classes=5)
        fedblur.train(config, out=tmp_path / kind.__name__, federation=data)
    broken = fedblur.federation_from_arrays(x + 0.5, y, owners, x[:9] + 0.5, y[:9], classes=5)
    below = fedblur.federation_from_arrays(x - 1, y, owners, x[:9] - 1, y[:9], classes=5)
    images = fedblur.federation_from_arrays(x.astype(np.uint8), y, owners, x[:9].astype(np.uint8), y[:9], classes=5)
    for other in (broken, below, images):
        with pytest.raises(ModelError, match="reads text"):
            fedblur.train(config, out=tmp_path / "other", federation=other)
    beyond = fedblur.federation_from_arrays(x * 2, y, owners, x[:9] * 2, y[:9], classes=5)
    with pytest.raises(ModelError, match="reads tokens 0..4"):
        fedblur.train(config, out=tmp_path / "third", federation=beyond)


def test_text__is_shown_and_drawn_like_any_other_data(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["data", "show", "plays", "--plot", str(tmp_path / "plays.svg")])
    assert result.exit_code == 0, result.output
    assert "806" in result.stdout
    assert "<svg" in (tmp_path / "plays.svg").read_text(encoding="utf-8")
