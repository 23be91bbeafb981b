"""How many processes share a round. The contract, and the case of one process, which has nothing to share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedblur.client import ClientJob
from fedblur.diagnostics import Diagnostics
from fedblur.mechanisms.base import Release


@dataclass(frozen=True)
class Task:
    """What a process is asked to sum in a round: these clients' messages. Private, it stays inside the boundary."""

    job: ClientJob
    release: Release
    cohort: Tensor  # ids, int64


class Processes(Protocol):
    """The processes of a run, as the one that leads sees them."""

    def announce(self, task: Task) -> Task:
        """Tell all processes about the round; the leader's own part of it comes back."""
        ...

    def collect(self, total: Tensor, seen: Diagnostics, release: Release) -> tuple[Tensor, Diagnostics]:
        """The sum over all processes, and what they saw, at the leader."""
        ...


class Alone:
    """One process: its part is the whole cohort."""

    def announce(self, task: Task) -> Task:
        return task

    def collect(self, total: Tensor, seen: Diagnostics, release: Release) -> tuple[Tensor, Diagnostics]:
        return total, seen
