"""The Flower client: a ClientApp as Flower's PyTorch guide lays it out, with Flower's own clipping as a mod.

A module of its own, so that Ray's workers import it once and keep what it has read.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from torch import Tensor, nn

from peers.modules import batches, build_module
from peers.task import Task, load_task

app = ClientApp(mods=[fixedclipping_mod])


@lru_cache(maxsize=1)
def _loaded(inputs: str) -> tuple[Task, nn.Module, list[list[tuple[Tensor, Tensor]]]]:
    task = load_task(inputs)
    return task, build_module(task), [batches(task, client) for client in range(task.clients)]


@app.train()
def train(message: Message, context: Context) -> Message:
    """Load the weights that came, train on this partition's batches, send the weights back."""
    task, module, data = _loaded(str(message.content["config"]["inputs"]))
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(module.parameters(), lr=task.learning_rate)
    for x, y in data[int(context.node_config["partition-id"])]:
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimiser.step()
    content = RecordDict(
        {
            "arrays": ArrayRecord(module.state_dict()),
            "metrics": MetricRecord({"num-examples": task.steps * task.batch}),
        }
    )
    return Message(content=content, reply_to=message)
