"""Flower's simulation on Ray, one CPU a client: FedAvg inside its wrapper for client-side clipping, noise 0.

Flower averages weights; the clipped sum is the number of clients times how far the average moved.
"""

from __future__ import annotations

import os
from importlib.metadata import version

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from flwr.simulation import run_simulation

from peers.flower_client import app as client
from peers.modules import build_module
from peers.task import Channel, Floats, load_task

server = ServerApp()
channel = Channel()
task = load_task(channel.inputs)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """A round whenever the driver asks for one."""
    everyone = task.clients
    average = FedAvg(fraction_evaluate=0.0, min_train_nodes=everyone, min_available_nodes=everyone)
    strategy = DifferentialPrivacyClientSideFixedClipping(
        average, noise_multiplier=0.0, clipping_norm=task.clip_norm, num_sampled_clients=everyone
    )
    state = build_module(task).state_dict()
    config = ConfigRecord({"inputs": channel.inputs})

    def run() -> Floats:
        result = strategy.start(grid, ArrayRecord(state), num_rounds=1, train_config=config)
        return (task.flatten(result.arrays.to_torch_state_dict()) - task.start) * everyone

    cores = os.cpu_count() or 1
    channel.serve(run, f"flwr {version('flwr')}, ray {version('ray')}", f"run_simulation on Ray, {cores} workers")


if __name__ == "__main__":
    run_simulation(server, client, task.clients, backend_config={"client_resources": {"num_cpus": 1}})
