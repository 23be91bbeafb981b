"""A traced graph with fewer operators and less memory: sums into products, and results into the memory of what is done.

In: a graph of pure operators on fake tensors, as `make_fx` leaves it. Out: the same values, and the same bits wherever
a product that adds to a tensor rounds as one whose result is added: `tracing` compares before it uses a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

_aten = torch.ops.aten
_IN_PLACE = {
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.sub.Tensor: _aten.sub_.Tensor,
    _aten.mul.Tensor: _aten.mul_.Tensor,
    _aten.div.Tensor: _aten.div_.Tensor,
    _aten.exp.default: _aten.exp_.default,
    _aten.relu.default: _aten.relu_.default,
    _aten.tanh.default: _aten.tanh_.default,
    _aten.sigmoid.default: _aten.sigmoid_.default,
    _aten.addcmul.default: _aten.addcmul_.default,
    _aten.baddbmm.default: _aten.baddbmm_.default,
    _aten.scatter_add.default: _aten.scatter_add_.default,
}


def add_in_products(graph: Graph) -> None:
    """a + b·c, where nothing else reads b·c, as one operator: the model's biases, and the step's own Δ + gradient."""
    for node in graph.nodes:
        if node.target is not _aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
            continue
        product = next((arg for arg in reversed(node.args) if _is_product(arg, node)), None)
        if product is None or node.args[0] is node.args[1]:
            continue
        other = node.args[0] if node.args[1] is product else node.args[1]
        if not isinstance(other, Node) or not _adds(other, node):
            continue
        with graph.inserting_before(node):
            fused = graph.call_function(_aten.baddbmm.default, (other, *product.args))
        fused.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
        graph.erase_node(product)


def _is_product(arg: Any, total: Node) -> bool:
    if not isinstance(arg, Node) or arg.target is not _aten.bmm.default:
        return False
    return len(arg.users) == 1 and _value(arg).shape == _value(total).shape


def _adds(other: Node, total: Node) -> bool:
    """Whether a product can add to this tensor, and leaves the sum's own layout."""
    return bool(_value(other).dtype == _value(total).dtype and _value(total).is_contiguous())


def reuse_memory(graph: Graph, given: set[int]) -> None:
    """Operators write over an operand that nothing reads any more. `given`: arguments that the caller gives up."""
    if any(node.op == "get_attr" and "val" not in node.meta for node in graph.nodes):
        return  # a constant whose memory is not known
    place = {node: i for i, node in enumerate(graph.nodes)}
    owners = _owners(graph, given)
    for node in [*graph.nodes]:
        target = _IN_PLACE.get(node.target)
        source = node.args[0] if node.args else None
        if target is None or not isinstance(source, Node):
            continue
        group = owners.get(_storage(source))
        if group is None or not _fits(source, node) or not _is_last(node, group, place):
            continue
        node.target = target
        group += owners.pop(_storage(node))
        owners[_storage(node)] = group


def _owners(graph: Graph, given: set[int]) -> dict[int, list[Node]]:
    """By storage: all nodes that look at it, where the graph may overwrite it."""
    found: dict[int, list[Node]] = {}
    kept = set()
    number = 0
    for node in graph.nodes:
        for storage in _storages(node):
            found.setdefault(storage, []).append(node)
            if node.op == "get_attr" or (node.op == "placeholder" and number not in given):
                kept.add(storage)
        number += node.op == "placeholder"
    return {storage: nodes for storage, nodes in found.items() if storage not in kept}


def _fits(source: Node, node: Node) -> bool:
    """Whether the result, which is an operator's own, lies as the operand does: then no two elements share a place."""
    here, there = _value(node), _value(source)
    return (here.shape, here.stride(), here.dtype) == (there.shape, there.stride(), there.dtype)


def _is_last(node: Node, group: list[Node], place: dict[Node, int]) -> bool:
    """Whether no view of this memory is read after `node`, nor by it in another operand."""
    others = [arg for arg in node.all_input_nodes if arg is not node.args[0]]
    if any(arg in group for arg in others) or [*node.args].count(node.args[0]) > 1:
        return False
    return all(place[user] <= place[node] for view in group for user in view.users)


def _value(node: Node) -> Any:
    return node.meta["val"]


def _storage(node: Node) -> int:
    return next(_storages(node), -1)


def _storages(node: Node) -> Iterator[int]:
    values = node.meta.get("val")
    for value in values if isinstance(values, list | tuple) else [values]:
        if isinstance(value, torch.Tensor):
            yield value.untyped_storage()._cdata
