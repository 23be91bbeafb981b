"""Personal parts: what is shared and what is not, whatever trains the clients (docs/personal.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fedblur.core.config import Config, LocalTraining
from fedblur.core.errors import ConfigError
from fedblur.core.rng import Seeded
from fedblur.engines.local import LocalEngine
from fedblur.engines.workers import WorkerEngine
from fedblur.learning.client import ClientJob
from fedblur.learning.methods import Method
from fedblur.learning.methods.blur import Blur
from fedblur.learning.methods.fedrep import FedRep
from fedblur.learning.methods.lus import Lus
from fedblur.learning.methods.sam import Sam
from fedblur.learning.module_function import as_function, initial_vector
from fedblur.learning.personal import CohortRows, Personal, shared_layout
from tests.worlds import CPU, SmallCnn, packed

SIZES = [5, 20, 3, 17, 9, 1, 30]
EVERYONE = torch.arange(len(SIZES))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


@dataclass(frozen=True)
class Dyn(Method):
    """FedDyn's correction (Acar et al. 2021) from what a client remembers alone: nothing more is released."""

    strength: float = 0.1

    def client_state(self, layout):
        return dict(zip(layout.names, layout.shapes, strict=True))

    def state_term(self, state, delta, clip_norm):
        return {name: self.strength * tensor - state[name] for name, tensor in delta.items()}

    def next_state(self, state, delta, clip_norm):
        return {name: tensor - self.strength * delta[name] for name, tensor in state.items()}


Dyn.part_name = "dyn"


def job_of(
    module: nn.Module, patterns: tuple[str, ...] = ("head.*",), methods: tuple[Method, ...] = (), **local: float
) -> ClientJob:
    layout = shared_layout(module, patterns)
    settings = LocalTraining(**{"steps": 6, "batch_size": 8, "learning_rate": 0.1} | local)
    start = layout.unflatten(initial_vector(module, layout))
    personal = Personal.of(module, layout, methods)
    return ClientJob(as_function(module.train()), layout, start, settings, methods, 0.5, personal=personal)


def trained(engine, job: ClientJob, rows: torch.Tensor | None = None, ids: torch.Tensor = EVERYONE):
    """Messages by client (in the order of `ids`) and rows after a round."""
    assert job.personal is not None
    begin = job.personal.initial.repeat(len(ids), 1) if rows is None else rows
    cohort = CohortRows(ids, begin.clone())
    job = replace(job, personal=replace(job.personal, rows=cohort))
    sizes = engine.population.fetch(ids).sizes
    order = torch.argsort(sizes, stable=True)
    blocks = torch.cat([b.bounded.value for b in engine.map_clients(job, ids, Seeded.root(0))])
    messages = torch.empty_like(blocks)
    messages[order] = blocks
    return messages, cohort.read(ids)


def population(shape: tuple[int, ...] = (6,), classes: int = 3):
    return packed(SIZES, shape, classes)


ENGINES = {
    "sequential": lambda p: LocalEngine(p, CPU, False, 4),
    "vectorised": lambda p: LocalEngine(p, CPU, True, 4),
    "traced": lambda p: LocalEngine(p, CPU, True, 4, "traced"),
    "workers": lambda p: WorkerEngine(p, 3, workers=2),
}
METHODS = {
    "fedper": (), "fedrep": (FedRep(3),), "blur": (Blur(0.4),), "projection": (Blur(float("inf")),),
    "lus": (Lus(0.5),), "sam": (Sam(0.1),), "state": (Dyn(),),
}  # fmt: skip


# --- what is personal ---


def test_patterns__name_parameters_and_the_rest_is_shared() -> None:
    assert shared_layout(Net(), ()).total == 53
    assert shared_layout(Net(), ("head.*",)).names == ("body.weight", "body.bias")
    assert shared_layout(Net(), ("*.bias", "head.weight")).names == ("body.weight",)
    with pytest.raises(ConfigError, match=r"personal='haed\.\*' names no trainable parameter: did you mean 'head"):
        shared_layout(Net(), ("haed.*",))
    with pytest.raises(ConfigError, match="names all trainable parameters: nothing is left"):
        shared_layout(Net(), ("*",))


def test_config__personal_is_checked_and_leaves_old_hashes_alone() -> None:
    from fedblur.core.config import config_hash, from_dict

    assert from_dict({"personal": ["head.*"]}).personal == ("head.*",)
    assert config_hash(Config()) != config_hash(Config(personal=("head.*",)))
    assert config_hash(Config()) == config_hash(Config(personal=()))
    for wrong, words in (
        ({"personal": ("a", "a")}, "different patterns"),
        ({"personal_steps": 2}, "needs personal parameters"),
        ({"method": "fedrep"}, 'personal = \\["head'),
        ({"personal": ("a",), "method": "ae-dpfl"}, "does not apply"),
        ({"personal": ("a",), "method": {"name": "fedrep", "steps": 10}}, "leaves none of local.steps=10"),
        ({"personal": ("a",), "method": "fedrep", "local": LocalTraining(optimizer="adam")}, "whose means count steps"),
    ):
        with pytest.raises(ConfigError, match=words):
            Config(**wrong)


# --- the engines agree ---


@pytest.mark.parametrize("name", list(METHODS))
def test_engines__agree_on_messages_and_rows(name: str) -> None:
    job = job_of(Net(), methods=METHODS[name])
    expected = trained(ENGINES["sequential"](population()), job)
    assert not torch.equal(expected[1], job.personal.initial.repeat(len(SIZES), 1))
    for engine in ("vectorised", "traced", "workers"):
        messages, rows = trained(ENGINES[engine](population()), job)
        assert torch.allclose(messages, expected[0], atol=1e-5), engine
        assert torch.allclose(rows, expected[1], atol=1e-5), engine


def test_engines__agree_on_a_personal_convolution_with_momentum_and_decay() -> None:
    job = job_of(SmallCnn(), ("conv.*", "head.bias"), momentum=0.9, weight_decay=0.01)
    expected = trained(ENGINES["sequential"](population((1, 8, 8), 10)), job)
    for engine in ("vectorised", "traced", "workers"):
        got = trained(ENGINES[engine](population((1, 8, 8), 10)), job)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True)), engine


def test_engines__agree_on_adam() -> None:
    job = job_of(Net(), methods=(Blur(0.4),), optimizer="adam", learning_rate=0.01)
    expected = trained(ENGINES["sequential"](population()), job)
    for engine in ("vectorised", "traced", "workers"):
        got = trained(ENGINES[engine](population()), job)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True)), engine


def test_training__is_plain_training_of_the_client_s_whole_model() -> None:
    """FedPer is SGD on shared and personal parameters together: the same as with all shared, from the same values."""
    everything = job_of(Net(), ())
    engine = ENGINES["sequential"](population())
    wide = replace(everything, clip_norm=1e6)
    whole = torch.cat([b.bounded.value for b in engine.map_clients(wide, EVERYONE, Seeded.root(0))])
    order = torch.argsort(torch.tensor(SIZES), stable=True)
    job = replace(job_of(Net()), clip_norm=1e6)
    messages, rows = trained(engine, job)
    assert torch.allclose(whole[:, :35], messages[order], atol=1e-6)
    assert torch.allclose(initial_vector(Net())[35:] + whole[:, 35:], rows[order], atol=1e-6)


# --- nobody else's ---


@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize("name", ["fedper", "lus"])
def test_isolation__another_client_s_row_changes_nothing(engine: str, name: str) -> None:
    job = job_of(Net(), methods=METHODS[name])
    begin = torch.randn(len(SIZES), job.personal.layout.total, generator=torch.Generator().manual_seed(3))
    loud = begin.clone()
    loud[2] *= 1e4
    loud[4] = float("nan")
    (messages, rows), (others, other_rows) = (
        trained(ENGINES[engine](population()), job, each) for each in (begin, loud)
    )
    same = [0, 1, 3, 5, 6]
    assert torch.equal(messages[same], others[same])
    assert torch.equal(rows[same], other_rows[same])
    assert not torch.equal(rows[2], other_rows[2])


@pytest.mark.parametrize("engine", list(ENGINES))
def test_isolation__a_client_reads_and_writes_its_own_row_whatever_the_order(engine: str) -> None:
    job = job_of(Net())
    begin = torch.randn(len(SIZES), job.personal.layout.total, generator=torch.Generator().manual_seed(3))
    expected = trained(ENGINES["sequential"](population()), job, begin)
    order = torch.tensor([4, 0, 6, 2])
    messages, rows = trained(ENGINES[engine](population()), job, begin[order], order)
    assert torch.allclose(messages, expected[0][order], atol=1e-5)
    assert torch.allclose(rows, expected[1][order], atol=1e-5)


def test_rows__of_a_client_outside_the_cohort_are_an_error() -> None:
    rows = CohortRows(torch.tensor([7, 3]), torch.tensor([[7.0], [3.0]]))
    assert rows.read(torch.tensor([3, 7])).flatten().tolist() == [3, 7]
    for stranger in (1, 5, 9):
        with pytest.raises(KeyError):
            rows.read(torch.tensor([stranger]))


# --- the bound ---


@pytest.mark.parametrize("name", list(METHODS))
def test_bound__a_message_is_of_the_shared_part_and_at_most_s_however_large_the_personal_part(name: str) -> None:
    job = job_of(Net(), methods=METHODS[name])
    begin = 1e5 * torch.ones(len(SIZES), job.personal.layout.total)
    messages, _ = trained(ENGINES["vectorised"](population()), job, begin)
    assert messages.shape[1] == job.layout.total == 35  # nothing personal has a place in it
    assert float(messages.double().norm(dim=1).max()) <= job.clip_norm


def test_methods__see_the_shared_part_alone() -> None:
    """BLUR's norm and LUS's scores are of what is sent: a huge personal part makes no difference to either."""
    seen: list[set[str]] = []

    @dataclass(frozen=True)
    class Nosy(Method):
        @property
        def score_batch(self):
            return "full"

        def gradient_term(self, delta, clip_norm):
            seen.append(set(delta))

        def after_step(self, delta, clip_norm):
            seen.append(set(delta))
            return delta

        def shape_update(self, delta, gradient, layout):
            seen.extend((set(delta), set(gradient), set(layout.names)))
            return delta

    trained(ENGINES["sequential"](population()), job_of(Net(), methods=(Nosy(),)))
    assert seen
    assert all(names == {"body.weight", "body.bias"} for names in seen)


def test_rows__that_are_not_finite_are_not_kept() -> None:
    job = job_of(Net(), learning_rate=1e30)
    messages, rows = trained(ENGINES["vectorised"](population()), job)
    assert torch.equal(rows, job.personal.initial.repeat(len(SIZES), 1))
    assert bool(torch.isfinite(messages).all())


# --- FedRep, and what a method remembers ---


def test_fedrep__the_personal_part_moves_first_and_the_shared_part_after() -> None:
    engine = ENGINES["sequential"](population())
    _, rows = trained(engine, job_of(Net(), methods=(FedRep(3),), momentum=0.5))
    alone = job_of(Net(), methods=(FedRep(3),), momentum=0.5, steps=4)
    short, first = trained(engine, alone)
    assert torch.allclose(rows, first)  # steps 4, 5 and 6 leave the personal part as step 3 left it
    assert bool((short.norm(dim=1) > 0).all())
    frozen, _ = trained(engine, job_of(Net(), methods=(FedRep(6),), momentum=0.5))
    assert float(frozen.abs().max()) == 0  # as long as the personal part moves, the shared one does not


def test_state__comes_back_to_the_client_in_its_next_round() -> None:
    method = Dyn()
    job = job_of(Net(), (), (method,))
    assert job.personal.parameters == ()
    assert job.personal.layout.names == ("dyn:body.weight", "dyn:body.bias", "dyn:head.weight", "dyn:head.bias")
    engine = ENGINES["vectorised"](population())
    messages, rows = trained(engine, replace(job, clip_norm=1e6))
    assert torch.allclose(rows, -0.1 * messages, atol=1e-6)  # what it remembers follows from its own update
    again, _ = trained(engine, replace(job, clip_norm=1e6), rows)
    assert not torch.allclose(again, messages, atol=1e-4)


def test_registry__fedrep_is_a_method_and_state_declares_itself() -> None:
    assert Config(method="fedrep", personal=("x",), local=LocalTraining(steps=6)).method == (FedRep(),)
    assert Method().client_state(shared_layout(Net(), ())) == {}
