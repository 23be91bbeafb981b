"""Views of images: seeded by client, step and row alone, the same on every engine, and what they claim to be."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fedblur.accel.compile import Compiled
from fedblur.core.config import LocalTraining
from fedblur.core.errors import ConfigError
from fedblur.core.rng import Seeded
from fedblur.engines import LocalEngine, WorkerEngine
from fedblur.engines.local import numbered
from fedblur.learning.client import LocalProgram, Trained, batched_step, local_update, many_clients, run_steps
from fedblur.learning.methods.augment import Augment, _read_between
from tests.worlds import CPU, SmallCnn, job_for, packed, work_for

SEED, STEP = torch.tensor(7), 3
EVERYTHING = Augment(0.1, 15, 0.1, 0.1, 0.05, flip=True, cutout=0.3, views=3)
SOME = [Augment(), Augment(0.2, flip=True), Augment(0.1, cutout=0.4, views=2), EVERYTHING]


def images(rows: int = 40, channels: int = 2) -> torch.Tensor:
    return torch.rand(rows, channels, 10, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("method", SOME, ids=str)
def test_augment__workers_and_vmap_see_the_same_views(method: Augment) -> None:
    """The vectorised engine pads small clients to the largest batch, workers do not: views must not follow padding."""
    torch.manual_seed(0)
    sizes = [1, 3, 5, 8, 20]
    job, population = job_for(SmallCnn(), (method,), local=LocalTraining(5, 8, 0.1)), packed(sizes)
    ids, results = torch.arange(len(sizes)), []
    for engine in (LocalEngine(population, CPU, True, 16), WorkerEngine(population, 3, workers=2)):
        results.append(torch.cat([block.bounded.value for block in engine.map_clients(job, ids, Seeded.root(0))]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_augment__compiled_steps_see_the_same_views() -> None:
    torch.manual_seed(0)
    job = job_for(SmallCnn(), (EVERYTHING,), local=LocalTraining(2, 8, 0.1))
    shard, work = work_for(job, packed([8, 5]), [0, 1])
    program = LocalProgram(job.forward, job.layout, job.local, job.methods)
    plain = many_clients(program)
    traced = plain._replace(train=partial(run_steps, numbered(Compiled(batched_step(program), "aot_eager")), job.local))
    expected, got = (local_update(job, steps, shard, work) for steps in (plain, traced))
    torch.testing.assert_close(Trained(*got), Trained(*expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", SOME, ids=str)
def test_augment__views_are_new_for_every_client_step_and_row(method: Augment) -> None:
    one = images(1).expand(30, -1, -1, -1)
    views = method.view(one, SEED, STEP)
    assert torch.equal(views, method.view(one, SEED, STEP))
    assert len(torch.unique(views.flatten(1), dim=0)) > 5
    assert not torch.equal(views, method.view(one, SEED + 1, STEP))
    assert not torch.equal(views, method.view(one, SEED, STEP + 1))


@pytest.mark.parametrize("method", SOME, ids=str)
def test_augment__a_row_is_read_by_itself_alone(method: Augment) -> None:
    clean, poisoned = images(), images()
    poisoned[1:] = math.nan
    assert torch.equal(method.view(clean, SEED, STEP)[0], method.view(poisoned, SEED, STEP)[0])


def test_augment__with_nothing_to_do_is_the_identity() -> None:
    assert torch.equal(Augment(shift=0).view(images(), SEED, STEP), images())


def test_augment__shifts_by_whole_pixels_equally_often_in_all_directions() -> None:
    dot = torch.zeros(20_000, 1, 11, 11)
    dot[:, :, 5, 5] = 1.0
    seen = Augment(shift=2 / 11).view(dot, SEED, STEP).sum(0)[0]
    assert float(seen.sum()) == 20_000  # no pixel is lost or blurred
    middle = seen[3:8, 3:8]
    assert float(middle.sum()) == 20_000
    assert float((middle / 800 - 1).abs().max()) < 0.15  # 5 standard deviations of a count of 800


def test_augment__flips_half_of_the_images() -> None:
    both = torch.stack([images(), images().flip(-1)])
    views = Augment(shift=0, flip=True).view(images(), SEED, STEP)
    mirrored = (views == both[1]).flatten(1).all(1)
    assert bool((mirrored | (views == both[0]).flatten(1).all(1)).all())
    assert 8 < int(mirrored.sum()) < 32


def test_augment__reads_between_pixels_as_grid_sample_does() -> None:
    x = images(5)
    place = 16 * torch.rand(2, 5, 120, generator=torch.Generator().manual_seed(1)) - 3
    grid = torch.stack([place[1] / 11 * 2 - 1, place[0] / 9 * 2 - 1], -1).view(5, 10, 12, 2)
    expected = F.grid_sample(x, grid, padding_mode="border", align_corners=True)
    torch.testing.assert_close(_read_between(x, place[0], place[1]), expected, rtol=1e-4, atol=1e-5)


def test_augment__rotation_turns_about_the_centre() -> None:
    """A ring around the centre stays where it is, whatever the angle; a line through it does not."""
    axis = torch.arange(21.0) - 10
    radius = (axis[:, None] ** 2 + axis[None] ** 2).sqrt()
    ring = torch.exp(-((radius - 6) ** 2) / 4).expand(8, 1, 21, 21)
    turned = Augment(shift=0, rotation=170).view(ring, SEED, STEP)
    assert float((turned - ring).abs().max()) < 0.1
    line = torch.exp(-(axis[:, None] ** 2) / 2).expand(8, 1, 21, 21)
    assert float((Augment(shift=0, rotation=170).view(line, SEED, STEP) - line).abs().max()) > 0.5


def test_augment__cuts_a_square_of_the_image_s_mean() -> None:
    x = images()
    views = Augment(shift=0, cutout=0.5).view(x, SEED, STEP)
    changed = views != x
    assert bool(changed.flatten(1).any(1).all())
    assert int(changed[:, 0].flatten(1).sum(1).max()) <= 5 * 6
    mean = x.mean((-1, -2), keepdim=True).expand_as(x)
    assert torch.equal(views[changed], mean[changed])


def test_augment__several_views_are_averaged() -> None:
    """Without anything that disturbs, three views of each sample are as good as one."""
    torch.manual_seed(0)
    module = SmallCnn(dropout=0.0)
    results = []
    for views in (1, 3):
        job = job_for(module, (Augment(shift=0, views=views),), local=LocalTraining(3, 8, 0.1))
        shard, work = work_for(job, packed([5, 8]), [0, 1])
        results.append(local_update(job, many_clients(LocalProgram(*_parts(job))), shard, work).update)
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-6)


def _parts(job):
    return job.forward, job.layout, job.local, job.methods


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"shift": 1.0}, r"method.augment.shift=1.0 must be in \[0, 1\)"),
        ({"rotation": -5}, r"method.augment.rotation=-5 must be in \[0, 180\)"),
        ({"views": 0}, r"method.augment.views=0 must be at least 1"),
    ],
)
def test_augment__settings_out_of_range_are_named(settings, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Augment(**settings)


def test_augment__samples_that_are_no_images_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"samples have shape \[64\]"):
        Augment().view(torch.zeros(3, 64), SEED, STEP)
