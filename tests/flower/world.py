"""A federation in one process: Flower's real messages and our real apps, with a grid that calls nodes directly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedblur.core.config import from_dict, read_toml
from fedblur.data.population import Federation, Packed, Samples
from fedblur.flower.client import client_app
from fedblur.flower.server import serve
from fedblur.flower.settings import Deployment, Settings
from fedblur.privacy.ledger import Chain, read_spends
from fedblur.training.loop import Run, train

RUN = 77
SIZE = 60  # samples of a client: all alike, so that a client's number in a round is its place in the cohort


def digits(clients: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], tuple[np.ndarray, np.ndarray]]:
    """Equal parts of scikit-learn's digits, and the rest as test data."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    cuts = [slice(i * SIZE, (i + 1) * SIZE) for i in range(clients)]
    return [(x[cut], y[cut]) for cut in cuts], (x[1200:], y[1200:])


def deployment(folder: Path, clients: int, **changes: Any) -> Deployment:
    """A task in a folder; `changes` go into its configuration."""
    table = {
        "clients": clients, "rounds": 3, "sample_rate": 1.0, "clip_norm": 0.5, "noise_multiplier": 0.5,
        "model": "logistic", "seed": 3, "delta": 0.01, "eval_every": 1, "checkpoint_every": 1, "accountant": "rdp",
    }  # fmt: skip
    table |= changes
    local = table.pop("local", {"steps": 4, "batch_size": 20, "learning_rate": 0.5})
    lines = [f"{key} = {_toml(value)}" for key, value in table.items() if value is not None]
    path = folder / "fedblur.toml"
    path.write_text("\n".join([*lines, f"local = {_toml(local)}"]) + "\n")
    parts, test = digits(clients)
    return Deployment(path, (1, 8, 8), 10, lambda node: parts[int(node["partition-id"])], lambda: test)


SECURE = {"name": "ddgauss", "mode": "exact", "min_cohort": 3, "bits": 20}


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


def simulated(task: Deployment, folder: Path, order: list[int] | None = None) -> Run:
    """The simulator's run of the same task; client i has the data of part order[i]."""
    config = from_dict(read_toml(task.config))
    parts, test = digits(config.clients)
    parts = [parts[i] for i in (order or range(config.clients))]
    x, y = (torch.from_numpy(np.concatenate(values)) for values in zip(*parts, strict=True))
    starts, sizes = SIZE * torch.arange(config.clients), torch.full((config.clients,), SIZE)
    held = Samples(*(torch.from_numpy(values) for values in test))
    data = Federation("flower", Packed(x, y.long(), starts, sizes, 10), None, 0, held)
    return train(config, out=folder, federation=data)


class Lost(Exception):
    """A node that gives no reply."""


class LoopGrid(Grid):
    """Nodes 100, 101, … in this process. `meddle` may change, replace or lose (raise Lost) a node's reply."""

    def __init__(
        self, task: Deployment, clients: int, trust: str, meddle: Callable[..., Message] | None = None
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, 1, 1
        self.app, self.meddle = client_app(task), meddle
        self.contexts = {
            100 + i: Context(RUN, 100 + i, {"partition-id": i}, RecordDict(), {"trust": trust}) for i in range(clients)
        }
        self.replies: dict[str, Message] = {}
        self.asked: list[Message] = []
        self.received: list[Message] = []  # all that the server ever sees

    def set_run(self, run: Any) -> None:
        pass

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=RUN)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            ids.append(message.object_id)
            self.asked.append(message)
            node = message.metadata.dst_node_id
            try:
                reply = self.app(message, self.contexts[node])
                self.replies[ids[-1]] = self.meddle(message, reply) if self.meddle else reply
            except Lost:
                pass
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = [self.replies.pop(message_id) for message_id in message_ids if message_id in self.replies]
        self.received += found
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        raise NotImplementedError


def kind_of(message: Message) -> str:
    return message.metadata.message_type.removeprefix("train.")


def federated(task: Deployment, grid: Grid, folder: Path, trust: str, deadline: float = 5.0) -> Run:
    return serve(task, grid, Settings(trust=trust, deadline=deadline, start_timeout=5.0, out=str(folder)))


def weights(run: Run) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in run.module.parameters()])


def paid_rounds(run: Path) -> list[int]:
    """The rounds that a run's ledger has paid for, in order; a round that was paid twice comes twice."""
    return [round_ for round_, _ in read_spends(Chain(run / "ledger.jsonl").read())]
