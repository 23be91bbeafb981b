"""Compiled functions for long runs: trace once per shape, then hand a flat graph to `torch.compile`.

The trace is made with `make_fx`, that is by running the function itself under `vmap` and `grad` on fake tensors. So
function modes, custom operators and their vmap rules mean in compiled code just what they mean without it (dynamo, in
the versions we support, cannot follow an autograd function through `vmap`), and the compiler sees plain operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree


class Compiled:
    """A pure function of tensors and constants, compiled for each combination of shapes and constants it meets."""

    def __init__(self, function: Callable[..., Any], backend: str = "inductor") -> None:
        self.function = function
        self.backend = backend
        self.graphs: dict[Any, tuple[Callable[..., Any], Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        leaves, structure = pytree.tree_flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = (structure, *(_signature(leaf) for leaf in leaves))
        if key not in self.graphs:
            self.graphs[key] = self._compile(leaves, structure, tensors)
        graph, shape = self.graphs[key]
        return pytree.tree_unflatten(graph(*tensors), shape)

    def _compile(self, leaves: list[Any], structure: Any, tensors: list[Tensor]) -> tuple[Callable[..., Any], Any]:
        outcome: list[Any] = []

        def flat(*values: Tensor) -> list[Any]:
            given = iter(values)
            filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            results, shape = pytree.tree_flatten(self.function(*pytree.tree_unflatten(filled, structure)))
            outcome.append(shape)
            return results

        # frozen parameters of a model are real tensors inside the function: they become the graph's constants
        graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
        return torch.compile(graph, dynamic=False, fullgraph=True, backend=self.backend), outcome[-1]


def _signature(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device, leaf.stride()) if isinstance(leaf, Tensor) else leaf
