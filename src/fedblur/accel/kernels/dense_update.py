"""A rewrite of a compiled step's graph: one kernel makes the updates of each large dense layer.

In: the graph of a pipelined step (`step_pipeline`), where a product rounded to bf16 updates a layer's Δ, from which the
next step's weights are made. Out: the same graph with `client_dense_update` in place of product, update, cast and the
squares of ‖Δ‖. An update that looks different in any way is left as it is.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.fx import Graph, Node

from fedblur.accel.kernels.operators import TILE, covers

_aten = torch.ops.aten
_LARGE = 2**16  # weights of a layer; smaller ones take little of the memory traffic
_VIEWS = {_aten._unsafe_view.default, _aten.view.default}
_TURNS = {_aten.transpose.int, _aten.permute.default}


class Update(NamedTuple):
    """The nodes of Δ + product, or with BLUR of Δ + product − rate·(factor·Δ)."""

    node: Node  # the new Δ
    product: Node  # slope·x
    delta: Node  # the old Δ
    decay: tuple[Node, Node] | None = None  # rate and factor


class Weight(NamedTuple):
    """The node of start + Δ in bf16, which the next step uses."""

    node: Node
    start: Node


def fuse_updates(graph: Graph) -> int:
    """Use the kernel wherever a step updates a large dense layer, and return how often that is."""
    found = [update for node in graph.nodes if (update := _update(node)) is not None]
    fused = [update for update in found if _fuse(graph, update)]
    graph.eliminate_dead_code()
    return len(fused)


def _fuse(graph: Graph, update: Update) -> bool:
    weight = _next_weight(update.node)
    if weight is None:
        return False
    clients = update.product.meta["val"].shape[0]
    with graph.inserting_before(update.node):
        if update.decay is None:
            decay = graph.call_function(_aten.new_zeros.default, (update.delta, [clients]))
        else:
            flat = [graph.call_function(_aten.reshape.default, (factor, [clients])) for factor in update.decay]
            decay = graph.call_function(_aten.mul.Tensor, tuple(flat))
        given = (*update.product.args, update.delta, decay, weight.start, TILE)
        call = graph.call_function(torch.ops.fedblur.client_dense_update.default, given)
        new, half, parts = (graph.call_function(operator.getitem, (call, i)) for i in range(3))
        squares = graph.call_function(_aten.sum.dim_IntList, (parts, [1, 2]))
    for total in _squares(update.node):
        _replace(graph, total, squares)
    _replace(graph, weight.node, half)
    _replace(graph, update.node, new)
    return True


def _update(node: Node) -> Update | None:
    if node.target is not _aten.addcmul.default:
        bent = any(user.target is _aten.addcmul.default for user in node.users)
        return None if bent else _sum(node)
    total, rate, term = _arguments(node)
    plain = _sum(total)
    if plain is None or node.kwargs != {"value": -1} or len(total.users) > 1 or not _only(term, _aten.mul.Tensor):
        return None
    factor, delta = _arguments(term)
    return plain._replace(node=node, decay=(rate, factor)) if delta is plain.delta else None


def _sum(node: Any) -> Update | None:
    """Return the update if this is Δ + float32(slope·x)."""
    if not isinstance(node, Node) or not _is_addition(node):
        return None
    delta, gradient = _arguments(node)
    if not _given(delta) or not _only(gradient, _aten._to_copy.default):
        return None
    product, turned = _arguments(gradient)[0], False
    while _only(product, *_VIEWS, *_TURNS):
        product, turned = _arguments(product)[0], turned ^ (product.target in _TURNS)
    if turned or not _only(product, _aten.bmm.default):
        return None
    value, factors = product.meta["val"], [factor.meta["val"] for factor in _arguments(product)]
    if value.shape != gradient.meta["val"].shape or value.dtype != torch.bfloat16:
        return None
    taken = value[0].numel() >= _LARGE and covers(*factors)
    return Update(node, product, delta) if taken else None


def _next_weight(node: Node) -> Weight | None:
    for user in node.users:
        if not _only(user, _aten.add.Tensor) or not _is_addition(user):
            continue
        start, delta = _arguments(user)
        (cast,) = user.users
        halved = cast.target is _aten._to_copy.default and cast.kwargs.get("dtype") is torch.bfloat16
        if delta is node and halved and _given(start) and start.meta["val"].dim() == 2:
            return Weight(cast, start)
    return None


def _squares(node: Node) -> list[Node]:
    """Return the nodes of each client's Σ Δ², for BLUR's ‖Δ‖; `norm` adds each row up first."""
    squares = [user for user in node.users if user.target is _aten.pow.Tensor_Scalar and user.args[1] == 2]
    by_row = [total for square in squares for total in square.users if _is_sum(total, [2])]
    return [total for row in by_row for total in row.users if _is_sum(total, [1])]


def _is_sum(node: Node, over: list[int]) -> bool:
    return node.target is _aten.sum.dim_IntList and _arguments(node)[1:] == (over,) and not node.kwargs


def _is_addition(node: Node) -> bool:
    return node.target is _aten.add.Tensor and node.kwargs in ({}, {"alpha": 1})


def _arguments(node: Node) -> tuple[Any, ...]:
    return node.args


def _given(node: Any) -> TypeGuard[Node]:
    """Return whether this is one of the graph's inputs."""
    return isinstance(node, Node) and node.op == "placeholder"


def _only(node: Any, *targets: Any) -> TypeGuard[Node]:
    """Return whether this is one of these operators, and only one node uses its result."""
    return isinstance(node, Node) and node.target in targets and len(node.users) == 1


def _replace(graph: Graph, old: Node, new: Node) -> None:
    """Replace a node. The users of the old one come after both: new nodes stand where Δ is updated."""
    old.replace_all_uses_with(new)
    graph.erase_node(old)
