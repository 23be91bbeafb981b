"""A loop recorded once as a CUDA graph and replayed: a GPU runs thousands of small kernels without waiting for Python.

A local step is about forty kernels of some 50 µs each. Launched one by one, they can keep a core busy for longer than
the GPU. Replayed, the whole of local training is one launch. Each shape has its recording, and all share their memory,
so a result must be used before the next call. If a recording fails, or gives other numbers than the plain calls, it is
not used and a warning says so. FEDBLUR_CUDA_GRAPHS=off switches recordings off.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedblur.accel.compile import signature
from fedblur.core.switches import switched_on

_TOLERANCE = 1e-3  # of a recording's first result, relative to that of plain calls
_KEPT = 8  # recordings; clients of very different sizes lead to many shapes
_all: WeakSet[Captured] = WeakSet()


class Recording(NamedTuple):
    """A graph, the tensors that it reads, and its result."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Any]
    result: Any


class Captured:
    """A pure function of tensors, recorded on a GPU and just called on a CPU.

    A recording reads the `resident` arguments in place; the others are copied into its inputs.
    """

    def __init__(self, function: Callable[..., Any], resident: tuple[int, ...] = ()) -> None:
        self.function = function
        self.resident = resident
        self.pool: Any = None
        self.recordings: OrderedDict[Any, Recording | None] = OrderedDict()
        _all.add(self)

    def __call__(self, *arguments: Any) -> Any:
        leaves, structure = pytree.tree_flatten(arguments)
        if not any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves):
            return self.function(*arguments)
        stays = [
            isinstance(leaf, Tensor) and i in self.resident
            for i, argument in enumerate(arguments)
            for leaf in pytree.tree_leaves(argument)
        ]
        places = tuple(leaf.data_ptr() for leaf, stay in zip(leaves, stays, strict=True) if stay)
        key = (structure, places, *(signature(leaf) for leaf in leaves))
        if key not in self.recordings:
            self.recordings[key] = self._record(leaves, stays, structure)
            while len(self.recordings) > _KEPT:
                self.recordings.popitem(last=False)
        self.recordings.move_to_end(key)
        recording = self.recordings[key]
        return self.function(*arguments) if recording is None else _replay(recording, leaves)

    def _record(self, leaves: list[Any], stays: list[bool], structure: Any) -> Recording | None:
        """Return a recording, or None where it fails. Out of memory is raised: the caller then makes smaller blocks."""
        inputs = [
            leaf.clone() if isinstance(leaf, Tensor) and not stay else leaf
            for leaf, stay in zip(leaves, stays, strict=True)
        ]
        arguments = pytree.tree_unflatten(inputs, structure)
        expected = self.function(*arguments)  # compiles, and creates what is kept from call to call
        torch.cuda.synchronize()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                result = self.function(*arguments)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            warnings.warn(f"no CUDA graph of local training: {str(error).splitlines()[0]}", stacklevel=2)
            return None
        recording = Recording(graph, inputs, result)
        if not agree(_replay(recording, leaves), expected):
            warnings.warn("a CUDA graph of local training gave other numbers and is not used", stacklevel=2)
            return None
        return recording


def _replay(recording: Recording, leaves: list[Any]) -> Any:
    for place, leaf in zip(recording.inputs, leaves, strict=True):
        if isinstance(leaf, Tensor) and place is not leaf:
            place.copy_(leaf)
    recording.graph.replay()
    return recording.result


def agree(results: Any, expected: Any) -> bool:
    """Return whether two trees of tensors agree but for rounding."""
    pairs = list(zip(pytree.tree_leaves(results), pytree.tree_leaves(expected), strict=True))
    return all(float((a - b).norm()) <= _TOLERANCE * float(b.norm()) for a, b in pairs)


def forget_recordings() -> bool:
    """Free the memory of all recordings, also of earlier models in this process. Return False if there were none."""
    held = any(function.recordings for function in _all)
    for function in _all:
        function.recordings.clear()
        function.pool = None
    return held


def enabled() -> bool:
    """Return whether local training may be recorded."""
    return switched_on("FEDBLUR_CUDA_GRAPHS")
