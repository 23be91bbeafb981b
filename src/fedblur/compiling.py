"""Compiled functions for long runs: trace once per shape, then hand a flat graph to `torch.compile`.

The trace is made with `make_fx`, that is by running the function itself under `vmap` and `grad` on fake tensors. So
function modes, custom operators and their vmap rules mean in compiled code just what they mean without it (dynamo, in
the versions we support, cannot follow an autograd function through `vmap`), and the compiler sees plain operators.
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

from fedblur.kernels.fusion import fusing
from fedblur.kernels.updating import fuse_updates
from fedblur.pipelining import halves

# The compiler's own benchmark is not written: it holds the command line as it is, and a quote in there breaks the code.
_PLAIN: dict[str, str | int | bool | Callable[..., Any]] = {"benchmark_harness": False}


class Compiled:
    """A pure function of tensors and constants, compiled for each combination of shapes and constants it meets.

    For the body of a loop, `state` names the arguments that the function returns anew and `invariant` those that do
    not change while the loop runs: consecutive calls are then pipelined (`pipelining`).
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
            # detach: a tensor given twice (Δ and velocity start as the same zeros) must be two inputs of the graph;
            # frozen parameters of a model are real tensors inside the function: they become the graph's constants
            trace = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)
            graph = trace(*(tensor.detach() for tensor in tensors))
        graph.graph.eliminate_dead_code()  # the unfused halves of fused layers
        graph.recompile()
        invariant, state = (_positions(arguments, chosen) for chosen in (self.invariant, self.state))
        cut = halves(graph, set(invariant), state) if self.state else None
        if cut is None:
            return self._by_compiler(graph), outcome[-1]
        if _on_gpu(tensors):
            fuse_updates(cut.loop.graph)
            cut.loop.recompile()
        return Pipeline(self._by_compiler(cut.head), self._by_compiler(cut.loop), state, invariant), outcome[-1]

    def _by_compiler(self, graph: GraphModule) -> Callable[..., Any]:
        options = _PLAIN if self.backend == "inductor" else None
        compiled = torch.compile(graph, dynamic=False, fullgraph=True, backend=self.backend, options=options)
        return WithCompiler(graph, compiled, _compiler_failed())


class WithCompiler:
    """A graph as compiled code; as it is where the compiler fails on it, which costs time and changes nothing else."""

    def __init__(self, graph: GraphModule, compiled: Callable[..., Any], failure: type[Exception]) -> None:
        self.graph = graph
        self.chosen = compiled
        self.failure = failure

    def __call__(self, *tensors: Tensor) -> Any:
        try:
            return self.chosen(*tensors)
        except self.failure as error:  # at the first call, before anything has run
            cause = getattr(error, "inner_exception", error)
            words = str(cause).splitlines()[:1]
            warnings.warn(": ".join(["not compiled, so slower", type(cause).__name__, *words]), stacklevel=2)
            self.chosen = self.graph
            return self.chosen(*tensors)


def _compiler_failed() -> type[Exception]:
    from torch._dynamo.exc import BackendCompilerFailed  # a second of imports, for those who compile

    return BackendCompilerFailed


class Pipeline:
    """Calls of a loop's body; one that gets the state which the call before returned need not prepare it again."""

    def __init__(
        self, head: Callable[..., Any], loop: Callable[..., Any], state: list[int], invariant: list[int]
    ) -> None:
        self.head = head
        self.loop = loop
        self.state = state
        self.invariant = invariant
        self.expected: list[Tensor] = []  # held, so that no other tensor can take its place
        self.carried: list[Tensor] = []

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        steady = [tensors[i] for i in self.invariant]
        if not _same([*(tensors[i] for i in self.state), *steady], self.expected):
            self.carried = list(self.head(*tensors))
        results = list(self.loop(*tensors, *self.carried))
        state, self.carried = results[: len(self.state)], results[len(self.state) :]
        self.expected = [*state, *steady]
        return state


def _on_gpu(tensors: list[Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors)


def _same(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return len(tensors) == len(others) and all(a is b for a, b in zip(tensors, others, strict=True))


def _positions(arguments: tuple[Any, ...], chosen: tuple[int, ...]) -> list[int]:
    """Where the tensors of the chosen arguments lie among all tensors."""
    counts = [sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(argument)) for argument in arguments]
    return [place for i in chosen for place in range(sum(counts[:i]), sum(counts[: i + 1]))]


def signature(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device, leaf.stride()) if isinstance(leaf, Tensor) else leaf
