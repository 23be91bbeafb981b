"""Functions that are called thousands of times on tensors of the same shapes: traced once, then replayed.

A replay is the flat list of operators that the function called, without those that change nothing. On small models,
most of a local step's time is not arithmetic but `vmap`, `vjp` and Python between the operators. Operators and order
stay the same, so the result is the same bit for bit, traced or not. Where `replay_rewrites` finds a shorter list, both
run on random numbers, and the plain one stays unless all bits agree.

The first call makes the trace. When it is made, and whether its rewritten form is used, depends on shapes alone:
neither a client's data nor the size of a cohort can choose between two ways to compute.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fedblur.accel.replay_rewrites import add_in_products, reuse_memory

_aten = torch.ops.aten
_VIEWS = {
    _aten.view.default, _aten._unsafe_view.default, _aten.expand.default, _aten.transpose.int, _aten.permute.default,
    _aten.t.default, _aten.unsqueeze.default, _aten.squeeze.dims, _aten.squeeze.dim, _aten.alias.default,
    _aten.detach.default,
}  # fmt: skip
_DIRECT = {  # the same operators without the lookup of their schema, which takes half a microsecond
    _aten.add.Tensor: torch.add, _aten.sub.Tensor: torch.sub, _aten.mul.Tensor: torch.mul, _aten.div.Tensor: torch.div,
    _aten.neg.default: torch.neg, _aten.exp.default: torch.exp, _aten.relu.default: torch.relu,
    _aten.bmm.default: torch.bmm, _aten.baddbmm.default: torch.baddbmm, _aten.addcmul.default: torch.addcmul,
    _aten.amax.default: torch.amax, _aten.sum.dim_IntList: torch.sum, _aten.scatter_add.default: torch.scatter_add,
    _aten.transpose.int: torch.transpose, _aten.unsqueeze.default: torch.unsqueeze,
    _aten.exp_.default: torch.exp_, _aten.relu_.default: torch.relu_,
}  # fmt: skip
_METHODS = {
    _aten.view.default: "view", _aten.add_.Tensor: "add_", _aten.sub_.Tensor: "sub_", _aten.mul_.Tensor: "mul_",
    _aten.div_.Tensor: "div_", _aten.baddbmm_.default: "baddbmm_", _aten.addcmul_.default: "addcmul_",
    _aten.scatter_add_.default: "scatter_add_",
}  # fmt: skip
_MOST = 128  # graphs kept
_COMPARED = 20_000  # least count of numbers on which two graphs are compared

Replay = Callable[..., Any]
_tracing = Lock()  # while a function is traced, its module holds the tracer's tensors: one thread at a time


class Traced:
    """A pure function of tensors, traced once for each combination of shapes."""

    def __init__(self, function: Callable[..., Any], given: tuple[int, ...] = ()) -> None:
        self.function = function
        self.given = given  # arguments that callers do not read again: the result may reuse their memory
        self.graphs: dict[Any, Replay] = {}

    def __call__(self, *arguments: Any) -> Any:
        leaves = list(_leaves(arguments))
        key = tuple([(leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves])
        graph = self.graphs.get(key)
        if graph is not None:
            return graph(*leaves)
        with _tracing:
            if len(self.graphs) >= _MOST:
                return self.function(*arguments)
            if key not in self.graphs:
                self.graphs[key] = _trace(self.function, arguments, leaves, self.given)
        return self.graphs[key](*leaves)


def _leaves(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, dict):
            yield from argument.values()
        else:  # a batch, whose inputs may be several
            for part in argument:
                if isinstance(part, Tensor):
                    yield part
                else:
                    yield from part.values()


def _trace(
    function: Callable[..., Any], arguments: tuple[Any, ...], leaves: list[Tensor], given: tuple[int, ...]
) -> Replay:
    _, structure = pytree.tree_flatten(arguments)
    outcome: list[Any] = []

    def flat(*values: Tensor) -> list[Any]:
        results, shape = pytree.tree_flatten(function(*pytree.tree_unflatten(values, structure)))
        outcome.append(shape)
        return results

    # a model's frozen parameters and buffers are real tensors inside the function: they become the graph's constants
    trace = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)
    module = trace(*[leaf.detach() for leaf in leaves])  # no two of them the same object
    if not simplify(module):
        return _as_function(module, outcome[-1])
    copy = Graph()
    copy.output(copy.graph_copy(module.graph, {}))
    plain = _as_function(GraphModule(module, copy), outcome[-1])
    add_in_products(module.graph)
    reuse_memory(module.graph, set(positions(arguments, given)))
    rewritten = _as_function(module, outcome[-1])
    return rewritten if _agree(plain, rewritten, leaves) else plain


def positions(arguments: tuple[Any, ...], chosen: tuple[int, ...]) -> list[int]:
    """Return the positions of the chosen arguments' tensors among all tensors."""
    counts = [sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(argument)) for argument in arguments]
    return [place for i in chosen for place in range(sum(counts[:i]), sum(counts[: i + 1]))]


def _agree(one: Replay, other: Replay, leaves: list[Tensor]) -> bool:
    """Return whether two graphs give the same bits on random numbers. (At the first step Δ is 0, which shows nothing.)

    Whole numbers (labels, seeds) are replaced by 0, so that the answer depends on nobody's data.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(1 + _COMPARED // max(1, sum(leaf.numel() for leaf in leaves))):
        made_up = [
            torch.empty_like(leaf).normal_(generator=generator) if leaf.is_floating_point() else torch.zeros_like(leaf)
            for leaf in leaves
        ]
        results = one(*made_up), other(*(leaf.clone() for leaf in made_up))
        pairs = zip(*map(pytree.tree_leaves, results), strict=True)
        if not all(torch.equal(*(tensor.flatten().view(torch.uint8) for tensor in pair)) for pair in pairs):
            return False
    return True


def _as_function(module: GraphModule, shape: pytree.TreeSpec) -> Replay:
    """Return the code of the graph. Calling the `GraphModule` itself would add three calls around it."""
    for node in module.graph.nodes:
        if node.op == "output":
            node.args = (pytree.tree_unflatten(node.args[0], shape),)
        elif node.target in _METHODS:
            node.op, node.target = "call_method", _METHODS[node.target]
        elif node.op == "call_function":
            node.target = _DIRECT.get(node.target, node.target)
    module.recompile()
    forward = module.forward

    def replay(*values: Tensor) -> Any:
        with torch.inference_mode():
            return forward(*values)

    return replay


def simplify(module: GraphModule) -> bool:
    """Remove what changes no bit: views of the same view, products with one, the same operator twice.

    Return False, and change nothing, where the code writes in place.
    """
    graph = module.graph
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            schema = getattr(node.target, "_schema", None)
            if schema is None or schema.is_mutable:
                return False  # the order of writes and reads matters here
    for node in graph.nodes:
        if node.target is _aten.add.Tensor and node.kwargs.get("alpha") == 1:
            node.kwargs = {}  # the default
        same = _same_view(node)
        if node.target is _aten.mul.Scalar and node.args[1] == 1 and _layout(node.args[0]) == _layout(node):
            same = node.args[0]
        if same is not None:
            node.replace_all_uses_with(same)
    seen: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            first = seen.setdefault(repr((str(node.target), node.args, sorted(node.kwargs.items()))), node)
            if first is not node:
                node.replace_all_uses_with(first)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return True


def _same_view(node: Node) -> Node | None:
    """Return the earliest tensor that has the same layout as this view of it."""
    found, source = None, node
    while source.target in _VIEWS:
        source = source.args[0]  # type: ignore[assignment]
        if _layout(source) == _layout(node):
            found = source
    return found


def _layout(node: Node) -> Any:
    value = node.meta.get("val")
    if value is None:  # a constant
        return node
    return value.shape, value.stride(), value.storage_offset(), value.dtype
