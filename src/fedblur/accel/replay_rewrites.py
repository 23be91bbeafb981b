"""Rewrites of a traced graph: sums are merged into products, and results reuse memory that nothing reads any more.

In: a graph of pure operators on fake tensors, as `make_fx` makes it. Out: the same values. The bits are the same
wherever a product that adds to a tensor rounds like a sum after the product; `replay` compares before it uses a graph.
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
    """Merge a + b·c into one operator where nothing else reads b·c: a model's biases, and a step's own Δ + gradient."""
    for node in graph.nodes:
        if node.target is not _aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
            continue
        product = next((arg for arg in reversed(node.args) if _is_product(arg, node)), None)
        if product is None or node.args[0] is node.args[1]:
            continue
        other = node.args[0] if node.args[1] is product else node.args[1]
        if not isinstance(other, Node) or "val" not in other.meta or _value(other).dtype != _value(node).dtype:
            continue
        if not _value(node).is_contiguous():  # a product that adds would give the sum another layout
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


def reuse_memory(graph: Graph, given: set[int]) -> None:
    """Let operators overwrite an operand that nothing reads any more. `given`: arguments that the caller gives up."""
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
        here, there = _value(node), _value(source)  # a fresh result's elements do not share memory
        if (here.shape, here.stride(), here.dtype) != (there.shape, there.stride(), there.dtype):
            continue
        if group is None or not _is_last(node, group, place):
            continue
        node.target = target
        group += owners.pop(_storage(node))
        owners[_storage(node)] = group


def _owners(graph: Graph, given: set[int]) -> dict[int, list[Node]]:
    """Return, for each storage that the graph may overwrite, all nodes that are views of it."""
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


def _is_last(node: Node, group: list[Node], place: dict[Node, int]) -> bool:
    """Return whether `node` is the last to read this memory, and reads it through one operand only."""
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
