"""A cell's cost in seconds, before it is started: from results of cells like it, else from measurements.

A local step of a block of clients costs each client a share for its own copy of the weights and a share for each
sample of its batch. Where nothing is known about a model on a device, the answer is None: unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedblur.core.config import Config, as_first_kept, canonical, to_dict

COMPILING = 45.0  # seconds, once per process and program, on a GPU
_STARTING = 4.0  # seconds to load data, draw clients and calibrate


@dataclass(frozen=True)
class Cost:
    """Microseconds of one local step, measured in a round of many clients (benchmarks/README.md)."""

    per_client: float  # reading and writing the client's weights
    per_sample: float


# One H200, bf16, compiled, 15 November 2026: CNN-B 2.02 ms a step for 136 clients × 64 samples (benchmarks/gpu.py) and
# 1.45 ms for 136 × 29 (table1.toml, profiled alone); ResNet-18 28.5 ms for 30 × 50, of which 2.2 ms are memory
# traffic; the 39k GN-CNN 4.0 ms for 136 × 64.
MEASURED: Mapping[tuple[str, str], Cost] = {
    ("cuda", "cnn"): Cost(7.1, 0.12),
    ("cuda", "resnet18"): Cost(73.0, 17.5),
    ("cuda", "gn_cnn"): Cost(0.3, 0.46),
}


def estimate(
    config: Config, clients: int | None, device: str, results: Iterable[Mapping[str, Any]] = ()
) -> float | None:
    """Estimate seconds without compiling; None if nothing is known."""
    table = json.loads(canonical(to_dict(config)))  # as results hold it
    timed = [result for result in results if result.get("seconds") is not None]  # times stay where they were measured
    here = [result for result in timed if device in str(result.get("machine", device))]
    like = _kind_of(table)
    alike = [
        float(result["seconds"]) / max(1, int(result["rounds"]))
        for result in here
        if _kind_of(result["config"]) == like
    ]
    if alike:  # the quickest, as the first of a process also compiles
        return _STARTING + min(alike) * (1 if config.voting is not None else config.rounds)
    cost = MEASURED.get((device, config.model.part_name))
    if cost is None or clients is None or config.voting is not None:
        return None
    ratios = []
    for result in here:
        done = result["config"]
        # Runs of the same model and mechanism: the figures above are off by as much here as there.
        kin = all(done[key]["name"] == table[key]["name"] for key in ("model", "mechanism"))
        if kin and done["clients"] is not None and not any("queries" in method for method in done["method"]):
            ratios.append(float(result["seconds"]) / _by_measurement(done, cost))
    return _STARTING + _by_measurement({**table, "clients": clients}, cost) * min(ratios, default=1.0)


def _by_measurement(config: Mapping[str, Any], cost: Cost) -> float:
    """Estimate seconds of all local steps, by the figures above."""
    local, each = config["local"], (config["partition"] or {}).get("samples_per_client")
    batch = min(local["batch_size"], each or local["batch_size"])
    per_step = config["clients"] * config["sample_rate"] * (cost.per_client + batch * cost.per_sample) / 1e6
    gradients = 2 if any(method["name"] == "sam" for method in config["method"]) else 1
    return float(config["rounds"] * local["steps"] * per_step * gradients)


def _kind_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell's kind. Cells of one kind cost the same per round."""
    comparable = as_first_kept(config)  # results of earlier versions lack later keys
    kept = ("dataset", "model", "clients", "sample_rate", "local")
    parts = {key: comparable[key] for key in kept} | {"mechanism": config["mechanism"]["name"]}
    parts["each"] = (config["partition"] or {}).get("samples_per_client")
    parts["methods"] = [method["name"] for method in config["method"]]
    return parts


def program(config: Config) -> tuple[Any, ...]:
    """Return a cell's program. Cells with equal programs share compiled code within a process."""
    steering = tuple(method for method in config.method if config.voting is None and method.steers_steps)
    scoring = len(steering) < len(config.method)
    shapes = (config.clients, config.sample_rate, getattr(config.partition, "samples_per_client", None))
    return (str(config.dataset), str(config.model), *shapes, str(config.local), str(steering), scoring)
