"""Who shares a round: one process, several, or the nodes of a federation. The contract, and the case of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fedblur.accounting import PrivacyPlan
from fedblur.client import ClientJob
from fedblur.data.population import Population
from fedblur.diagnostics import Diagnostics
from fedblur.engines.base import Engine
from fedblur.mechanisms.base import Release


def _inside() -> None:
    """Summing shows nothing to anyone: there is nothing to pay for yet."""


@dataclass(frozen=True)
class Task:
    """What a process is asked to sum in a round: these clients' messages. Private, it stays inside the boundary."""

    job: ClientJob
    release: Release
    cohort: Tensor  # ids, int64
    pay: Callable[[], None] = _inside  # writes the ledger's row: call it before anyone untrusted sees a sum


class Processes(Protocol):
    """The processes of a run, as the one that leads sees them."""

    @property
    def rank(self) -> int:
        """0 for the one that leads: it keeps the ledger."""
        ...

    @property
    def world(self) -> int:
        """How many processes share a cohort."""
        ...

    @property
    def engine(self) -> Engine | None:
        """Where this process's clients run; None: the engine that suits its device."""
        ...

    def ready(self, population: Population, parameters: int) -> None:
        """Wait until all have what they need."""
        ...

    def describe(self, machine: str) -> str:
        """Where and how the run computes, in words."""
        ...

    def statement(self, plan: PrivacyPlan) -> dict[str, Any]:
        """What the privacy statement must say because of who takes part."""
        ...

    def announce(self, task: Task) -> Task:
        """Tell all processes about the round; the leader's own part of it comes back."""
        ...

    def collect(self, total: Tensor, seen: Diagnostics, release: Release) -> tuple[Tensor, Diagnostics]:
        """The sum over all processes, and what they saw, at the leader."""
        ...


class Alone:
    """One process: its part is the whole cohort."""

    rank = 0
    world = 1
    engine = None

    def ready(self, population: Population, parameters: int) -> None:
        pass

    def describe(self, machine: str) -> str:
        return machine

    def statement(self, plan: PrivacyPlan) -> dict[str, Any]:
        return {}

    def announce(self, task: Task) -> Task:
        return task

    def collect(self, total: Tensor, seen: Diagnostics, release: Release) -> tuple[Tensor, Diagnostics]:
        return total, seen
