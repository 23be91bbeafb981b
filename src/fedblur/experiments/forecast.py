"""Forecasts of a table before it runs: noise, signal-to-noise and time of every cell. No data are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedblur.core.config import Config
from fedblur.data.dataset import Described
from fedblur.experiments.cost_model import COMPILING, estimate, program
from fedblur.experiments.recipe import parameters_of
from fedblur.experiments.result_store import Results
from fedblur.experiments.table_spec import Spec
from fedblur.privacy.planning import signal_to_noise
from fedblur.training.setup import plan_for
from fedblur.voting.release import VoteNoise, plan_votes
from fedblur.voting.setup import reserved_clients


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
        parts = []
        if known:
            minutes = (sum(known) + self.compiling) / 60
            parts.append(f"{len(known)} for about {minutes:.0f} minutes, {self.compiling / 60:.0f} of them compiling")
        if len(known) < len(left):
            parts.append(f"{len(left) - len(known)} of unknown time")
        return (
            f"{len(self.cells)} cells, {len(self.cells) - len(left)} of them done. "
            f"Left on {self.device}: {', and '.join(parts) or 'none'}."
        )


def forecast(spec: Spec, results: Results, device: str) -> Forecast:
    """Forecast what the cells of a table need."""
    ordered = sorted(spec.cells, key=lambda cell: cell.priority)
    left = {program(cell.config) for cell in ordered if cell.key not in results.found and cell.config.voting is None}
    compiling = COMPILING * len(left) if device == "cuda" else 0.0
    cells = []
    for cell in ordered:
        config, found = cell.config, results.found.get(cell.key)
        data: Described = config.dataset
        clients = config.clients or data.default_clients
        cells.append(CellForecast(
            cell.key, cell.label, cell.shown, config.seed, cell.priority,
            1 if config.voting is not None else config.rounds,
            *_noise(config, clients),
            estimate(config, clients, device, results.found.values()) if found is None else found["seconds"],
            found is not None,
        ))  # fmt: skip
    return Forecast(spec.title, device, tuple(cells), compiling)


def _noise(config: Config, clients: int | None) -> tuple[float | None, float | None]:
    """Return (σ, R)."""
    if clients is None:
        return None, None
    if config.voting is not None:
        voters = clients - reserved_clients(clients, config.voting)
        return plan_votes(config, voters, VoteNoise(1)).noise_multiplier, None
    form = config.dataset.form()
    if form is None:
        return None, None
    parameters = parameters_of(config.model, *form)
    plan = plan_for(config, clients, parameters)
    return plan.noise_multiplier, signal_to_noise(plan, parameters)
