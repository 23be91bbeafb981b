"""What a table will need before any of it runs: noise, signal-to-noise and time of every cell. No data are needed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedblur.config import Config
from fedblur.costs import COMPILING, estimate, program
from fedblur.data.raw import Described, Form
from fedblur.planning import signal_to_noise
from fedblur.results import Results
from fedblur.setup import plan_for
from fedblur.spec import Cell, Spec
from fedblur.voting.pool import reserved_clients
from fedblur.voting.release import VoteNoise, plan_votes


@dataclass(frozen=True)
class CellForecast:
    """One cell; None where it cannot be known without the data, or was never measured."""

    key: str  # of its settings: tables may share a cell
    name: str
    axes: dict[str, Any]
    seed: int | None
    priority: int
    rounds: int
    noise_multiplier: float | None  # σ
    signal_to_noise: float | None  # R
    seconds: float | None
    done: bool


@dataclass(frozen=True)
class Forecast:
    """A table, cell by cell, in the order in which they would run."""

    title: str
    device: str
    cells: tuple[CellForecast, ...]
    compiling: float  # seconds, for all programs of the cells that are left, in one process

    @property
    def total(self) -> str:
        left = [cell for cell in self.cells if not cell.done]
        known = [cell.seconds for cell in left if cell.seconds is not None]
        minutes = (sum(known) + self.compiling) / 60
        unknown = len(left) - len(known)
        parts = []
        if known:
            parts.append(f"{len(known)} for about {minutes:.0f} minutes, {self.compiling / 60:.0f} of them compiling")
        if unknown:
            parts.append(f"{unknown} of unknown time")
        return (
            f"{len(self.cells)} cells, {len(self.cells) - len(left)} of them done. "
            f"Left on {self.device}: {', and '.join(parts) or 'none'}."
        )


def forecast(spec: Spec, results: Results, device: str) -> Forecast:
    """What the cells of a table need."""
    ordered = sorted(spec.cells, key=lambda cell: cell.priority)
    left = {program(cell.config) for cell in ordered if cell.key not in results.found and cell.config.voting is None}
    compiling = COMPILING * len(left) if device == "cuda" else 0.0
    return Forecast(spec.title, device, tuple(_cell(cell, results, device) for cell in ordered), compiling)


def _cell(cell: Cell, results: Results, device: str) -> CellForecast:
    config = cell.config
    sigma, ratio = _noise(config, _clients(config))
    found: Mapping[str, Any] | None = results.found.get(cell.key)
    known = results.found.values()
    seconds = found["seconds"] if found is not None else estimate(config, _clients(config), device, known)
    rounds = 1 if config.voting is not None else config.rounds
    return CellForecast(
        cell.key, cell.label, cell.shown, config.seed, cell.priority, rounds, sigma, ratio, seconds, found is not None
    )


def _clients(config: Config) -> int | None:
    data: Described = config.dataset
    return config.clients or data.default_clients


def _noise(config: Config, clients: int | None) -> tuple[float | None, float | None]:
    """(σ, R)."""
    if clients is None:
        return None, None
    if config.voting is not None:
        voters = clients - reserved_clients(clients, config.voting)
        plan = plan_votes(
            voters,
            VoteNoise(1),
            delta=config.delta,
            accountant=config.accountant,
            epsilon=config.epsilon,
            noise_multiplier=config.noise_multiplier,
        )
        return plan.noise_multiplier, None
    form = config.dataset.form()
    parameters = None if form is None else _parameters(config.model, form)
    if parameters is None:
        return None, None
    plan = plan_for(config, clients, parameters)
    return plan.noise_multiplier, signal_to_noise(plan, parameters)


@functools.lru_cache(maxsize=64)
def _parameters(model: Any, form: Form) -> int:
    """d; nothing is allocated for it."""
    with torch.device("meta"):
        module = model.build(*form)
    return sum(tensor.numel() for tensor in module.parameters() if tensor.requires_grad)
