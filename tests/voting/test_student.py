"""The pool, the two views of a sample, and the student: public data only, and each stage is reproducible."""

import math
from dataclasses import replace

import pytest
import torch

from fedblur.core.errors import ConfigError
from fedblur.core.registry import build
from fedblur.core.rng import Seeded
from fedblur.learning.models import make_model
from fedblur.learning.module_function import Layout, as_function, initial_vector
from fedblur.voting.release import UNANSWERED
from fedblur.voting.setup import reserve
from fedblur.voting.student import Student, Trainer, TrainingSet, strong, weak
from tests.worlds import packed

ONE = torch.tensor(1.0)


def settings(**changes):
    return build("method", {"name": "ae-dpfl", **changes})


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- the pool ---


def test_pool__reserved_clients_do_not_vote_and_nobody_is_lost() -> None:
    population = packed([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
    pool = reserve(population, settings(pool_share=0.3), seed=0)
    assert pool.reserved == 3
    reserved = sorted({*range(10)} - {*pool.voters.tolist()})
    assert len(reserved) == 3
    own = torch.cat([population.x[population.starts[c] : population.starts[c] + population.sizes[c]] for c in reserved])
    assert sorted(pool.x.sum((1, 2, 3)).tolist()) == sorted(own.sum((1, 2, 3)).tolist())
    sizes = population.sizes[pool.voters]
    assert bool((sizes[1:] >= sizes[:-1]).all())


def test_pool__labels_are_dropped() -> None:
    population = packed([5] * 10)
    before = reserve(population, settings(), seed=0)
    population.y.zero_()
    after = reserve(population, settings(), seed=0)
    assert torch.equal(before.x, after.x)
    assert torch.equal(before.voters, after.voters)


def test_pool__follows_the_data_seed_alone() -> None:
    population = packed([5] * 10)
    a, b, c = (reserve(population, settings(), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(a.x, b.x)
    assert not torch.equal(a.x, c.x)


@pytest.mark.parametrize(
    ("changes", "queries", "checks"),
    [
        ({}, 50, 0),
        ({"queries": 90}, 90, 0),
        ({"threshold": 0.5}, 50, 100),
        ({"threshold": 0.5, "queries": 20}, 20, 40),
        ({"threshold": 0.5, "queries": 80}, 80, 100),
        ({"threshold": 0.5, "queries": 20, "checks": 30}, 20, 30),
    ],
)
def test_pool__counts_of_queries_and_checks(changes, queries: int, checks: int) -> None:
    pool = reserve(packed([20] * 10), settings(pool_share=0.5, **changes), seed=0)
    assert (pool.queries, pool.checks, pool.asked) == (queries, checks, max(queries, checks))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": 200}, "queries=200 but the public pool has 100 samples; lower it or raise pool_share=0.5"),
        ({"pool_share": 0.99}, "pool_share=0.99 of 10 clients leaves none to vote"),
        ({"threshold": 0.5, "checks": 30}, "checks=30 must be at least queries=50"),
    ],
)
def test_pool__too_much_is_refused(changes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reserve(packed([20] * 10), settings(**{"pool_share": 0.5, **changes}), seed=0)


# --- two views ---


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 8, 8), (3, 32, 32), (60,)])
def test_views__keep_shape_and_are_reproducible(shape) -> None:
    x = packed([20], shape=shape).x
    for view in (weak, lambda x, g: strong(x, ONE, g)):
        assert view(x, dice()).shape == x.shape
        assert torch.equal(view(x, dice(3)), view(x, dice(3)))
        assert bool(torch.isfinite(view(x, dice())).all())


def test_weak__moves_images_by_at_most_a_pixel_of_28() -> None:
    x = torch.zeros(200, 1, 28, 28)
    x[:, 0, 14, 14] = 1
    at = weak(x, dice()).nonzero()[:, 2:] - 14
    assert len(at) == 200
    assert int(at.abs().max()) == 1
    assert len({tuple(row) for row in at.tolist()}) == 9


def test_strong__disturbs_more_than_weak() -> None:
    x = packed([50], shape=(1, 28, 28)).x
    change = [float((view - x).norm()) for view in (weak(x, dice()), strong(x, x.std(), dice()))]
    assert change[1] > change[0] > 0


def test_strong__cuts_a_square_out() -> None:
    x = torch.ones(100, 1, 28, 28)
    missing = (strong(x, torch.tensor(0.0), dice()) == 0).flatten(1).double().mean(1)
    assert 0.02 < float(missing.median()) < 0.4


# --- the student ---


def course(labels: torch.Tensor, x: torch.Tensor, **changes) -> tuple[Trainer, Student]:
    module = make_model(build("model", "mlp"), tuple(x.shape[1:]), 10, 0).train()
    lessons = TrainingSet.of(x, labels)
    layout = Layout.of(module)
    return Trainer(as_function(module), layout, lessons, settings(**changes)), Student.at(initial_vector(module))


def accuracy(taught: Trainer, student: Student, x: torch.Tensor, y: torch.Tensor) -> float:
    return float((taught.forward(taught.layout.unflatten(student.theta), x).argmax(1) == y).double().mean())


def test_lessons__unanswered_samples_join_the_rest() -> None:
    lessons = TrainingSet.of(packed([10]).x, torch.tensor([3, UNANSWERED, 5, 1]))
    assert lessons.labelled.tolist() == [0, 2, 3]
    assert lessons.labels.tolist() == [3, 5, 1]
    assert lessons.rest.tolist() == [1, 4, 5, 6, 7, 8, 9]


def test_student__learns_from_labels() -> None:
    world = packed([200])
    taught, student = course(world.y[:60], world.x, student_steps=60)
    student = taught.train(student, 60, Seeded.root(0))
    assert accuracy(taught, student, world.x, world.y) > 0.9


def test_student__the_rest_of_the_pool_helps() -> None:
    """Three labels a class and classes that overlap: what the student is sure of teaches it more."""
    world = packed([600], seed=4)
    x = world.x + 1.2 * torch.randn(world.x.shape, generator=dice(1))
    scores = {}
    for weight in (0.0, 1.0):
        taught, student = course(world.y[:30], x, student_steps=120, consistency=weight, confidence=0.8)
        scores[weight] = accuracy(taught, taught.train(student, 120, Seeded.root(0)), x[30:], world.y[30:])
    assert scores[1.0] > scores[0.0] + 0.02


def test_student__goes_on_as_if_it_had_never_stopped() -> None:
    world = packed([100])
    taught, student = course(world.y[:40], world.x, student_steps=20)
    whole = taught.train(student, 20, Seeded.root(0))
    parts = taught.train(taught.train(student, 7, Seeded.root(0)), 20, Seeded.root(0))
    assert torch.equal(whole.theta, parts.theta)


def test_student__a_pool_that_is_all_labelled_has_no_rest() -> None:
    world = packed([30])
    taught, student = course(world.y, world.x, student_steps=5)
    assert bool(torch.isfinite(taught.train(student, 5, Seeded.root(0)).theta).all())


def test_student__looks_at_no_label_that_was_not_released() -> None:
    world = packed([60])
    taught, student = course(world.y[:30], world.x, student_steps=5)
    lessons = replace(taught.data, x=torch.cat([world.x[:30], torch.full_like(world.x[30:], math.nan)]))
    plain = replace(taught, data=lessons, settings=settings(student_steps=5, consistency=0.0))
    assert bool(torch.isfinite(plain.train(student, 5, Seeded.root(0)).theta).all())


def silent(taught: Trainer, student: Student, x: torch.Tensor) -> bool:
    said = taught.forward(taught.layout.unflatten(student.theta), x).argmax(1)
    return len(said.unique()) == 1


def test_student__steps_that_silence_it_are_taken_again_shorter() -> None:
    """A step that is far too long kills all units of a small network: it then says one class to everything."""
    world = packed([200])
    taught, student = course(world.y[:60], world.x, student_steps=60, student_learning_rate=40.0)
    lost = student
    for step in range(60):  # as if nobody looked
        lost = taught._step(lost, Seeded.root(0).child("student", step))
    assert silent(taught, lost, world.x)
    student = taught.train(student, 60, Seeded.root(0))
    assert student.steps == 60
    assert student.share < 1
    assert not silent(taught, student, world.x)


def test_student__who_was_collapsed_before_or_cannot_be_helped_goes_on_as_it_is() -> None:
    world = packed([100])
    taught, student = course(world.y[:40], world.x, student_steps=10)
    student = replace(student, theta=torch.zeros_like(student.theta))  # one class for everything, from the start
    assert taught.train(student, 1, Seeded.root(0)).share == 1
    wild, student = course(world.y[:40], world.x, student_steps=10, student_learning_rate=1e30)
    assert wild.train(student, 10, Seeded.root(0)).share == 1 / 32
