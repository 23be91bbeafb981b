"""Rewritten graphs write only over memory that nobody reads again, and are used only where they keep every bit."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fedblur.accel.replay
from fedblur.accel.replay import Traced, simplify
from fedblur.accel.replay_rewrites import add_in_products, reuse_memory
from fedblur.core.config import LocalTraining
from fedblur.learning.client import LocalProgram, many_clients
from fedblur.learning.methods import Method
from fedblur.learning.methods.blur import Blur
from fedblur.learning.methods.sam import Sam
from tests.accel.test_replay import dense
from tests.worlds import job_for, packed, work_for


def rewritten(function, *tensors, given=()):
    module = make_fx(function, tracing_mode="fake")(*tensors)
    assert simplify(module)
    add_in_products(module.graph)
    reuse_memory(module.graph, set(given))
    module.recompile()
    return module


def operators(module) -> list[str]:
    return [str(node.target).removeprefix("aten.") for node in module.graph.nodes if node.op == "call_function"]


def test_rewrite__a_sum_joins_the_product_before_it() -> None:
    a, b, c = torch.randn(3, 4, 5), torch.randn(3, 5, 6), torch.randn(3, 1, 6)
    module = rewritten(lambda a, b, c: c + torch.bmm(a, b), a, b, c)
    assert operators(module) == ["baddbmm.default"]
    torch.testing.assert_close(module(a, b, c), c + torch.bmm(a, b))


def test_rewrite__a_product_that_is_read_elsewhere_stays() -> None:
    a, b, c = torch.randn(3, 4, 5), torch.randn(3, 5, 6), torch.randn(3, 1, 6)

    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        product = torch.bmm(a, b)
        return torch.relu(product) * (c + product)

    module = rewritten(function, a, b, c)
    assert "baddbmm.default" not in operators(module)
    assert torch.equal(module(a, b, c), function(a, b, c))


def test_rewrite__results_take_the_memory_of_what_is_done() -> None:
    x = torch.randn(3, 4)
    module = rewritten(lambda x: ((x - 1).exp() * 2).relu(), x)
    assert operators(module) == ["sub.Tensor", "exp_.default", "mul_.Tensor", "relu_.default"]
    before = x.clone()
    assert torch.equal(module(x), ((x - 1).exp() * 2).relu())
    assert torch.equal(x, before)  # an argument is the caller's


def read_later(x: Tensor) -> Tensor:
    moved = x - 1
    return moved.exp() + moved


def read_through_a_view(x: Tensor) -> Tensor:
    moved = x - 1
    view = moved.t()
    return moved.exp().t() + view


def returned(x: Tensor) -> list[Tensor]:
    moved = x - 1
    return [moved, moved.exp()]


def squared(x: Tensor) -> Tensor:
    moved = x - 1
    return moved * moved.t()


@pytest.mark.parametrize("function", [read_later, read_through_a_view, returned, squared])
def test_rewrite__what_is_still_read_is_not_overwritten(function) -> None:
    x = torch.randn(4, 4)
    module = rewritten(function, x)
    assert {"exp_.default", "mul_.Tensor"}.isdisjoint(operators(module))
    torch.testing.assert_close(module(x), function(x), rtol=0, atol=0)


def test_rewrite__only_arguments_that_are_given_up_are_overwritten() -> None:
    x, y = torch.zeros(3), torch.ones(3)
    module = rewritten(lambda x, y: [x + 1, y + 1], x, y, given=[0])
    module(x, y)
    assert x.tolist() == [1, 1, 1]
    assert y.tolist() == [1, 1, 1]


def test_traced__a_rewritten_graph_with_other_bits_is_not_used(monkeypatch) -> None:
    def wrong(graph) -> None:
        for node in graph.nodes:
            if node.target is torch.ops.aten.add.Tensor:
                node.target = torch.ops.aten.sub.Tensor

    monkeypatch.setattr(fedblur.accel.replay, "add_in_products", wrong)
    function = Traced(lambda a, b: [a + b])
    assert torch.equal(function(torch.ones(3), torch.zeros(3))[0], torch.ones(3))  # a − 0 would look the same here
    assert torch.equal(function(torch.ones(3), torch.ones(3))[0], torch.full((3,), 2.0))


class Still(Method):
    """Does nothing, but asks for the gradient itself."""

    def wrap_gradient(self, gradient):
        return lambda theta: gradient(theta)


@pytest.mark.parametrize("methods", [(), (Blur(0.4),), (Sam(0.0),)], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_step__a_gradient_scaled_at_its_start_gives_the_step_of_one_scaled_at_its_end(methods, decay) -> None:
    local = LocalTraining(steps=5, batch_size=8, learning_rate=0.1, weight_decay=decay)
    job = job_for(dense(), methods, clip_norm=0.1, local=local)
    shard, work = work_for(job, packed([3, 8, 20]), [0, 1, 2])
    clip_norm = torch.tensor(job.clip_norm)
    one, other = (
        many_clients(LocalProgram(job.forward, job.layout, local, chosen)).train(
            job.start, clip_norm, shard.x, shard.y, work.plan, work.seeds
        )
        for chosen in (methods, (*methods, Still()))
    )
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
