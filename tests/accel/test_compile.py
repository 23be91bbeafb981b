"""Compiled local steps give what uncompiled ones give, with dropout, convolutions and BLUR inside."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fedblur.accel.compile import Compiled
from fedblur.core.config import Config, LocalTraining
from fedblur.engines.local import numbered, steps_for
from fedblur.learning.client import (
    LocalProgram,
    Trained,
    batched_step,
    clip_block,
    local_update,
    many_clients,
    run_steps,
)
from fedblur.learning.methods import Method
from fedblur.learning.methods.augment import Augment
from fedblur.learning.methods.balance import Balance
from fedblur.learning.methods.blur import Blur
from fedblur.learning.methods.gce import GeneralisedCrossEntropy
from fedblur.learning.methods.lus import Lus
from fedblur.learning.models import Glyphs, GnResNet, Leaves, make_model
from fedblur.learning.module_function import Layout, Params, as_function
from fedblur.training.machine import Machine
from fedblur.training.setup import prepare
from tests.worlds import SmallCnn, job_for, packed, work_for


@pytest.mark.parametrize("half", [False, True])
def test_compiled__steps_equal_uncompiled_ones(half: bool) -> None:
    torch.manual_seed(0)
    module = SmallCnn()
    job = job_for(module, (Blur(0.4), Lus(0.5)), local=LocalTraining(steps=3, batch_size=8, momentum=0.5))
    job = replace(job, forward=as_function(module, half))
    shard, work = work_for(job, packed([8, 8, 8]), [0, 1, 2])
    program = LocalProgram(job.forward, job.layout, job.local, job.methods)
    plain = many_clients(program)
    loop = Compiled(batched_step(program), "aot_eager", state=(1, 2), invariant=(0, 3))
    traced = plain._replace(
        train=partial(run_steps, numbered(loop), job.local), score=Compiled(plain.score, "aot_eager")
    )
    expected, got = (local_update(job, steps, shard, work) for steps in (plain, traced))
    torch.testing.assert_close(Trained(*got), Trained(*expected), rtol=1e-4, atol=1e-6)
    assert len(loop.graphs) == 1  # the step's number and the clip norm are tensors
    assert torch.isfinite(clip_block(got, job).bounded.value).all()


def test_compiled__a_compiler_that_fails_costs_time_and_nothing_else() -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        raise RuntimeError("no such instruction")

    loop = Compiled(lambda x, y: x * 2 + y, broken)
    x, y = torch.arange(3.0), torch.ones(3)
    with pytest.warns(UserWarning, match="not compiled, so slower: RuntimeError: no such instruction"):
        assert loop(x, y).tolist() == [1.0, 3.0, 5.0]
    assert loop(y, y).tolist() == [3.0, 3.0, 3.0]  # and is not tried again
    looped = Compiled(lambda fixed, x: x + fixed.sin().cos(), broken, state=(1,), invariant=(0,))
    with pytest.warns(UserWarning, match="no such instruction"):
        first = looped(y, x)
    torch.testing.assert_close(looped(y, first), x + 2 * y.sin().cos())


def test_compiled__no_command_line_goes_into_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler would write `--only "the paper's CNN"` into it as it is, and the quote ends a string there."""
    seen: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda graph, **how: (seen.append(how["options"]), graph)[1])
    assert Compiled(lambda x: x + 1)(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert seen == [{"benchmark_harness": False}]


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(GnResNet(8, (8, 16)), marks=pytest.mark.long),  # the next one has all of its parts
        GnResNet(8, (8, 16), standardise=True, front="wavelets"),
        Glyphs(8),
        pytest.param(Leaves(4), marks=pytest.mark.long),  # fixed features, as the one before
    ],
)
def test_compiled__small_models_with_frozen_front_ends_and_views(part: Any) -> None:
    """A frozen parameter is a constant of the function, not one of its arguments, and one for all clients."""
    module = make_model(part, (1, 16, 16), 10, seed=0)
    methods = (Augment(0.1, 10, flip=True, views=2), Balance(), GeneralisedCrossEntropy(0.5))
    job = job_for(module, methods, local=LocalTraining(steps=2, batch_size=8))
    job = replace(job, forward=as_function(module, half=True))
    shard, work = work_for(job, packed([8, 5], (1, 16, 16)), [0, 1])
    program = LocalProgram(job.forward, job.layout, job.local, job.methods)
    plain = many_clients(program)
    traced = plain._replace(train=partial(run_steps, numbered(Compiled(batched_step(program), "aot_eager")), job.local))
    expected, got = (local_update(job, steps, shard, work) for steps in (plain, traced))
    torch.testing.assert_close(Trained(*got), Trained(*expected), rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler imports it
def test_compiled__lus_keeps_the_same_coordinates_also_among_ties() -> None:
    """By the real compiler: a threshold that is computed twice must come out the same twice."""
    layout = Layout.of(torch.nn.Linear(40, 60))
    generator = torch.Generator().manual_seed(0)
    delta, gradient = (
        {
            "weight": torch.randint(-3, 4, (3, 60, 40), generator=generator).float(),
            "bias": torch.randn(3, 60, generator=generator),
        }
        for _ in range(2)
    )
    shape = torch.func.vmap(lambda d, g: Lus(0.7).shape_update(d, g, layout))
    torch.testing.assert_close(Compiled(shape)(delta, gradient), shape(delta, gradient), rtol=0, atol=0)


def test_compiled__makes_one_graph_per_shape() -> None:
    function = Compiled(lambda a, b: {"sum": a + b, "twice": 2 * a}, "aot_eager")
    for _ in range(3):
        out = function(torch.ones(3), torch.ones(3))
    assert torch.equal(out["sum"], torch.full((3,), 2.0))
    assert len(function.graphs) == 1
    function(torch.ones(4), torch.ones(4))
    assert len(function.graphs) == 2


LOOPED: dict[str, tuple[Method, ...]] = {"plain": (), "blur": (Blur(0.4),), "projected": (Blur(float("inf")),)}


@pytest.mark.parametrize(
    ("methods", "momentum"),
    [
        *(pytest.param(methods, 0.9, id=f"{name}-0.9") for name, methods in LOOPED.items()),
        pytest.param((), 0.0, id="plain-0.0"),
        *(pytest.param(LOOPED[name], 0.0, id=f"{name}-0.0", marks=pytest.mark.long) for name in ("blur", "projected")),
    ],
)
def test_pipeline__a_loop_equals_its_uncompiled_steps(methods, momentum: float) -> None:
    """Steps that hand the next one's beginning over give the same updates, and prepare only once."""
    torch.manual_seed(0)
    module = SmallCnn()
    job = job_for(module, methods, local=LocalTraining(steps=3, batch_size=8, momentum=momentum), clip_norm=1e-3)
    job = replace(job, forward=as_function(module, half=True))
    shard, work = work_for(job, packed([8, 8]), [0, 1])
    program = LocalProgram(job.forward, job.layout, job.local, job.methods)
    loop = Compiled(batched_step(program), "aot_eager", state=(1, 2), invariant=(0, 3))
    arguments = (job.start, torch.tensor(job.clip_norm), shard.x, shard.y, work.plan, work.seeds)
    expected = run_steps(batched_step(program), job.local, *arguments)
    run_steps(numbered(loop), job.local, *arguments)
    (pipeline, _), *others = loop.graphs.values()
    assert not others
    heads = []
    pipeline.head = _counted(pipeline.head, heads)
    torch.testing.assert_close(run_steps(numbered(loop), job.local, *arguments), expected, rtol=2e-2, atol=1e-4)  # bf16
    assert len(heads) == 1  # a new start is prepared, what follows is carried


def _counted(function, calls: list):
    def counted(*arguments):
        calls.append(1)
        return function(*arguments)

    return counted


def test_compiled__methods_that_leave_steps_alone_share_them() -> None:
    job = job_for(SmallCnn(), (Blur(0.4),))
    blur = LocalProgram(job.forward, job.layout, job.local, job.methods)
    both, other = (LocalProgram(job.forward, job.layout, job.local, (Blur(0.4), Lus(c))) for c in (0.5, 0.9))
    plain = LocalProgram(job.forward, job.layout, job.local, ())
    steps = {id(steps_for(program, "compiled").train) for program in (blur, both, other)}
    assert len(steps) == 1
    assert steps_for(both, "compiled").score is steps_for(other, "compiled").score
    assert steps_for(plain, "compiled").train is not steps_for(blur, "compiled").train
    assert steps_for(both, "compiled").shape is not steps_for(other, "compiled").shape


@dataclass(frozen=True)
class Doubled(Method):
    """Overrides a hook that `Method` has only in the test below."""

    def brand_new_hook(self, delta: Params) -> Params:
        return {name: 2 * tensor for name, tensor in delta.items()}


def test_compiled__a_new_hook_of_methods_reaches_the_steps_without_being_listed(monkeypatch) -> None:
    """Steps are compiled without the methods that leave them alone; a forgotten hook would be dropped silently."""
    job = job_for(SmallCnn(), (Doubled(),))
    program, plain = (LocalProgram(job.forward, job.layout, job.local, methods) for methods in (job.methods, ()))
    assert not Doubled().steers_steps
    monkeypatch.setattr(Method, "brand_new_hook", lambda self, delta: delta, raising=False)
    assert Doubled().steers_steps
    assert not Lus(0.5).steers_steps
    assert not Method().steers_steps
    steps_for.cache_clear()
    assert steps_for(program, "compiled").train is not steps_for(plain, "compiled").train


def test_compiled__runs_of_one_named_model_share_a_function_whatever_their_seeds(tmp_path: Path) -> None:
    first, second = (prepare(Config(model="mlp", seed=seed), tmp_path / f"{seed}.jsonl", Machine()) for seed in (0, 1))
    assert first.protocol.forward is second.protocol.forward
    assert not torch.equal(first.initial, second.initial)
    own = prepare(Config(model="mlp", seed=0), tmp_path / "own.jsonl", Machine(), module=first.module)
    assert own.protocol.forward is not first.protocol.forward
