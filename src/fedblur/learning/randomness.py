"""A model's randomness as a pure function of a client's seed, the local step, the call and the element.

torch draws from a global generator: what it gives would depend on which clients share a block, and a loop, `vmap` and a
Flower node would train different models. Inside `SeededRandomness` dropout, attention, recurrent layers and torch's
draws hash (seed, call, element) instead, on every engine. What still reaches a global generator is found before the
first round, by `model_checks`, and refused by the name of the layer.

Elements are numbered row by row, so a tensor whose first dimension is the batch gives a sample the same masks however
wide its batch is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from fedblur.core.hashing import hash32, kept
from fedblur.core.switches import accelerated
from fedblur.learning.recurrent import in_steps

_ALPHA = 1.7580993408473766  # of SELU: where alpha dropout puts what it drops


class SeededRandomness(TorchFunctionMode):
    """Within this context a model's randomness is seeded; with `seed=None` (scores, evaluation) dropout is off."""

    def __init__(self, seed: Tensor | None, step: Tensor | int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.step = step
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = _SEEDED.get(func)
        return func(*args, **(kwargs or {})) if own is None else own(self, *args, **(kwargs or {}))

    def key(self, device: torch.device) -> Tensor:
        """Return the key of the next draw; without a seed draws are the same for all clients and steps."""
        self.calls += 1
        mixed = self.calls * 0x05EBCA77
        if self.seed is None:
            return hash32(torch.tensor(mixed, device=device).to(torch.int32))
        return hash32((self.seed + self.step * 0x1E3779B1 + mixed).to(torch.int32))

    def uniform(self, like: Tensor) -> Tensor:
        """Return numbers within (0, 1), neither 0 nor 1, as float32 in the shape of `like`."""
        index = torch.arange(like.numel(), device=like.device, dtype=torch.int32).view(like.shape)
        bits = (hash32(self.key(like.device) + index) >> 9) & 0x7FFFFF
        return (bits + 0.5) * 2.0**-23

    # --- dropout ---

    def drop(
        self, channels: bool, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        after_relu = None  # ReLU and dropout as one kernel, where the input comes from a ReLU that can be fused
        if not channels and accelerated():
            from fedblur.accel.kernels import fused_layers

            before = fused_layers.before_relu(input)
            after_relu = None if before is None else partial(fused_layers.relu_dropout, before)
        if self.seed is None:  # the fused kernel all the same, for the sake of its layout: nothing is dropped
            nothing = torch.zeros((), dtype=torch.int32, device=input.device)
            return input if after_relu is None or p == 0 else after_relu(nothing, 0.0)
        if not training or p == 0:
            return input
        key = self.key(input.device)
        if after_relu is not None:
            fused: Tensor = after_relu(key, p)
            return fused
        return input * kept(key, _mask_shape(input, channels), input.device, p) / (1 - p)

    def drop_alpha(
        self, channels: bool, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Drop to SELU's lowest value, and keep mean and variance (Klambauer et al. 2017)."""
        if self.seed is None or not training or p == 0:
            return input
        mask = kept(self.key(input.device), _mask_shape(input, channels), input.device, p)
        scale = 1 / math.sqrt((1 - p) * (1 + p * _ALPHA**2))
        return scale * (torch.where(mask, input, -_ALPHA) + p * _ALPHA)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return softmax(q·kᵀ·scale + mask)·v, by torch's own kernel where nothing drops and `vmap` does not map it.

        A query that may look at nothing gets 0, as torch's kernel gives it.
        """
        dropout_p = 0.0 if self.seed is None else dropout_p
        if dropout_p == 0 and not any(map(is_functorch_wrapped_tensor, (query, key, value))):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is None:
            weights = scores.softmax(-1)
        else:
            lowest = torch.finfo(scores.dtype).min
            hidden = attn_mask.logical_not() if attn_mask.dtype == torch.bool else attn_mask == -math.inf
            scores = scores if attn_mask.dtype == torch.bool else scores + attn_mask
            weights = scores.masked_fill(hidden, lowest).softmax(-1).masked_fill(hidden, 0.0)
        return (self.drop(False, weights, dropout_p) if dropout_p else weights) @ value

    def recur(self, mode: str, native: Callable[..., Any], *args: Any) -> Any:
        """Run a recurrent layer: torch's own, or step by step where it drops between layers or `vmap` maps it."""
        input, training = args[0], bool(args[6 if _padded(mode, args) else 7])
        dropout = float(args[5 if _padded(mode, args) else 6]) if training and self.seed is not None else 0.0
        mapped = any(is_functorch_wrapped_tensor(tensor) for part in args for tensor in _tensors(part))
        if not _padded(mode, args) or (dropout == 0 and not mapped):
            # a packed sequence that drops reaches the global generator, and is refused for that
            return native(*args) if self.seed is not None else native(*args[:-3], *_at_rest(mode, args))
        _, hidden, weights, biased, layers, _, _, both_ways, batch_first = args
        return in_steps(mode, input, hidden, weights, biased, layers, both_ways, batch_first, self._between(dropout))

    def _between(self, dropout: float) -> Callable[[Tensor], Tensor]:
        """Return what happens to [time, batch, features] between two recurrent layers."""
        return lambda x: self.drop(False, x.transpose(0, 1), dropout).transpose(0, 1) if dropout else x

    def leak(
        self, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, **rest: Any
    ) -> Tensor:
        """Return a leaky ReLU whose slopes are drawn (rrelu)."""
        if self.seed is None or not training:
            return F.leaky_relu(input, (lower + upper) / 2)
        slopes = (lower + (upper - lower) * self.uniform(input)).to(input.dtype)
        return torch.where(input >= 0, input, slopes * input)

    # --- draws ---

    def blank(self, make: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        """Return an uninitialised tensor; under `vmap` one for each client, so that it can be drawn in place."""
        made = make(*args, **options)
        if self.seed is None or not is_batchedtensor(self.seed):
            return made
        return torch.zeros_like(made) + (self.seed * 0).to(made.dtype)

    def make(
        self, law: _Law, empty: Callable[..., Tensor], *args: Any, generator: object = None, **options: Any
    ) -> Any:
        """Draw a new tensor; `empty` makes one of its shape and type."""
        like = empty(*args, **options)
        return law(self.uniform(like)).to(like.dtype)

    def make_whole(self, *args: Any, generator: object = None, dtype: torch.dtype = torch.int64, **options: Any) -> Any:
        """Draw whole numbers: randint(high, size) or randint(low, high, size)."""
        *bounds, size = (*args, *(options.pop(name) for name in ("low", "high", "size") if name in options))
        low, high = (0, *bounds)[-2:]
        return _whole(low, high, self.uniform(torch.empty(size, **options))).to(dtype)

    def make_whole_like(self, like: Tensor, *bounds: int, **options: Any) -> Tensor:
        bounds = (*bounds, *(options.pop(name) for name in ("low", "high") if name in options))
        low, high = (0, *bounds)[-2:]
        empty = torch.empty_like(like, **options)
        return _whole(low, high, self.uniform(empty)).to(empty.dtype)

    def make_order(self, n: int, *, generator: object = None, dtype: torch.dtype = torch.int64, **options: Any) -> Any:
        """Draw a permutation."""
        return torch.argsort(self.uniform(torch.empty(n, **options))).to(dtype)

    def make_normal(
        self, mean: Tensor | float, std: Tensor | float = 1.0, size: Sequence[int] | None = None, *,
        generator: object = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Draw normal numbers, each with its own mean and deviation."""
        like = torch.as_tensor(mean) + torch.as_tensor(std) * 0 if size is None else torch.empty(size, **options)
        return mean + std * _normal(self.uniform(like)).to(like.dtype)

    def make_bits(self, input: Tensor, p: float | None = None, *, generator: object = None, **options: Any) -> Tensor:
        """Draw 0 or 1 with the given chances, of each element or of all."""
        return (self.uniform(input) < (input if p is None else p)).to(input.dtype)

    def fill(self, law: _Law, tensor: Tensor, *args: Any, generator: object = None, **options: Any) -> Tensor:
        """Draw in place."""
        return tensor.copy_(law(self.uniform(tensor), *args, **options))

    def fill_bits(self, tensor: Tensor, p: Tensor | float = 0.5, *, generator: object = None) -> Tensor:
        return tensor.copy_(self.uniform(tensor) < p)

    def inside(self, function: FunctionType, *args: Any, **options: Any) -> Any:
        """Call a function of torch's so that this mode sees what it calls, too."""
        with self:
            return _open(function)(*args, **options)


_Law = Callable[..., Tensor]


def _mask_shape(input: Tensor, channels: bool) -> torch.Size:
    return torch.Size([*input.shape[:2], *[1] * (input.dim() - 2)]) if channels else input.shape


def _uniform(u: Tensor, low: float = 0.0, high: float = 1.0, **named: float) -> Tensor:
    low, high = named.get("from", low), named.get("to", high)
    return low + (high - low) * u


def _normal(u: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return mean + std * math.sqrt(2) * torch.erfinv(2 * u - 1)


def _exponential(u: Tensor, lambd: float = 1.0) -> Tensor:
    return -torch.log(u) / lambd


def _whole(low: int, high: int, u: Tensor) -> Tensor:
    return torch.floor(low + (high - low) * u.double()).clamp(max=high - 1)


def _tensors(part: Any) -> list[Tensor]:
    parts = part if isinstance(part, list | tuple) else [part]
    return [each for each in parts if isinstance(each, Tensor)]


def _padded(mode: str, args: tuple[Any, ...]) -> bool:
    """Return whether a recurrent layer reads a padded tensor, not a packed sequence."""
    return not isinstance(args[1] if mode == "lstm" else args[2], Tensor)


def _at_rest(mode: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a recurrent layer's last three arguments, in evaluation mode."""
    return (False, *args[-2:]) if _padded(mode, args) else (args[-3], False, args[-1])


@cache
def _open(function: FunctionType) -> FunctionType:
    """Return a function of torch's without its question for overrides: it would call us again, for ever."""
    names = [name for name in function.__globals__ if name.startswith("has_torch_function")]
    own = function.__globals__ | dict.fromkeys(names, lambda *tensors: False)
    opened = FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


def _seeded() -> dict[Any, Callable[..., Any]]:
    """Return our version of each of torch's functions that draw; the first argument is the mode."""
    mode = SeededRandomness
    table: dict[Any, Callable[..., Any]] = {
        F.scaled_dot_product_attention: mode.attend,
        torch.randint: mode.make_whole, torch.randint_like: mode.make_whole_like, torch.randperm: mode.make_order,
        torch.normal: mode.make_normal, torch.bernoulli: mode.make_bits, Tensor.bernoulli: mode.make_bits,
        Tensor.bernoulli_: mode.fill_bits,
    }  # fmt: skip

    def add(functions: Sequence[Any], method: Callable[..., Any], *first: Any) -> None:
        for function in functions:
            table[function] = lambda mode, *args, **options: method(mode, *first, *args, **options)

    add((F.dropout, torch.dropout), mode.drop, False)
    add((F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout), mode.drop, True)
    add((F.alpha_dropout, torch.alpha_dropout), mode.drop_alpha, False)
    add((F.feature_alpha_dropout, torch.feature_alpha_dropout), mode.drop_alpha, True)
    add((F.rrelu, torch.rrelu), mode.leak)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        add((getattr(torch, name),), mode.recur, name, getattr(torch, name))
    law: _Law
    for name, law in (("rand", _uniform), ("randn", _normal)):
        add((getattr(torch, name),), mode.make, law, torch.empty)
        add((getattr(torch, f"{name}_like"),), mode.make, law, torch.empty_like)
    for name, law in (("uniform_", _uniform), ("normal_", _normal), ("exponential_", _exponential)):
        add((getattr(Tensor, name),), mode.fill, law)
    for make in (torch.empty, torch.empty_like, Tensor.new_empty):
        add((make,), mode.blank, make)
    for function in (F.multi_head_attention_forward, F.gumbel_softmax):
        add((function,), mode.inside, function)
    return table


_SEEDED = _seeded()
