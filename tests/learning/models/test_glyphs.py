"""Fixed features: constants, of drawings alone, computed once and never clipped, noised or sent."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedblur
from fedblur import federation_from_arrays
from fedblur.core.errors import ConfigError, ModelError
from fedblur.core.registry import build
from fedblur.learning.models import Glyphs, fixed_features, make_model
from fedblur.learning.models.fixed_features import Fronted, computed_ahead
from fedblur.learning.models.glyphs import LENGTH, WEIGHTS
from fedblur.learning.module_function import Layout, initial_vector

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


def strokes(count: int, side: int = 28) -> tuple[np.ndarray, np.ndarray]:
    """Upright and lying bars, light on dark: two classes that any feature of writing tells apart."""
    dice = np.random.default_rng(0)
    x, y = np.zeros((count, 1, side, side), np.uint8), dice.integers(0, 2, count)
    for image, label, place in zip(x, y, dice.integers(side // 3, 2 * side // 3, count), strict=True):
        image[0][(slice(4, -4), slice(place, place + 3)) if label else (slice(place, place + 3), slice(4, -4))] = 255
    return x, y


def world(count: int = 240, side: int = 28) -> fedblur.Federation:
    x, y = strokes(count, side)
    return federation_from_arrays(x, y, np.arange(count) % 40, test_x=x[:60], test_y=y[:60])


def test_glyphs__only_the_head_is_in_the_vector() -> None:
    module = make_model(Glyphs(), (1, 28, 28), 62, seed=0)
    assert Layout.of(module).names == ("rest.head.weight", "rest.head.bias")
    assert initial_vector(module).numel() == 62 * 129
    assert not list(module.buffers())


def test_glyphs__features_computed_ahead_give_the_same_logits() -> None:
    data = world()
    module = make_model(Glyphs(features=32), (1, 28, 28), 2, seed=0)
    torch.nn.init.normal_(module.rest.head.weight)
    rest, mapped = computed_ahead(module, data, (), CPU)
    assert mapped.train.shape == (32,)
    torch.testing.assert_close(rest(mapped.test.x), module(data.test.x.float() / 255))
    assert computed_ahead(make_model(Glyphs(features=32), (1, 28, 28), 2, seed=1), data, (), CPU)[1] is mapped
    for other in (Glyphs(features=16), Glyphs(features=32, smoothing=1.0)):
        assert computed_ahead(make_model(other, (1, 28, 28), 2, seed=1), data, (), CPU)[1] is not mapped


def test_glyphs__long_work_ahead_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_features, "_SILENT", 0.0)
    monkeypatch.setattr(fixed_features, "_AT_ONCE", 150)
    said: list[str] = []
    computed_ahead(make_model(Glyphs(features=4), (1, 28, 28), 2, seed=0), world(), (), CPU, said.append)
    assert said == ["features, once: 50 % of 300 samples", "features, once: 80 % of 300 samples"]


def test_glyphs__a_method_that_alters_samples_sees_images() -> None:
    data = world()
    module = make_model(Glyphs(), (1, 28, 28), 2, seed=0)
    same, untouched = computed_ahead(module, data, (build("method", "augment"),), CPU)
    assert same is module
    assert untouched is data


def test_glyphs__dark_on_light_and_other_sizes_are_read_alike() -> None:
    module = make_model(Glyphs(), (1, 28, 28), 2, seed=0)
    assert isinstance(module, Fronted)
    x = torch.from_numpy(strokes(8)[0]).float() / 255
    torch.testing.assert_close(module.front(1 - x), module.front(x), atol=1e-4, rtol=1e-4)
    assert module.front(x[..., ::2, ::2]).shape == (8, 128)


def test_glyphs__a_run_trains_the_head_and_returns_the_whole_model(tmp_path: Path) -> None:
    config = fedblur.Config(
        model="glyphs", epsilon=float("inf"), clip_norm=1.0, rounds=8, sample_rate=0.5, seed=0,
        server={"name": "sgd", "learning_rate": 20.0},
    )  # fmt: skip
    run = fedblur.train(config, federation=world(), out=tmp_path / "run")
    assert run.accuracy > 0.9
    x, y = strokes(60)
    predicted = run.module(torch.from_numpy(x).float() / 255).argmax(1)
    assert float((predicted == torch.from_numpy(y)).float().mean()) > 0.9


def test_glyphs__misfits_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="one channel"):
        make_model(Glyphs(), (3, 32, 32), 10, seed=0)
    with pytest.raises(ConfigError, match="features=0"):
        Glyphs(features=0)
    with pytest.raises(ConfigError, match="smoothing=0"):
        Glyphs(smoothing=0.0)


def test_glyphs__smoothing_holds_weak_components_back_and_keeps_the_length() -> None:
    x = torch.from_numpy(strokes(300)[0]).float() / 255
    alike, held = (make_model(Glyphs(256, smoothing), (1, 28, 28), 2, seed=0) for smoothing in (0.001, 1.0))
    with torch.no_grad():
        spread = [module.front(x).std(0) for module in (alike, held)]
    ratio = spread[1] / spread[0]  # of each component's scale, up to one factor
    assert bool((ratio[:-1] >= ratio[1:] - 1e-4).all())
    assert float(ratio[0] / ratio[-1]) > 5
    with np.load(WEIGHTS) as file:
        axes, variances = (torch.from_numpy(file[name]).float() for name in ("axes", "variances"))
    for module in (alike, held):  # of a drawn glyph: its outputs have these variances along these axes
        scales = (axes * module.front.basis).sum(0)
        assert float((variances * scales**2).sum().sqrt()) == pytest.approx(LENGTH, rel=1e-3)


def test_glyphs__the_tool_that_made_the_weights_needs_a_seed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["--steps", "2", "--classes", "10", "--drawings", "600"]
    made = []
    for path in (tmp_path / "a.npz", tmp_path / "b.npz"):  # in one process, whose random state has moved on
        monkeypatch.setattr(sys, "argv", ["make_glyphs.py", *few, "--out", str(path)])
        runpy.run_path(str(ROOT / "tools/make_glyphs.py"), run_name="__main__")
        with np.load(path) as file:
            made.append({name: file[name] for name in file.files})
    with np.load(WEIGHTS) as file:
        assert {name: file[name].shape for name in file.files} == {name: value.shape for name, value in made[0].items()}
    assert all(np.array_equal(made[0][name], made[1][name]) for name in made[0])
