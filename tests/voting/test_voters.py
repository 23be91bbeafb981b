"""Contracts of every voting protocol that is registered, and what each electorate does with its own data."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import fedblur
from fedblur.core.errors import ConfigError
from fedblur.core.registry import build, describe, parts
from fedblur.core.rng import Seeded
from fedblur.learning.models import make_model
from fedblur.voting.base import Booth
from fedblur.voting.knn_dpfl import Neighbours, features, public_filters
from tests.worlds import CPU, SmallCnn, packed

VOTING = sorted(parts("voting"))
SIZES = [2, 5, 9, 1]


def booth(population, module: nn.Module | None = None, engine="auto") -> Booth:
    module = module or make_model(build("model", "logistic"), population.shape, population.classes, 0)
    return Booth(population, module, CPU, engine, Seeded.root(0))


def votes_of(protocol, population, ids, x=None, **changes):
    x = packed([12], seed=9).x if x is None else x
    return protocol.electorate(booth(population, **changes)).votes(torch.tensor(ids), x, Seeded.root(1))


@pytest.fixture(params=VOTING)
def protocol(request):
    part = parts("voting")[request.param]()
    return replace(part, teacher_steps=20) if hasattr(part, "teacher_steps") else part


def test_voting__a_vote_is_a_point_of_the_simplex(protocol) -> None:
    votes = votes_of(protocol, packed(SIZES), [0, 1, 2, 3])
    assert votes.shape == (4, 12, 10)
    assert float(votes.min()) >= 0
    torch.testing.assert_close(votes.sum(-1), torch.ones(4, 12, dtype=torch.float64))
    assert float(torch.linalg.vector_norm(votes, dim=-1).max()) <= 1


def test_voting__reads_nothing_across_clients(protocol) -> None:
    population = packed(SIZES)
    clean = votes_of(protocol, population, [1])
    population.x[:2] = 1e9
    population.x[7:] = -1e9
    assert torch.equal(votes_of(protocol, population, [1]), clean)


def test_voting__does_not_depend_on_who_votes_beside(protocol) -> None:
    population = packed([20, 30, 40])
    together = votes_of(protocol, population, [0, 1, 2])
    for client in range(3):
        alone = votes_of(protocol, population, [client])[0]
        assert float((alone == together[client]).all(-1).double().mean()) > 0.9  # rounding may turn a close call


@pytest.mark.parametrize("world", ["constant", "huge", "one sample"])
def test_voting__bounded_on_odd_data(protocol, world: str) -> None:
    population = packed([1, 1, 1, 1] if world == "one sample" else SIZES)
    if world == "constant":
        population.x.fill_(1.0)
        population.y.fill_(0)
    if world == "huge":
        population.x.mul_(1e30)
    votes = votes_of(protocol, population, [0, 1, 2, 3])
    assert bool(torch.isfinite(votes).all())
    assert float(torch.linalg.vector_norm(votes, dim=-1).max()) <= 1


def test_voting__survives_the_configuration(protocol) -> None:
    assert build("method", describe(protocol)) == protocol
    assert fedblur.Config(method=describe(protocol)).voting == protocol
    assert fedblur.Config(method=protocol.part_name).voting == type(protocol)()


def test_voting__on_digits_the_student_beats_its_median_teacher_by_far(protocol, tmp_path) -> None:
    passes: list[nn.Module] = []
    with register_module_forward_pre_hook(lambda module, x: passes.append(module)):
        method = {"name": protocol.part_name, "student_steps": 500}
        run = fedblur.train(fedblur.Config(method=method, epsilon=2.0, seed=0), out=tmp_path / "run")
    assert len(passes) < 20_000  # it is 11,000; 359 teachers of 100 steps one by one would take 36,000 more
    assert 0 < run.epsilon <= 2.0
    assert run.accuracy > run.summary["local_only"]["teacher_accuracy_quartiles"][1] + 0.3


def test_voting__other_methods_know_nothing_of_it() -> None:
    assert not {*VOTING} & {*parts("method")}
    assert fedblur.Config(method="blur+lus").voting is None


# --- AE-DPFL ---


def test_ae_dpfl__vmap_equals_loop() -> None:
    protocol = build("method", {"name": "ae-dpfl", "teacher_steps": 20})
    torch.manual_seed(0)
    module = SmallCnn()
    ends = [votes_of(protocol, packed(SIZES), [0, 1, 2], module=module, engine=e) for e in ("vectorised", "sequential")]
    assert float((ends[0] == ends[1]).all(-1).double().mean()) > 0.95  # rounding may turn a close call


def test_ae_dpfl__teachers_learn_their_own_data() -> None:
    population = packed([40, 40])
    protocol = build("method", {"name": "ae-dpfl", "teacher": "mlp"})
    own = votes_of(protocol, population, [0, 1], x=population.x)
    right = own.argmax(-1) == population.y
    assert float(right[0, :40].double().mean()) > 0.95
    assert float(right[1, 40:].double().mean()) > 0.95


def test_ae_dpfl__the_teacher_is_a_model_of_its_own() -> None:
    config = fedblur.Config(method={"name": "ae-dpfl", "teacher": {"name": "mlp", "hidden": [7]}}, model="logistic")
    teachers = config.voting.electorate(booth(packed(SIZES)))
    assert teachers.job.layout.total == 64 * 7 + 7 + 7 * 10 + 10


# --- kNN-DPFL ---


def test_knn__votes_the_labels_of_the_nearest() -> None:
    x = torch.tensor([[1.0, 0], [0.9, 0.1], [0, 1], [0.1, 0.9], [0.2, 0.9]])
    world = packed([5], shape=(2,), classes=3)
    population = type(world)(x, torch.tensor([0, 1, 2, 2, 1]), world.starts, world.sizes, 3)
    asked = torch.tensor([[5.0, 0.01], [0.01, 3.0]])
    vote = Neighbours(population, public_filters((2,), 0), 3).votes(torch.tensor([0]), asked, Seeded.root(0))
    torch.testing.assert_close(vote[0, 1], torch.tensor([0, 1 / 3, 2 / 3], dtype=torch.float64))
    single = Neighbours(population, public_filters((2,), 0), 1).votes(torch.tensor([0]), asked, Seeded.root(0))
    assert single[0].argmax(-1).tolist() == [0, 2]


def test_knn__a_client_with_few_samples_uses_all_of_them() -> None:
    population = packed([2, 1])
    votes = votes_of(build("method", {"name": "knn-dpfl", "neighbours": 5}), population, [0])
    shares = torch.bincount(population.y[:2], minlength=10).double() / 2
    assert torch.equal(votes[0], shares.expand(12, 10))


def test_knn__features_are_public_and_of_length_1() -> None:
    filters = public_filters((1, 8, 8), 16)
    assert torch.equal(filters, public_filters((1, 8, 8), 16))
    phi = features(packed([30]).x, filters)
    torch.testing.assert_close(phi.norm(dim=1), torch.ones(30))
    assert public_filters((60,), 16).numel() == 0  # samples that are not images are compared as they are


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "ae-dpfl", "queries": 0}, "method.ae-dpfl.queries=0 must be at least 1"),
        ({"name": "ae-dpfl", "pool_share": 1.0}, r"method.ae-dpfl.pool_share=1.0 must be in \(0, 1\)"),
        ({"name": "ae-dpfl", "checks": 50}, "method.ae-dpfl.checks=50 needs a threshold above 0"),
        ({"name": "ae-dpfl", "threshold": 0.5, "queries": 9, "checks": 5}, "checks=5 must be at least queries=9"),
        ({"name": "ae-dpfl", "teacher": "cnnn"}, "model 'cnnn' is unknown: did you mean 'cnn'"),
        ({"name": "ae-dpfl", "teacher_steps": 0}, "teacher_steps=0 must be at least 1"),
        ({"name": "ae-dpfl", "teachers": "mlp"}, "unknown key 'method.ae-dpfl.teachers': did you mean 'teacher'"),
        ({"name": "knn-dpfl", "neighbours": 0}, "method.knn-dpfl.neighbours=0 must be at least 1"),
        ({"name": "knn-dpfl", "confidence": 1.5}, r"confidence=1.5 must be in \[0, 1\]"),
        ("ae-dpfll", "method 'ae-dpfll' is unknown: did you mean 'ae-dpfl'"),
        ("blur+ae-dpfl", "a protocol of its own: give it alone"),
    ],
)
def test_settings__mistakes_are_named(settings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fedblur.Config(method=settings)


def test_settings__other_mechanisms_do_not_apply() -> None:
    with pytest.raises(ConfigError, match="does not apply to ae-dpfl"):
        fedblur.Config(method="ae-dpfl", mechanism="ddgauss", accountant="rdp")
