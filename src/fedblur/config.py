"""The configuration of a run: one flat frozen dataclass. Its fields are the schema; unknown keys are errors.

A value that names a part (`model`, `method`, `server`, ...) is a name, or a table with a name and settings:
`model = "cnn"`, `model = { name = "cnn", variant = "a" }`, `method = ["blur", { name = "lus", sparsity = 0.5 }]`.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedblur.errors import ConfigError, RunError
from fedblur.registry import from_table, part, to_table


@dataclass(frozen=True)
class LocalTraining:
    """What one client does with the model it receives: Q steps of SGD."""

    steps: int = 10  # Q
    batch_size: int = 32
    learning_rate: float = 0.1  # η_l
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _at_least("local.steps", self.steps, 1)
        _at_least("local.batch_size", self.batch_size, 1)
        _positive("local.learning_rate", self.learning_rate)
        _within("local.momentum", self.momentum, 0, 1, "[0, 1)", right_open=True)
        if self.weight_decay < 0:
            raise ConfigError(f"local.weight_decay={self.weight_decay} must be 0 or more")


@dataclass(frozen=True)
class Config:
    """Everything that decides a run's result. Where it runs and where it is written is not in here."""

    # data
    dataset: Any = part("dataset", "digits")
    partition: Any = part("partition", None)  # None: the data set's own default
    clients: int | None = None  # N, training clients; None: the data set's own default
    validation_share: float = 0.1  # of all clients; they never train
    evaluate: Literal["test", "validation"] = "test"  # tune on "validation", report "test"
    # model and method
    model: Any = part("model", "logistic")
    method: Any = part("method", (), many=True)  # () is DP-FedAvg
    local: LocalTraining = field(default_factory=LocalTraining)
    # privacy
    epsilon: float | None = 2.0  # the target; inf: no noise
    noise_multiplier: float | None = None  # σ given instead of epsilon
    delta: float | str = "1/N"  # a number, "1/N" or "N^-1.1"
    accountant: Literal["pld", "rdp"] = "pld"
    clip_norm: float = 0.1  # S
    sample_rate: float = 0.1  # p
    sampling: Any = part("sampling", "poisson")
    mechanism: Any = part("mechanism", "gaussian")
    rounds: int = 100  # T
    # server
    server: Any = part("server", "sgd")
    averaging: Any = part("averaging", None)
    # run
    seed: int | None = None  # None: OS entropy, private; a number: reproducible, NOT PRIVATE
    data_seed: int = 0  # partition and splits: the same for all seeds, so that methods are compared pairwise
    eval_every: int | None = None  # None: about twenty times a run
    checkpoint_every: int = 10

    def __post_init__(self) -> None:
        for name, kind, many in _PART_FIELDS:
            from fedblur.registry import _convert_part

            object.__setattr__(self, name, _convert_part(kind, getattr(self, name), many))
        _check(self)

    @property
    def private(self) -> bool:
        """Whether there is noise at all."""
        return self.epsilon != math.inf if self.noise_multiplier is None else self.noise_multiplier > 0
