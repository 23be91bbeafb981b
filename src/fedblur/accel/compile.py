"""Compiled functions for long runs: trace once for each shape, then give a flat graph to `torch.compile`.

`make_fx` makes the trace: it runs the function itself, with its `vmap` and `grad`, on fake tensors. Function modes,
custom operators and their vmap rules therefore mean the same as in uncompiled code, and the compiler sees plain
operators. (In the versions that we support, dynamo cannot follow an autograd function through `vmap`.)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fedblur.accel.kernels.dense_update import fuse_updates
from fedblur.accel.kernels.fused_layers import fusing
from fedblur.accel.replay import positions
from fedblur.accel.step_pipeline import halves

# Without the compiler's own benchmark: it contains the command line unescaped, and a quote in it breaks the code.
_PLAIN: dict[str, str | int | bool | Callable[..., Any]] = {"benchmark_harness": False}


class Compiled:
    """A pure function of tensors and constants, compiled for each combination of shapes and constants it meets.

    For the body of a loop, `state` names the arguments that the function returns updated, and `invariant` those that
    do not change while the loop runs. Consecutive calls are then pipelined (`step_pipeline`).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: str | Callable[..., Any] = "inductor",
        state: tuple[int, ...] = (),
        invariant: tuple[int, ...] = (),
    ) -> None:
        self.function = function
        self.backend = backend
        self.state = state
        self.invariant = invariant
        self.graphs: dict[Any, tuple[Callable[..., Any], Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        leaves, structure = pytree.tree_flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = (structure, *(signature(leaf) for leaf in leaves))
        if key not in self.graphs:
            self.graphs[key] = self._compile(arguments, leaves, structure, tensors)
        graph, shape = self.graphs[key]
        return pytree.tree_unflatten(graph(*tensors), shape)

    def _compile(
        self, arguments: tuple[Any, ...], leaves: list[Any], structure: Any, tensors: list[Tensor]
    ) -> tuple[Callable[..., Any], Any]:
        outcome: list[Any] = []

        def flat(*values: Tensor) -> list[Any]:
            given = iter(values)
            filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            results, shape = pytree.tree_flatten(self.function(*pytree.tree_unflatten(filled, structure)))
            outcome.append(shape)
            return results

        with fusing():
            # detach: a tensor passed twice (Δ and velocity start as the same zeros) must be two inputs of the graph;
            # a model's frozen parameters are real tensors inside the function: they become the graph's constants
            trace = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)
            graph = trace(*(tensor.detach() for tensor in tensors))
        graph.graph.eliminate_dead_code()  # the unfused halves of fused layers
        graph.recompile()
        invariant, state = (positions(arguments, chosen) for chosen in (self.invariant, self.state))
        cut = halves(graph, set(invariant), state) if self.state else None
        if cut is None:
            return self._by_compiler(graph), outcome[-1]
        if _on_gpu(tensors):
            fuse_updates(cut.loop.graph)
            cut.loop.recompile()
        return Pipeline(self._by_compiler(cut.head), self._by_compiler(cut.loop), state, invariant), outcome[-1]

    def _by_compiler(self, graph: GraphModule) -> Callable[..., Any]:
        options = _PLAIN if self.backend == "inductor" else None
        return WithCompiler(
            graph, torch.compile(graph, dynamic=False, fullgraph=True, backend=self.backend, options=options)
        )


class WithCompiler:
    """A graph as compiled code, or the graph itself where the compiler fails: slower, with the same result."""

    def __init__(self, graph: GraphModule, compiled: Callable[..., Any]) -> None:
        from torch._dynamo.exc import BackendCompilerFailed  # a second of imports that only compiled runs need

        self.graph = graph
        self.chosen = compiled
        self.failure = BackendCompilerFailed

    def __call__(self, *tensors: Tensor) -> Any:
        try:
            return self.chosen(*tensors)
        except self.failure as error:  # at the first call, before anything has run
            cause = getattr(error, "inner_exception", error)
            reason = str(cause).splitlines()[:1]
            warnings.warn(": ".join(["not compiled, so slower", type(cause).__name__, *reason]), stacklevel=2)
            self.chosen = self.graph
            return self.chosen(*tensors)


class Pipeline:
    """Calls of a loop's body. A call that gets the state that the previous one returned need not prepare it again."""

    def __init__(
        self, head: Callable[..., Any], loop: Callable[..., Any], state: list[int], invariant: list[int]
    ) -> None:
        self.head = head
        self.loop = loop
        self.state = state
        self.invariant = invariant
        self.expected: list[Tensor] = []  # kept alive, so that no other tensor can take their place
        self.carried: list[Tensor] = []

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        steady = [tensors[i] for i in self.invariant]
        given = [*(tensors[i] for i in self.state), *steady]
        if len(given) != len(self.expected) or any(a is not b for a, b in zip(given, self.expected, strict=True)):
            self.carried = list(self.head(*tensors))
        results = list(self.loop(*tensors, *self.carried))
        state, self.carried = results[: len(self.state)], results[len(self.state) :]
        self.expected = [*state, *steady]
        return state


def _on_gpu(tensors: list[Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors)


def signature(leaf: Any) -> Any:
    """Return what compiled code depends on: a tensor's layout, or the value of a constant."""
    return (leaf.shape, leaf.dtype, leaf.device, leaf.stride()) if isinstance(leaf, Tensor) else leaf
