"""pfl-research: its simulated backend, its FederatedAveraging and its norm clipping; no evaluation, no server step."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.common_types import Population
from pfl.context import CentralContext
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism, NormClippingOnly
from torch import Tensor, nn

from peers.modules import build_module
from peers.task import Channel, Floats, load_task


class Trainable(nn.Module):
    """A module with the two methods that pfl asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.inner(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> Metrics:
        return Metrics()  # never asked for: rounds are measured without evaluation


def backend_of(client: Callable[[int], Any], clients: int, clip_norm: float) -> SimulatedBackend:
    """All clients once a round and in the same order, clipped."""
    data = FederatedDataset(client, MinimizeReuseUserSampler(list(range(clients))))
    clipping = CentrallyAppliedPrivacyMechanism(NormClippingOnly(order=2, clipping_bound=clip_norm))
    return SimulatedBackend(training_data=data, val_data=data, postprocessors=[clipping])


def context_for(clients: int, batch: int, epochs: int, learning_rate: float) -> CentralContext[Any, Any]:
    train = NNTrainHyperParams(local_batch_size=batch, local_num_epochs=epochs, local_learning_rate=learning_rate)
    params = NNAlgorithmParams(
        central_num_iterations=1000, evaluation_frequency=0, train_cohort_size=clients, val_cohort_size=None
    )
    return CentralContext(
        current_central_iteration=0,
        do_evaluation=False,
        cohort_size=clients,
        population=Population.TRAIN,
        algorithm_params=params,
        model_train_params=train,
        seed=0,
    )


def main() -> None:
    channel = Channel()
    task = load_task(channel.inputs)
    module = Trainable(build_module(task))
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    tensors = [tuple(map(torch.from_numpy, task.samples(client))) for client in range(task.clients)]
    clients = [PyTorchTensorDataset(own, user_id=str(i)) for i, own in enumerate(tensors)]
    backend = backend_of(clients.__getitem__, task.clients, task.clip_norm)
    algorithm = FederatedAveraging()
    context = context_for(task.clients, task.batch, epochs=1, learning_rate=task.learning_rate)

    def run() -> Floats:
        statistics, _ = backend.gather_results(model, algorithm, central_context=context)
        return task.flatten({name.removeprefix("inner."): tensor for name, tensor in statistics.items()})

    how = f"SimulatedBackend, FederatedAveraging, intra-op threads: {torch.get_num_threads()}"
    channel.serve(run, f"pfl {version('pfl')}", how)


if __name__ == "__main__":
    main()
