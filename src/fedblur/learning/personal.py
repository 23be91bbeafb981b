"""Personal parts: parameters that stay on their client, and what methods remember there (docs/personal.md).

    shared part      start + Δ      clipped, summed with noise, the same for everyone: the flat vector [d]
    personal part    a row [k]      its client's own: trained beside Δ, never clipped, never sent, never averaged

In: a module and patterns of names. Out: a `Personal`, which says where each tensor lies in a client's row [k].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor, nn

from fedblur.core.errors import ConfigError, nearest
from fedblur.learning.methods import Method
from fedblur.learning.module_function import Layout, Params, trainable_tensors


class Rows(Protocol):
    """The clients' rows, wherever they are kept."""

    def read(self, ids: Tensor) -> Tensor:
        """Return these clients' rows: [clients, k], on the CPU."""

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Replace these clients' rows."""


@dataclass(frozen=True)
class FirstRows:
    """Clients that have never trained: all rows are the first one, and nothing is kept."""

    initial: Tensor  # [k]

    def read(self, ids: Tensor) -> Tensor:
        return self.initial.expand(len(ids), -1).clone()

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Forget them: timings and checks train clients that nobody is."""


class CohortRows:
    """The rows of one round's cohort. They replace the clients' own once the round is done."""

    def __init__(self, ids: Tensor, values: Tensor) -> None:
        order = torch.argsort(ids)
        self.ids, self.values = ids[order], values[order]

    def read(self, ids: Tensor) -> Tensor:
        return self.values[self._places(ids)]

    def write(self, ids: Tensor, rows: Tensor) -> None:
        self.values[self._places(ids)] = rows.detach().to("cpu", torch.float32)

    def alone(self, ids: Tensor) -> Tensor:
        """Return all values with zeros for everyone but these clients, so that parts of a cohort add up."""
        only, places = torch.zeros_like(self.values), self._places(ids)
        only[places] = self.values[places]
        return only

    def _places(self, ids: Tensor) -> Tensor:
        """Return where these clients' rows are; a client that is not in the cohort is an error, never a neighbour."""
        places = torch.searchsorted(self.ids, ids).clamp(max=max(len(self.ids) - 1, 0))
        if len(ids) and not (len(self.ids) and torch.equal(self.ids[places], ids)):
            raise KeyError("a client that is not in this round's cohort has no row here")
        return places


@dataclass(frozen=True)
class Personal:
    """The content of a client's row: its personal parameters, then what methods remember, as `method:name`."""

    parameters: tuple[str, ...]
    layout: Layout  # of the row
    initial: Tensor  # [k], on the CPU: a client's row before its first round
    rows: Rows

    @classmethod
    def of(cls, module: nn.Module, shared: Layout, methods: Sequence[Method]) -> Personal | None:
        """Return what stays on clients of this module, given what is shared; None if nothing does."""
        own = {
            name: tensor.detach().cpu()
            for name, tensor in trainable_tensors(module).items()
            if name not in shared.names
        }
        names = tuple(own)
        for method in methods:
            for key, shape in method.client_state(shared).items():
                own[memory_name(method, key)] = torch.zeros(shape)
        if not own:
            return None
        layout = layout_of({name: tuple(tensor.shape) for name, tensor in own.items()})
        initial = layout.flatten(own).float()
        return cls(names, layout, initial, FirstRows(initial))

    def first(self) -> Params:
        """Return the personal parameters of a client that has never trained."""
        return self.parameters_of(self.initial)

    def parameters_of(self, rows: Tensor) -> Params:
        """Return the personal parameters that lie in rows [*lead, k]: [*lead, *shape] each."""
        tensors = self.layout.unflatten(rows)
        return {name: tensors[name] for name in self.parameters}

    def begin(self, start: Params, rows: Tensor) -> tuple[Params, Params]:
        """Return start and first difference of local steps, given clients' rows [*lead, k].

        What is received of a personal parameter is nothing, so its start is zero and its difference is its value. Local
        steps then treat all parameters alike.
        """
        own = self.layout.unflatten(rows)
        some = next(iter(start.values()))
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        return start | {name: some.new_zeros(shapes[name]) for name in self.parameters}, own

    def end(self, delta: Params, before: Tensor) -> Tensor:
        """Return the rows [*lead, k] after local steps. A row that is not finite stays as it was."""
        after = self.layout.flatten({name: delta[name] for name in self.layout.names})
        return torch.where(torch.isfinite(after).all(-1, keepdim=True), after, before)


def memory_name(method: Method, key: str) -> str:
    """Return the name under which a tensor of a method lies in a client's row; no parameter has a colon."""
    return f"{method.part_name}:{key}"


def remembered(method: Method, shared: Layout, values: Mapping[str, Tensor]) -> Params:
    """Return what this method remembers on a client."""
    return {key: values[memory_name(method, key)] for key in method.client_state(shared)}


def layout_of(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Return the layout of tensors of these shapes, in their order."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    offsets = tuple(sum(sizes[:i]) for i in range(len(sizes)))
    return Layout(tuple(shapes), tuple(shapes.values()), offsets, sum(sizes))


def shared_layout(module: nn.Module, personal: Iterable[str]) -> Layout:
    """Return the layout of what is shared: all trainable tensors that no pattern names.

    Raise a ConfigError for a pattern that names nothing, and where nothing is left to share.
    """
    whole, left_out = Layout.of(module), set[str]()
    for pattern in personal:
        found = {name for name in whole.names if fnmatchcase(name, pattern)}
        if not found:
            raise ConfigError(f"personal={pattern!r} names no trainable parameter: {nearest(pattern, whole.names)}")
        left_out |= found
    if left_out == set(whole.names):
        raise ConfigError(
            f"personal={list(personal)} names all trainable parameters: nothing is left that clients train together"
        )
    kept = {n: shape for n, shape in zip(whole.names, whole.shapes, strict=True) if n not in left_out}
    return layout_of(kept) if left_out else whole
