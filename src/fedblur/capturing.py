"""A loop recorded once as a CUDA graph and replayed: a GPU runs thousands of small kernels without waiting for Python.

A local step is about forty kernels of some 50 µs each. Launched one by one they keep one core busy for longer than they
keep the GPU busy; replayed, the whole of local training is one launch. Recordings are made per shape and share their
memory, so a result must be used up before the next call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedblur.compiling import signature

_KEPT = 8  # recordings; a federation whose clients differ much in size meets many shapes


class Recording(NamedTuple):
    """A graph, the tensors it reads, and what it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Any]
    result: Any


class Captured:
    """A pure function of tensors, just called on a CPU. `resident` arguments are read where they lie, others copied."""

    def __init__(self, function: Callable[..., Any], resident: tuple[int, ...] = ()) -> None:
        self.function = function
        self.resident = resident
        self.pool: Any = None
        self.recordings: OrderedDict[Any, Recording] = OrderedDict()

    def __call__(self, *arguments: Any) -> Any:
        leaves, structure = pytree.tree_flatten(arguments)
        if not any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves):
            return self.function(*arguments)
        stays = self._stays(arguments)
        places = tuple(leaf.data_ptr() for leaf, stay in zip(leaves, stays, strict=True) if stay)
        key = (structure, places, *(signature(leaf) for leaf in leaves))
        if key not in self.recordings:
            self.recordings[key] = self._record(leaves, stays, structure)
            while len(self.recordings) > _KEPT:
                self.recordings.popitem(last=False)
        self.recordings.move_to_end(key)
        recording = self.recordings[key]
        for place, leaf in zip(recording.inputs, leaves, strict=True):
            if isinstance(leaf, Tensor) and place is not leaf:
                place.copy_(leaf)
        recording.graph.replay()
        return recording.result

    def _record(self, leaves: list[Any], stays: list[bool], structure: Any) -> Recording:
        inputs = [
            leaf.clone() if isinstance(leaf, Tensor) and not stay else leaf
            for leaf, stay in zip(leaves, stays, strict=True)
        ]
        arguments = pytree.tree_unflatten(inputs, structure)
        self.function(*arguments)  # compiles, and makes what is kept from call to call
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            result = self.function(*arguments)
        return Recording(graph, inputs, result)

    def _stays(self, arguments: tuple[Any, ...]) -> list[bool]:
        return [
            isinstance(leaf, Tensor) and i in self.resident
            for i, argument in enumerate(arguments)
            for leaf in pytree.tree_leaves(argument)
        ]
