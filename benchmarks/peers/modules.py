"""The benchmark's models for PyTorch peers: layer for layer what fedblur's `cnn` (variant a) and `mlp` build."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from peers.task import Floats, Task


def build_module(task: Task) -> nn.Sequential:
    """The task's model with its initial weights."""
    module = _cnn(task) if task.model == "cnn" else _mlp(task)
    load(module, task.weights())
    return module


def _cnn(task: Task) -> nn.Sequential:
    channels, height, width = task.shape
    # Pooling before the ReLU gives the same values with less work; all PyTorch systems get this order.
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, 3),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            dense=nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            relu3=nn.ReLU(),
            head=nn.Linear(128, task.classes),
        )
    )


def _mlp(task: Task) -> nn.Sequential:
    hidden, inputs = task.weights()["dense1.weight"].shape
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            dense1=nn.Linear(inputs, hidden),
            relu1=nn.ReLU(),
            head=nn.Linear(hidden, task.classes),
        )
    )


def load(module: nn.Module, weights: dict[str, Floats]) -> None:
    """Copy weights into a module."""
    module.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})


def batches(task: Task, client: int) -> list[tuple[Tensor, Tensor]]:
    """A client's batches as tensors, one a step."""
    x, y = task.samples(client)
    return list(zip(torch.from_numpy(x).split(task.batch), torch.from_numpy(y).split(task.batch), strict=True))
