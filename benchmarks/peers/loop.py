"""A plain PyTorch loop over clients: what one writes without a framework. Ratios are to this one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peers.modules import batches, build_module
from peers.task import Channel, Floats, Task, load_task


def train_client(module: nn.Module, start: list[Tensor], data: list[tuple[Tensor, Tensor]], rate: float) -> Tensor:
    """One client's update as a vector."""
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), start, strict=True):
            parameter.copy_(value)
    optimiser = torch.optim.SGD(module.parameters(), lr=rate)
    for x, y in data:
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimiser.step()
    pairs = zip(module.parameters(), start, strict=True)
    return torch.cat([(parameter.detach() - value).flatten() for parameter, value in pairs])


def run_round(task: Task, module: nn.Module, start: list[Tensor], data: list[list[tuple[Tensor, Tensor]]]) -> Floats:
    """Train every client, clip, sum."""
    total = torch.zeros(len(task.start), dtype=torch.float64)
    for own in data:
        update = train_client(module, start, own, task.learning_rate)
        norm = torch.linalg.vector_norm(update, dtype=torch.float64)  # float32 norms err by 1e-5 on a million values
        total += update * (task.clip_norm / norm).clamp(max=1.0)
    return total.float().numpy()


def main() -> None:
    channel = Channel()
    task = load_task(channel.inputs)
    module = build_module(task)
    start = [parameter.detach().clone() for parameter in module.parameters()]
    data = [batches(task, client) for client in range(task.clients)]
    how = f"one client after another, torch.optim.SGD, intra-op threads: {torch.get_num_threads()}"
    channel.serve(lambda: run_round(task, module, start, data), f"torch {torch.__version__}", how)


if __name__ == "__main__":
    main()
