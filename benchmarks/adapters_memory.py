"""The most memory that clients with adapters take on the CPU: the frozen part is shared, only adapters are each one's.

    PYTHONPATH=src python benchmarks/adapters_memory.py [--clients 64] [--layers 6] [--hidden 384] [--tokens 16]

A randomly initialised BERT of MiniLM's size with peft LoRA (rank 4 on query, value) trains 1 client, then 64, each in
a process of its own. What a process takes beyond the libraries is compared with the bound: twice what one client takes,
plus 64 times the adapters. `--engine vectorised` sizes its own blocks; `--block 64` puts all clients into one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from fedblur.engines.choice import activation_bytes, choose_engine
from fedblur.engines.local import LocalEngine


def measured(clients: int, given: argparse.Namespace) -> None:
    """Train so many clients for two steps, and print: the most memory, before anything was built, and what of it."""
    import torch
    from memory import most_memory
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    from fedblur.core.config import LocalTraining
    from fedblur.core.rng import Seeded
    from fedblur.data.population import Packed, Samples
    from fedblur.learning.client import ClientJob
    from fedblur.learning.model_checks import for_training
    from fedblur.learning.module_function import Layout, as_function, initial_vector

    torch.set_num_threads(1)
    config = BertConfig(
        hidden_size=given.hidden, num_hidden_layers=given.layers, num_attention_heads=given.hidden // 32,
        intermediate_size=4 * given.hidden, num_labels=3,
    )  # fmt: skip
    before = most_memory()
    adapters = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    module = for_training(get_peft_model(BertForSequenceClassification(config), adapters))
    layout = Layout.of(module)
    samples = 2 * given.batch
    x = torch.randint(0, config.vocab_size, (clients * samples, given.tokens))
    y = torch.randint(0, 3, (clients * samples,))
    sizes = torch.full((clients,), samples)
    population = Packed(x, y, torch.cumsum(sizes, 0) - sizes, sizes, 3)
    local = LocalTraining(steps=2, batch_size=given.batch, learning_rate=0.1)
    job = ClientJob(as_function(module), layout, layout.unflatten(initial_vector(module)), local, (), 1.0)
    own = activation_bytes(job, module, Samples(x, y), 3)
    cpu = torch.device("cpu")
    engine = choose_engine(population, module, layout.total, cpu, given.engine, cohort=clients, activations=own)
    if given.block and isinstance(engine, LocalEngine):
        engine.block_size = min(given.block, clients)
    for block in engine.map_clients(job, torch.arange(clients), Seeded.root(0)):
        assert bool(block.bounded.value.isfinite().all())
    weights = sum(tensor.nbytes for tensor in module.parameters())
    print(2**30 * (most_memory() - before), weights, 4 * layout.total, repr(engine), sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("clients", 64), ("layers", 6), ("hidden", 384), ("tokens", 16), ("batch", 4), ("block", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--engine", choices=["vectorised", "sequential"], default="vectorised")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measured(given.measure, given)
        return 0
    took = {}
    for clients in (1, given.clients):
        command = [sys.executable, *sys.argv, "--measure", str(clients)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        took[clients], (weights, adapters), engine = float(lines[-4]), map(int, lines[-3:-1]), lines[-1]
        print(f"{clients:3} clients: {took[clients] / 2**20:6.0f} MiB ({engine})")
    bound = 2 * took[1] + given.clients * adapters
    print(f"the model's weights: {weights / 2**20:.0f} MiB; one client's adapters: {adapters / 2**20:.2f} MiB")
    within = took[given.clients] <= bound
    print(f"{took[given.clients] / 2**20:.0f} MiB {'<=' if within else '> '} {bound / 2**20:.0f} MiB: the bound")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
