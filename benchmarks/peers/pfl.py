"""pfl-research: its simulated backend, its FederatedAveraging and its norm clipping; no evaluation, no server step."""

from __future__ import annotations

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
from peers.task import Channel, Floats, Task, load_task


class Trainable(nn.Module):
    """A module with the two methods that pfl asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.inner(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> Metrics:
        return Metrics()  # never asked for: rounds are measured without evaluation


def users(task: Task) -> FederatedDataset:
    """The task's clients, all of them once a round and in the same order."""
    tensors = [tuple(map(torch.from_numpy, task.samples(client))) for client in range(task.clients)]
    sampler = MinimizeReuseUserSampler(list(range(task.clients)))
    return FederatedDataset(lambda user: PyTorchTensorDataset(tensors[user], user_id=str(user)), sampler)


def context_of(task: Task) -> CentralContext[Any, Any]:
    train = NNTrainHyperParams(local_batch_size=task.batch, local_num_epochs=1, local_learning_rate=task.learning_rate)
    params = NNAlgorithmParams(
        central_num_iterations=1000, evaluation_frequency=0, train_cohort_size=task.clients, val_cohort_size=None
    )
    return CentralContext(
        current_central_iteration=0,
        do_evaluation=False,
        cohort_size=task.clients,
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
    clipping = CentrallyAppliedPrivacyMechanism(NormClippingOnly(order=2, clipping_bound=task.clip_norm))
    data = users(task)
    backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=[clipping])
    algorithm, context = FederatedAveraging(), context_of(task)

    def run() -> Floats:
        statistics, _ = backend.gather_results(model, algorithm, central_context=context)
        return task.flatten({name.removeprefix("inner."): tensor for name, tensor in statistics.items()})

    how = f"SimulatedBackend, FederatedAveraging, intra-op threads: {torch.get_num_threads()}"
    channel.serve(run, f"pfl {version('pfl')}", how)


if __name__ == "__main__":
    main()
