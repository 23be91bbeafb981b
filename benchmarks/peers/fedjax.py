"""FedJAX: its federated averaging's client code under `for_each_client` (the JIT backend), its clip and its sum."""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

if not hasattr(jax, "tree_map"):
    jax.tree_map = jax.tree_util.tree_map  # FedJAX 0.0.17 calls it by the name that JAX has dropped

import fedjax
from fedjax.algorithms.fed_avg import create_train_for_each_client
from fedjax.core import tree_util

from peers.task import Channel, Floats, Task, load_task

Params = dict[str, dict[str, Any]]


def forward(task: Task, batch: dict[str, jax.Array]) -> jax.Array:
    """The task's model on images in NHWC, the layout that XLA prefers on a CPU."""
    x = batch["x"]
    if task.model == "cnn":
        x = jax.nn.relu(hk.Conv2D(32, 3, padding="VALID", name="conv1")(x))
        x = hk.Conv2D(64, 3, padding="VALID", name="conv2")(x)
        x = jax.nn.relu(hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"))
        x = jax.nn.relu(hk.Linear(128, name="dense")(hk.Flatten()(x)))
    else:
        x = jax.nn.relu(hk.Linear(task.weights()["dense1.weight"].shape[0], name="dense1")(hk.Flatten()(x)))
    return hk.Linear(task.classes, name="head")(x)


def to_haiku(task: Task) -> Params:
    """PyTorch's weights in Haiku's layouts."""
    weights, params = task.weights(), {}
    for layer in dict.fromkeys(name.split(".")[0] for name in task.names):
        w = weights[f"{layer}.weight"]
        params[layer] = {"w": jnp.asarray(_swap(layer, w)), "b": jnp.asarray(weights[f"{layer}.bias"])}
    return params


def to_vector(task: Task, params: Params) -> Floats:
    """Haiku's tensors as a vector in the task's order."""
    shapes, tensors = dict(zip(task.names, task.shapes, strict=True)), {}
    for layer, own in params.items():
        tensors[f"{layer}.bias"] = own["b"]
        tensors[f"{layer}.weight"] = _swap_back(layer, np.asarray(own["w"]), shapes[f"{layer}.weight"])
    return task.flatten(tensors)


def _swap(layer: str, w: Floats) -> Floats:
    if w.ndim == 4:
        return w.transpose(2, 3, 1, 0)  # OIHW to HWIO
    if layer == "dense":  # its inputs are an image flattened as CHW; here it is HWC
        side = _side(w.shape)
        return w.reshape(-1, 64, side, side).transpose(2, 3, 1, 0).reshape(-1, len(w))
    return w.T


def _swap_back(layer: str, w: Floats, shape: tuple[int, ...]) -> Floats:
    if w.ndim == 4:
        return w.transpose(3, 2, 0, 1)
    if layer == "dense":
        side = _side(shape)
        return w.reshape(side, side, 64, -1).transpose(3, 2, 0, 1)
    return w.T


def _side(shape: tuple[int, ...]) -> int:
    """Of the image that a dense layer of this shape [outputs, 64·side·side] reads."""
    return math.isqrt(shape[1] // 64)


def client_datasets(task: Task) -> list[fedjax.ClientDataset]:
    """Each client's samples in the order in which it reads them."""
    datasets = []
    for client in range(task.clients):
        x, y = task.samples(client)
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if x.ndim == 4 else x
        datasets.append(fedjax.ClientDataset({"x": x, "y": y.astype(np.int32)}))
    return datasets


def main() -> None:
    channel = Channel()
    task = load_task(channel.inputs)
    data, start, key = client_datasets(task), to_haiku(task), jax.random.PRNGKey(0)
    net = hk.transform(lambda batch: forward(task, batch))
    model = fedjax.create_model_from_haiku(net, data[0][: task.batch].all_examples(), _loss)
    train = create_train_for_each_client(fedjax.model_grad(model), fedjax.optimizers.sgd(task.learning_rate))

    def run() -> Floats:
        batches = [(client, own.batch(batch_size=task.batch), key) for client, own in enumerate(data)]
        clipped = (tree_util.tree_clip_by_global_norm(delta, task.clip_norm) for _, delta in train(start, batches))
        return -to_vector(task, tree_util.tree_sum(clipped))  # FedJAX's deltas point from the client to the server

    how = f"for_each_client, jit backend on {jax.default_backend()}, jax {jax.__version__}"
    channel.serve(run, f"fedjax {version('fedjax')}", how)


def _loss(batch: dict[str, jax.Array], logits: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], axis=1)
    return -picked[:, 0]


if __name__ == "__main__":
    main()
