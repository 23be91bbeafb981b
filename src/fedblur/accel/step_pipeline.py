"""A compiled loop body that prepares the next step while it writes this one: weights are read from memory once.

A local step begins with what depends on the update alone: weights in bf16, and ‖Δ‖. Computed there, it reads the whole
update again, which the previous step has just written. So the traced graph is cut in two: the head computes these small
or half-sized values, and the body takes them as inputs. The compiled loop is the body, followed by the head on the
body's own result. The compiler then fuses update and preparation into one pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

_VIEWS = {"permute", "view", "_unsafe_view", "reshape", "transpose", "t", "expand", "unsqueeze", "squeeze", "alias"}


class Halves(NamedTuple):
    """The two graphs: head(inputs) -> carried values; loop(inputs, carried) -> new state, values for the next step."""

    head: GraphModule
    loop: GraphModule


def halves(graph: GraphModule, invariant: set[int], state: list[int]) -> Halves | None:
    """Cut a step's graph. `invariant` and `state` are positions of its inputs; its outputs are the new state.

    Return None where nothing is worth carrying, or where the outputs do not have the state's shapes.
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    outputs = list(next(node for node in graph.graph.nodes if node.op == "output").args[0])
    if [_shape(inputs[i]) for i in state] != [_shape(node) for node in outputs]:
        return None
    early = _early(graph, {inputs[i] for i in invariant}, {inputs[i] for i in state})
    carried = _carried(outputs, early, limit=max(inputs[i].meta["val"].numel() for i in state) // 100)
    if not carried:
        return None
    head = Graph()
    given = _placeholders(head, inputs)
    head.output([_copy(head, node, given) for node in carried])
    loop = Graph()
    known = _placeholders(loop, [*inputs, *carried])
    result = [_copy(loop, node, known) for node in outputs]
    ahead = {node: known[node] for node in inputs} | {inputs[i]: new for i, new in zip(state, result, strict=True)}
    loop.output([*result, *(_copy(loop, node, ahead) for node in carried)])
    return Halves(GraphModule(graph, head), GraphModule(graph, loop))


def _early(graph: GraphModule, invariant: set[Node], state: set[Node]) -> set[Node]:
    """Return the nodes that depend on the state, and on nothing else that changes from step to step."""
    steady, early = set(invariant), set(state)
    for node in graph.graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        needs = set(node.all_input_nodes)
        if needs <= steady:
            steady.add(node)
        elif needs <= steady | early:
            early.add(node)
    return early - state


def _carried(outputs: list[Node], early: set[Node], limit: int) -> list[Node]:
    """Return the nodes closest to the outputs that are small, or hold the state in half its size."""
    carried: dict[Node, None] = {}
    seen: set[Node] = set()
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        value = node.meta.get("val")
        view = _VIEWS.intersection(str(node.target).split("."))  # costs nothing: its base is carried
        useful = isinstance(value, Tensor) and (value.dtype == torch.bfloat16 or value.numel() <= limit)
        if node in early and useful and not view:
            carried[node] = None
        else:
            waiting.extend(node.all_input_nodes)
    return list(carried)


def _copy(target: Graph, node: Node, known: dict[Node, Node]) -> Node:
    """Copy the node, and all that it needs, to another graph; `known` holds what is already there. Return the copy."""
    waiting = [(node, False)]
    while waiting:
        current, ready = waiting.pop()
        if current in known:
            continue
        if ready:
            known[current] = target.node_copy(current, lambda needed: known[needed])
        else:
            waiting.append((current, True))
            waiting.extend((need, False) for need in current.all_input_nodes)
    return known[node]


def _placeholders(graph: Graph, nodes: list[Node]) -> dict[Node, Node]:
    made = {node: graph.placeholder(f"given_{i}") for i, node in enumerate(nodes)}
    for node, placeholder in made.items():
        placeholder.meta = dict(node.meta)
    return made


def _shape(node: Node) -> torch.Size | None:
    value = node.meta.get("val")
    return value.shape if isinstance(value, Tensor) else None
