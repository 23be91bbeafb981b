"""Functions that are called thousands of times on tensors of the same shapes: run once under a tracer, then replayed.

The trace is made at the first call. When it is made, and whether its rewritten form is used, depends on shapes alone:
neither a client's data nor the size of a cohort can choose between two ways to compute.

What is replayed is the flat list of operators that the function called, less those that change nothing: on small models
most of a local step's time is not arithmetic but `vmap`, `vjp` and Python between the operators. The operators and
their order are the same, so the result is the same, bit for bit, whether and whenever a function is traced. Where
`rewriting` makes them fewer, both graphs are run on random numbers, and the plain one stays unless all bits agree.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fedblur.rewriting import add_in_products, reuse_memory

_aten = torch.ops.aten
_VIEWS = {
    _aten.view.default, _aten._unsafe_view.default, _aten.expand.default, _aten.transpose.int, _aten.permute.default,
    _aten.t.default, _aten.unsqueeze.default, _aten.squeeze.dims, _aten.squeeze.dim, _aten.alias.default,
    _aten.detach.default,
}  # fmt: skip
_DIRECT = {  # the same operators, called without a look at their schema: half a microsecond less each
    _aten.add.Tensor: torch.add, _aten.sub.Tensor: torch.sub, _aten.mul.Tensor: torch.mul, _aten.div.Tensor: torch.div,
    _aten.neg.default: torch.neg, _aten.exp.default: torch.exp, _aten.relu.default: torch.relu,
    _aten.bmm.default: torch.bmm, _aten.baddbmm.default: torch.baddbmm, _aten.addcmul.default: torch.addcmul,
    _aten.amax.default: torch.amax, _aten.sum.dim_IntList: torch.sum, _aten.scatter_add.default: torch.scatter_add,
    _aten.transpose.int: torch.transpose, _aten.unsqueeze.default: torch.unsqueeze, _aten.view.default: Tensor.view,
    _aten.add_.Tensor: Tensor.add_, _aten.sub_.Tensor: Tensor.sub_, _aten.mul_.Tensor: Tensor.mul_,
    _aten.div_.Tensor: Tensor.div_, _aten.exp_.default: torch.exp_, _aten.relu_.default: torch.relu_,
    _aten.baddbmm_.default: Tensor.baddbmm_, _aten.addcmul_.default: Tensor.addcmul_,
    _aten.scatter_add_.default: Tensor.scatter_add_,
}  # fmt: skip
_MOST = 128  # graphs that are kept
_COMPARED = 20_000  # numbers on which two graphs are compared, at least

Replay = Callable[..., Any]
_untraced = Lock()  # a module as a function holds its tensors for a moment: two threads may only replay at once


class Traced:
    """A pure function of tensors, traced once for each combination of shapes."""

    def __init__(self, function: Callable[..., Any], given: tuple[int, ...] = ()) -> None:
        self.function = function
        self.given = given  # arguments that callers do not read again: the result may take their memory
        self.graphs: dict[Any, Replay] = {}

    def __call__(self, *arguments: Any) -> Any:
        leaves = list(_leaves(arguments))
        key = _key(leaves)
        graph = self.graphs.get(key)
        if graph is not None:
            return graph(*leaves)
        with _untraced:
            if len(self.graphs) >= _MOST:
                return self.function(*arguments)
            if key not in self.graphs:
                self.graphs[key] = _trace(self.function, arguments, leaves, self.given)
        return self.graphs[key](*leaves)


def _key(leaves: list[Tensor]) -> Any:
    return tuple([(leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves])


def _leaves(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        else:
            yield from argument.values() if isinstance(argument, dict) else argument


def _trace(
    function: Callable[..., Any], arguments: tuple[Any, ...], leaves: list[Tensor], given: tuple[int, ...]
) -> Replay:
    _, structure = pytree.tree_flatten(arguments)
    outcome: list[Any] = []

    def flat(*values: Tensor) -> list[Any]:
        results, shape = pytree.tree_flatten(function(*pytree.tree_unflatten(values, structure)))
        outcome.append(shape)
        return results

    module = make_fx(flat, tracing_mode="fake")(*[leaf.detach() for leaf in leaves])  # no two of them the same object
    if not simplify(module):
        return _inferring(_as_function(module, outcome[-1]))
    plain = _inferring(_as_function(module, outcome[-1]))
    free = _positions(arguments, given)
    add_in_products(module.graph)
    reuse_memory(module.graph, free)
    rewritten = _inferring(_as_function(module, outcome[-1]))
    return rewritten if _agree(plain, rewritten, leaves) else plain


def _inferring(replay: Replay) -> Replay:
    def run(*values: Tensor) -> Any:
        with torch.inference_mode():
            return replay(*values)

    return run


def _positions(arguments: tuple[Any, ...], chosen: tuple[int, ...]) -> set[int]:
    """Where the tensors of the chosen arguments lie among all tensors."""
    counts = [len([*_leaves((argument,))]) for argument in arguments]
    return {place for i in chosen for place in range(sum(counts[:i]), sum(counts[: i + 1]))}


def _agree(one: Replay, other: Replay, leaves: list[Tensor]) -> bool:
    """Whether two graphs give the same bits on random numbers: at the first step Δ is 0, which would show nothing.

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
    """The graph as a plain function: `GraphModule` would put three more calls around every operator's own."""
    nodes = list(module.graph.nodes)
    scope: dict[str, Any] = {"__builtins__": {}}
    last_use = {source: node for node in nodes for source in node.all_input_nodes}
    lines, inputs = [], []
    for node in nodes:
        if node.op == "placeholder":
            inputs.append(node.name)
        elif node.op == "get_attr":
            scope[node.name] = getattr(module, node.target)
        elif node.op == "output":
            lines.append(f"return {_text(pytree.tree_unflatten(node.args[0], shape), scope)}")
        else:
            scope[f"call_{node.name}"] = _DIRECT.get(node.target) or getattr(node.target, "_op", node.target)
            words = [_text(value, scope) for value in node.args]
            words += [f"{name}={_text(value, scope)}" for name, value in node.kwargs.items()]
            lines.append(f"{node.name} = call_{node.name}({', '.join(words)})")
            done = [source.name for source in node.all_input_nodes if last_use[source] is node]
            lines += [f"del {name}" for name in done if name not in scope]  # memory is free for what comes next
    body = "\n    ".join(lines)
    exec(f"def replay({', '.join(inputs)}):\n    {body}", scope)
    return cast(Replay, scope["replay"])


def _text(value: Any, scope: dict[str, Any]) -> str:
    """An argument in source code; constants have a name in the scope."""
    if isinstance(value, Node):
        return value.name
    if isinstance(value, tuple):
        return f"({''.join(f'{_text(item, scope)}, ' for item in value)})"
    if isinstance(value, list):
        return f"[{', '.join(_text(item, scope) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_text(item, scope)}' for key, item in value.items())}}}"
    name = f"constant_{len(scope)}"
    scope[name] = value
    return name


def simplify(module: GraphModule) -> bool:
    """Leave out what changes no bit: views of the same view, products with one, the same operator twice.

    False, and nothing is changed, where the code writes in place.
    """
    graph = module.graph
    if any(node.op == "call_function" and _mutates(node) for node in graph.nodes):
        return False  # the order of writes and reads matters here
    for node in graph.nodes:
        _plain_sum(node)
        same = _same_view(node) or _factor_of_one(node)
        if same is not None:
            node.replace_all_uses_with(same)
    _merge_repeated(graph)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return True


def _mutates(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return (schema is None and node.target is not operator.getitem) or (schema is not None and schema.is_mutable)


def _same_view(node: Node) -> Node | None:
    """The earliest tensor that this view looks at in the same way."""
    found, source = None, node
    while source.target in _VIEWS:
        source = source.args[0]  # type: ignore[assignment]
        if _layout(source) == _layout(node):
            found = source
    return found


def _layout(node: Node) -> Any:
    value = node.meta["val"]
    return value.shape, value.stride(), value.storage_offset(), value.dtype


def _plain_sum(node: Node) -> None:
    """1 is what `alpha` is without being said."""
    if node.target is _aten.add.Tensor and node.kwargs.get("alpha") == 1:
        node.kwargs = {}


def _factor_of_one(node: Node) -> Node | None:
    if node.target is not _aten.mul.Scalar or node.args[1] != 1:
        return None
    source: Node = node.args[0]  # type: ignore[assignment]
    return source if _layout(source) == _layout(node) else None


def _merge_repeated(graph: Graph) -> None:
    seen: dict[Any, Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue
        key = repr((str(node.target), node.args, sorted(node.kwargs.items())))
        if key in seen:
            node.replace_all_uses_with(seen[key])
        else:
            seen[key] = node
