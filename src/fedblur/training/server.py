"""Stage 6, server step: post-processing, free of privacy cost.

In: the noisy sum divided by the constant pN, `mean_update` [d]. Out: a new ServerState; inputs are not
changed. Rounds count from 0. All that an optimiser or an average remembers lies in `ServerState.buffers`,
under names that start with "server.", "averaging." or "clipping.", so that one flat dict of tensors is the whole
checkpoint. With personal parameters it holds the row with which clients begin, too.

    state = averaging.init(server.init(theta))
    state = server.step(state, mean_update, round_=t, rounds=T, noise_std=σS/(pN))
    state = averaging.update(state, round_=t, rounds=T)
    model = published(state, averaging)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedblur.core.errors import ConfigError
from fedblur.core.registry import register

FIRST_ROW = "personal.first"  # the buffer [k] with what stays on clients, as it is before their first round


@dataclass(frozen=True)
class ServerState:
    """All that the server carries from round to round."""

    theta: Tensor  # [d]
    buffers: dict[str, Tensor]  # each [d]; the clip norm of adaptive clipping is a scalar
    round: int  # rounds done, and so the number of the next one

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that a checkpoint holds besides the round; no two tensors share memory."""
        return {"theta": self.theta, **self.buffers}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], round_: int) -> ServerState:
        """Undo `tensors`."""
        buffers = {name: tensor for name, tensor in tensors.items() if name != "theta"}
        return cls(tensors["theta"], buffers, round_)


@dataclass(frozen=True)
class Server(ABC):
    """A server optimiser: theta <- theta + rate * direction. A subclass gives direction and memory."""

    learning_rate: float = 1.0  # η_g: of the server's step
    schedule: Literal["constant", "cosine", "linear"] = "constant"  # how the learning rate falls over the rounds
    final_share: float = 0.0  # cosine and linear: the share of the learning rate that is left after the last round

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"server.learning_rate={self.learning_rate} must be positive and finite")
        if self.schedule not in ("constant", "cosine", "linear"):
            raise ConfigError(f'server.schedule={self.schedule!r} must be "constant", "cosine" or "linear"')
        if not 0 <= self.final_share <= 1:
            raise ConfigError(f"server.final_share={self.final_share} must be in [0, 1]")
        if self.final_share and self.schedule == "constant":
            raise ConfigError(f'server.final_share={self.final_share} needs server.schedule = "cosine" or "linear"')

    @abstractmethod
    def memory(self, theta: Tensor) -> dict[str, Tensor]:
        """Return what is remembered before the first round."""

    @abstractmethod
    def direction(
        self, buffers: Mapping[str, Tensor], mean_update: Tensor, round_: int, noise_std: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the direction [d], and what is remembered afterwards. Pure."""

    def init(self, theta: Tensor) -> ServerState:
        """Return the state before the first round."""
        theta = theta.detach().clone()
        return ServerState(theta, self.memory(theta), round=0)

    def step(
        self, state: ServerState, mean_update: Tensor, *, round_: int, rounds: int, noise_std: float
    ) -> ServerState:
        """Take one server step. `noise_std` is the known noise on each coordinate of `mean_update`: σS/(pN)."""
        if mean_update.shape != state.theta.shape:
            raise ValueError(f"mean_update {tuple(mean_update.shape)} != theta {tuple(state.theta.shape)}")
        update = mean_update.to(state.theta.dtype)  # a sum may come in float64; the state stays float32
        direction, memory = self.direction(state.buffers, update, round_, noise_std)
        theta = state.theta + self.rate(round_, rounds) * direction
        return ServerState(theta, {**state.buffers, **memory}, round=round_ + 1)

    def rate(self, round_: int, rounds: int) -> float:
        """Return a round's learning rate. A falling one ends after the last round: no round is paid for in vain."""
        if not 0 <= round_ < rounds:
            raise ValueError(f"round_={round_} must be in [0, {rounds}): rounds count from 0")
        if self.schedule == "constant":
            return self.learning_rate
        done = round_ / rounds
        falling = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2  # 0 after round T - 1
        return self.learning_rate * (self.final_share + (1 - self.final_share) * falling)


@register("server", "sgd")
@dataclass(frozen=True)
class Sgd(Server):
    """FedAvg: theta <- theta + η_g G."""

    def memory(self, theta: Tensor) -> dict[str, Tensor]:
        return {}

    def direction(
        self, buffers: Mapping[str, Tensor], mean_update: Tensor, round_: int, noise_std: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return mean_update, {}


@register("server", "momentum")
@dataclass(frozen=True)
class Momentum(Server):
    """FedAvgM: m <- βm + G; theta <- theta + η_g m. In the long run a step is 1/(1 - β) times that of sgd."""

    momentum: float = 0.9  # β: how much of the earlier direction is kept

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share("server.momentum", self.momentum)

    def memory(self, theta: Tensor) -> dict[str, Tensor]:
        return {"server.momentum": torch.zeros_like(theta)}

    def direction(
        self, buffers: Mapping[str, Tensor], mean_update: Tensor, round_: int, noise_std: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        moving = self.momentum * buffers["server.momentum"] + mean_update
        return moving, {"server.momentum": moving}


@register("server", "adam")
@dataclass(frozen=True)
class Adam(Server):
    """FedAdam whose second moment is corrected for the noise that is known to be in it.

    m̂ and v̂ are the bias-corrected moving means of G and G². The noise adds noise_std² to every coordinate
    of v̂, which would turn Adam into plain momentum, so it is taken off again:

        direction = m̂ / sqrt(max(v̂ - noise_std², floor))

    Under noise alone the difference scatters around 0 with a known standard error, noise_std² √(2w), where
    w is the sum of the squared weights in the moving mean. Less than that tells us nothing, so one standard
    error is the floor (or epsilon², if larger). Without noise this is Adam with max in place of +. Like
    Adam it does not depend on the scale of G, so the clip norm S is no second learning rate here.
    """

    learning_rate: float = 0.01  # η_g: of the server's step
    beta1: float = 0.9  # β1: memory of the mean
    beta2: float = 0.99  # β2: memory of the second moment
    epsilon: float = 1e-8  # keeps the division finite; not the privacy loss

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share("server.beta1", self.beta1)
        _check_share("server.beta2", self.beta2)
        if not 0 < self.epsilon < math.inf:
            raise ConfigError(f"server.epsilon={self.epsilon} must be positive and finite")

    def memory(self, theta: Tensor) -> dict[str, Tensor]:
        return {"server.first": torch.zeros_like(theta), "server.second": torch.zeros_like(theta)}

    def direction(
        self, buffers: Mapping[str, Tensor], mean_update: Tensor, round_: int, noise_std: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        first = self.beta1 * buffers["server.first"] + (1 - self.beta1) * mean_update
        second = self.beta2 * buffers["server.second"] + (1 - self.beta2) * mean_update.square()
        power = self.signal_power(second, round_, noise_std).clamp(min=self.floor(round_, noise_std))
        unbiased = first / (1 - self.beta1 ** (round_ + 1))
        return unbiased / power.sqrt(), {"server.first": first, "server.second": second}

    def signal_power(self, second: Tensor, round_: int, noise_std: float) -> Tensor:
        """Return v̂ - noise_std²: an unbiased estimate of the mean square without the noise; it can be negative."""
        return second / (1 - self.beta2 ** (round_ + 1)) - noise_std**2

    def floor(self, round_: int, noise_std: float) -> float:
        """Return one standard error of `signal_power` under noise alone, and at least epsilon²."""
        faded = self.beta2 ** (round_ + 1)
        squared_weights = (1 - self.beta2) / (1 + self.beta2) * (1 + faded) / (1 - faded)
        return max(noise_std**2 * math.sqrt(2 * squared_weights), self.epsilon**2)


@dataclass(frozen=True)
class Averaging(ABC):
    """An average of the iterates, kept in the state beside theta. It is what is evaluated and published."""

    def init(self, state: ServerState) -> ServerState:
        """Return the state before the first round, with the average in it."""
        return _with_mean(state, state.theta.clone())

    @abstractmethod
    def update(self, state: ServerState, *, round_: int, rounds: int) -> ServerState:
        """Take the theta that round `round_` has just produced into the average."""


@register("averaging", "ema")
@dataclass(frozen=True)
class Ema(Averaging):
    """Exponential moving average: e <- β_t e + (1 - β_t) theta, β_t = min(decay, (1 + t) / (10 + t))."""

    decay: float = 0.99  # how much of the average each round keeps

    def __post_init__(self) -> None:
        _check_share("averaging.decay", self.decay)

    def update(self, state: ServerState, *, round_: int, rounds: int) -> ServerState:
        keep = min(self.decay, (1 + round_) / (10 + round_))
        return _with_mean(state, keep * state.buffers["averaging.mean"] + (1 - keep) * state.theta)


@register("averaging", "tail")
@dataclass(frozen=True)
class Tail(Averaging):
    """The mean of the last `share` of the rounds' iterates; until they begin, the current iterate."""

    share: float = 0.25  # of all rounds, from the end

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"averaging.share={self.share} must be in (0, 1]")

    def update(self, state: ServerState, *, round_: int, rounds: int) -> ServerState:
        start = rounds - max(1, round(self.share * rounds))
        count = round_ - start + 1  # iterates in the mean, this one included
        if count <= 1:
            return _with_mean(state, state.theta.clone())
        mean = state.buffers["averaging.mean"]
        return _with_mean(state, mean + (state.theta - mean) / count)


def published(state: ServerState, averaging: Averaging | None) -> Tensor:
    """Return the vector [d] to evaluate and to release: the average if there is one, else the last iterate."""
    return state.theta if averaging is None else state.buffers["averaging.mean"]


def _with_mean(state: ServerState, mean: Tensor) -> ServerState:
    return replace(state, buffers={**state.buffers, "averaging.mean": mean})


def _check_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"{name}={value} must be in [0, 1)")
