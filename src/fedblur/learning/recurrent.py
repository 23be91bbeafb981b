"""nn.LSTM, nn.GRU and nn.RNN step by step, in operators that `vmap` can map and whose dropout can be seeded.

In: what torch gives to its own kernels. Out: what those return, to float tolerance. torch's kernels run a whole layer
at once; they have no rule for a batch of clients, each with weights of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_States = tuple[Tensor, ...]  # [batch, hidden] each: h, and c of an LSTM
_Cell = Callable[[Tensor, _States, Tensor, Tensor | None, Tensor | None], _States]


def in_steps(
    mode: str, x: Tensor, hidden: Tensor | Sequence[Tensor], weights: Sequence[Tensor], biased: bool, layers: int,
    both_ways: bool, batch_first: bool, between: Callable[[Tensor], Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return (outputs, last h[, last c]). `between` is applied to what one layer gives to the next."""
    cell, ways = _CELLS[mode], 2 if both_ways else 1
    first = (hidden,) if isinstance(hidden, Tensor) else tuple(hidden)
    each = len(weights) // (layers * ways)  # tensors of a layer and direction
    x = x.transpose(0, 1) if batch_first else x  # [time, batch, features]
    last: list[_States] = []
    for layer in range(layers):
        outputs = []
        for way in range(ways):
            number = layer * ways + way
            own = weights[number * each : (number + 1) * each]
            states = tuple(state[number] for state in first)
            output, states = _run(cell, x, states, own, biased, reverse=way == 1)
            outputs.append(output)
            last.append(states)
        x = torch.cat(outputs, -1)
        x = between(x) if layer < layers - 1 else x
    ends = tuple(torch.stack(states) for states in zip(*last, strict=True))
    return (x.transpose(0, 1) if batch_first else x, *ends)


def _run(
    cell: _Cell, x: Tensor, states: _States, weights: Sequence[Tensor], biased: bool, reverse: bool
) -> tuple[Tensor, _States]:
    """Run one direction of one layer over [time, batch, features]."""
    (into, within), rest = weights[:2], weights[2:]
    bias, inner_bias = rest[:2] if biased else (None, None)
    projection = rest[-1] if len(rest) in (1, 3) else None  # of an LSTM with proj_size
    inputs = list(F.linear(x, into, bias).unbind(0))
    outputs = []
    for given in reversed(inputs) if reverse else inputs:
        states = cell(given, states, within, inner_bias, projection)
        outputs.append(states[0])
    return torch.stack(outputs[::-1] if reverse else outputs), states


def _lstm(given: Tensor, states: _States, within: Tensor, bias: Tensor | None, projection: Tensor | None) -> _States:
    h, c = states
    i, f, g, o = (given + F.linear(h, within, bias)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if projection is None else F.linear(h, projection)), c


def _gru(given: Tensor, states: _States, within: Tensor, bias: Tensor | None, projection: Tensor | None) -> _States:
    (h,) = states
    r_in, z_in, n_in = given.chunk(3, -1)
    r_own, z_own, n_own = F.linear(h, within, bias).chunk(3, -1)
    z = (z_in + z_own).sigmoid()
    n = (n_in + (r_in + r_own).sigmoid() * n_own).tanh()
    return ((1 - z) * n + z * h,)


def _tanh(given: Tensor, states: _States, within: Tensor, bias: Tensor | None, projection: Tensor | None) -> _States:
    return ((given + F.linear(states[0], within, bias)).tanh(),)


def _relu(given: Tensor, states: _States, within: Tensor, bias: Tensor | None, projection: Tensor | None) -> _States:
    return ((given + F.linear(states[0], within, bias)).relu(),)


_CELLS: dict[str, _Cell] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _tanh, "rnn_relu": _relu}
