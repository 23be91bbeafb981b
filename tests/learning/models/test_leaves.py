"""Features of patches: constants, of drawings alone, the same for an image and its mirror image."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedblur
from fedblur import federation_from_arrays
from fedblur.core.errors import ConfigError, ModelError
from fedblur.learning.models import Leaves, make_model
from fedblur.learning.models.fixed_features import Fronted, computed_ahead
from fedblur.learning.models.leaves import FAINT, PATCH, THRESHOLD, WEIGHTS
from fedblur.learning.module_function import Layout, initial_vector

ROOT = Path(__file__).resolve().parents[3]
SHAPE = (3, 32, 32)


def surfaces(count: int, side: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Stripes and spots in random colours: two classes that any feature of patches tells apart."""
    dice = np.random.default_rng(0)
    y = dice.integers(0, 2, count)
    rows, columns = np.mgrid[:side, :side][:, None] + dice.integers(0, 6, (2, count, 1, 1))
    pattern = np.where(y[:, None, None] == 1, rows % 6 < 3, (rows % 6 < 3) & (columns % 6 < 3))
    colours = dice.integers(0, 256, (2, count, 3, 1, 1))
    return np.where(pattern[:, None], *colours).astype(np.uint8), y


def front_of(channels: int = 256) -> torch.nn.Module:
    module = make_model(Leaves(channels), SHAPE, 10, seed=0)
    assert isinstance(module, Fronted)
    return module.front


def images(count: int) -> torch.Tensor:
    return torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(0))


def test_leaves__only_the_head_is_in_the_vector() -> None:
    module = make_model(Leaves(channels=64), SHAPE, 10, seed=0)
    assert Layout.of(module).names == ("rest.head.weight", "rest.head.bias")
    assert initial_vector(module).numel() == 10 * (4 * 64 + 1)
    assert not list(module.buffers())


def test_leaves__features_are_the_pooled_responses_of_whitened_patches() -> None:
    front, x = front_of(), images(2)
    cut = torch.nn.functional.unfold(x, PATCH).transpose(1, 2)  # [images, places, values]
    cut = cut - cut.mean(-1, keepdim=True)
    cut = cut / (cut.var(-1, keepdim=True) + FAINT).sqrt()
    with np.load(WEIGHTS) as file:
        filters, bias = (torch.from_numpy(file[name]).float() for name in ("filters", "bias"))
    answers = [(cut @ each.flatten(1).T + bias).view(2, 27, 27, -1) for each in (filters, filters.flip(-1))]
    halves = (slice(0, 14), slice(13, 27))
    quarters = [(i, j) for i in range(2) for j in range(2)]
    expected = []
    for sign in (1, -1):
        there = [torch.relu(sign * answer - THRESHOLD) for answer in answers]
        cells = [
            (there[0][:, halves[i], halves[j]].mean((1, 2)) + there[1][:, halves[i], halves[1 - j]].mean((1, 2))) / 2
            for i, j in quarters
        ]
        expected.append(torch.stack(cells, -1))
    torch.testing.assert_close(front.responses(x), torch.cat(expected, 1), atol=2e-4, rtol=1e-3)


def test_leaves__a_mirrored_image_has_the_same_features() -> None:
    front, x = front_of(), images(3)
    torch.testing.assert_close(front(x.flip(-1)), front(x), atol=1e-3, rtol=1e-3)
    assert float((front(x.flip(-2)) - front(x)).norm()) > 0.1 * float(front(x).norm())


def test_leaves__brightness_and_contrast_hardly_matter_but_colour_does() -> None:
    front, x = front_of(), images(3)
    same, other = front(0.2 + 0.6 * x), front(x.flip(1))
    assert float((same - front(x)).norm()) < 0.05 * float((other - front(x)).norm())


def test_leaves__features_computed_ahead_give_the_same_logits() -> None:
    x, y = surfaces(30)
    data = federation_from_arrays(x, y, np.arange(30) % 10, test_x=x[:10], test_y=y[:10])
    module = make_model(Leaves(channels=8), SHAPE, 2, seed=0)
    torch.nn.init.normal_(module.rest.head.weight)
    rest, mapped = computed_ahead(module, data, (), torch.device("cpu"))
    assert mapped.train.shape == (32,)
    torch.testing.assert_close(rest(mapped.test.x), module(data.test.x.float() / 255), atol=1e-4, rtol=1e-4)


def test_leaves__grey_images_and_other_sizes_are_read() -> None:
    grey = make_model(Leaves(channels=8), (1, 48, 40), 10, seed=0)
    assert grey(torch.rand(2, 1, 48, 40)).shape == (2, 10)
    x = images(2)[:, :1]
    torch.testing.assert_close(front_of()(x), front_of()(x.expand(-1, 3, -1, -1)))


def test_leaves__a_run_trains_the_head_and_returns_the_whole_model(tmp_path: Path) -> None:
    x, y = surfaces(120)
    data = federation_from_arrays(x[:90], y[:90], np.arange(90) % 30, test_x=x[90:], test_y=y[90:])
    config = fedblur.Config(
        model="leaves", epsilon=float("inf"), clip_norm=1.0, rounds=8, sample_rate=0.5, seed=0,
        server={"name": "sgd", "learning_rate": 20.0},
    )  # fmt: skip
    run = fedblur.train(config, federation=data, out=tmp_path / "run")
    assert run.accuracy > 0.9
    predicted = run.module(torch.from_numpy(x[90:]).float() / 255).argmax(1)
    assert float((predicted == torch.from_numpy(y[90:])).float().mean()) > 0.9


def test_leaves__misfits_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="one or three channels"):
        make_model(Leaves(), (4, 32, 32), 10, seed=0)
    with pytest.raises(ConfigError, match="channels=0"):
        Leaves(channels=0)


def test_leaves__the_tool_that_made_the_filters_needs_a_seed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["--images", "70", "--patches", "800"]
    made = []
    for name in ("a.npz", "b.npz"):  # in one process, whose random state has moved on
        monkeypatch.setattr(sys, "argv", ["make_leaves.py", *few, "--out", str(tmp_path / name)])
        runpy.run_path(str(ROOT / "tools/make_leaves.py"), run_name="__main__")
        with np.load(tmp_path / name) as file:
            made.append({key: file[key] for key in file.files})
    with np.load(WEIGHTS) as file:
        assert {key: file[key].shape for key in file.files} == {key: value.shape for key, value in made[0].items()}
    assert all(np.array_equal(made[0][key], made[1][key]) for key in made[0])
