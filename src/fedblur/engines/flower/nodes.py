"""The nodes of a federation, as `train.py` sees them: where clients run, and in `secure-sum` who adds them up.

    central      an engine: asks the cohort for clipped updates, checks each anew, yields those that hold
    secure-sum   the cohort sums itself under masks; the server gets one vector modulo 2^b, or an aborted round

A node that is unavailable, late or refused counts as zero. The denominator stays pN.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedblur import accounting
from fedblur.accounting import PrivacyPlan
from fedblur.client import Block, ClientJob
from fedblur.config import Config
from fedblur.data.population import Population
from fedblur.diagnostics import Diagnostics
from fedblur.engines.flower.exchange import Exchange, Question, Traffic
from fedblur.engines.flower.roster import Roster
from fedblur.engines.flower.sums import Answers, SecureRound
from fedblur.engines.processes import Task
from fedblur.errors import ConfigError
from fedblur.mechanisms.base import Release
from fedblur.mechanisms.hadamard import Rotation
from fedblur.mechanisms.secure_sum import DiscreteMechanism
from fedblur.rng import Rng

_ZERO_OUT = "one client's data against no data (zero-out); that a node is enrolled and online is not hidden"


class Nodes:
    """What both trust models share."""

    rank = 0
    world = 1
    trust = ""

    def __init__(self, exchange: Exchange, roster: Roster, config: Config) -> None:
        self.exchange, self.roster, self.config = exchange, roster, config
        self.device = torch.device("cpu")
        self.task: Task | None = None

    def __repr__(self) -> str:
        return f"{len(self.roster.nodes)} Flower nodes ({self.trust})"

    @property
    def engine(self) -> Nodes:
        return self

    def ready(self, population: Population, parameters: int) -> None:
        """Wait for all nodes; who is enrolled stays the same for the whole run."""
        self.roster.wait(self.exchange.grid, population.clients)

    def describe(self, machine: str) -> str:
        return machine

    def announce(self, task: Task) -> Task:
        self.task, self.exchange.traffic = task, Traffic()
        return task

    def collect(self, total: Tensor, seen: Diagnostics, release: Release) -> tuple[Tensor, Diagnostics]:
        assert self.task is not None
        return total, Seen(
            seen.coordinates, seen.clip_norm, cohort=len(self.task.cohort), traffic=self.exchange.traffic
        )

    def map_clients(self, job: ClientJob, ids: Tensor, rng: Rng) -> Iterator[Block]:
        yield from ()

    def statement(self, plan: PrivacyPlan) -> dict[str, Any]:
        return {"adjacency": _ZERO_OUT}

    def question(self, job: ClientJob, client: int) -> Question:
        """What a node is told to train, and with how much noise the sum will be released."""
        assert self.task is not None
        message, noise = job.message, self.task.release.noise_multiplier
        values = {
            "clip_norm": job.clip_norm, "bit_weight": message.bit_weight, "noise_multiplier": noise, "client": client,
        }  # fmt: skip
        arrays = {"start": job.layout.flatten(job.start).cpu().numpy().astype("<f4").tobytes()}
        if message.support is not None:
            arrays["support"] = message.support.cpu().numpy().astype("<i8").tobytes()
        return values, arrays


class Seen(Diagnostics):
    """What a server knows of a round: who answered. Norms and losses stay on the nodes."""

    def __init__(self, coordinates: int, clip_norm: float, cohort: int, traffic: Traffic) -> None:
        super().__init__(coordinates, clip_norm)
        self.cohort, self.traffic = cohort, traffic

    def report(self, noise_std: float, expected_cohort: float) -> dict[str, Any]:
        figures: dict[str, Any] = super().report(noise_std, expected_cohort)
        return figures | {"cohort": self.cohort, "refused": None, "nodes": asdict(self.traffic)}


class CentralNodes(Nodes):
    """A trusted server: it sees each clipped update, checks its norm anew, and adds the noise."""

    trust = "central"

    def __init__(self, exchange: Exchange, roster: Roster, config: Config) -> None:
        super().__init__(exchange, roster, config)
        if getattr(config.mechanism, "mode", "fast") != "fast":
            raise ConfigError(
                'trust = "central" adds the noise on the server, but the mechanism splits it into shares of clients; '
                'set mechanism = "gaussian" or trust = "secure-sum"'
            )

    def map_clients(self, job: ClientJob, ids: Tensor, rng: Rng) -> Iterator[Block]:
        assert self.task is not None
        width = job.message.width(job.layout.total)
        questions = {self.roster.nodes[client]: self.question(job, client) for client in ids.tolist()}
        for node, said in self.exchange.ask("update", self.task.release.round_, questions, length=4 * width):
            row = torch.from_numpy(np.frombuffer(said["array"], dtype="<f4").astype(np.float32))[None]
            bounded, norms, holds = job.message.accept(row, job.clip_norm)
            if not bool(holds[0]):
                self.exchange.traffic.answered -= 1
                self.exchange.refuse(self.task.release.round_, node, "its norm is not finite, or above the clip norm")
            yield Block(bounded, norms, norms)

    def statement(self, plan: PrivacyPlan) -> dict[str, Any]:
        trust = "a server that sees each clipped update and adds the noise; real nodes, over Flower"
        return super().statement(plan) | {"trust_model": trust}


class SecureNodes(Nodes):
    """A server that sees the masked sum only. The noise is in it before it is unmasked."""

    trust = "secure-sum"

    def __init__(self, exchange: Exchange, roster: Roster, config: Config) -> None:
        super().__init__(exchange, roster, config)
        part = config.mechanism
        if not isinstance(part, DiscreteMechanism) or part.mode != "exact" or (part.min_cohort or 0) < 2:
            raise ConfigError(
                'trust = "secure-sum" needs shares of noise on whole numbers, sized for the fewest nodes that are '
                'accepted: mechanism = { name = "ddgauss", mode = "exact", min_cohort = 3 }'
            )
        self.part = part

    def announce(self, task: Task) -> Task:
        super().announce(task)
        return Task(task.job, replace(task.release, part=range(0)), task.cohort[:0])

    def collect(self, total: Tensor, seen: Diagnostics, release: Release) -> tuple[Tensor, Diagnostics]:
        task, least = self.task, self.part.min_cohort
        assert task is not None
        assert least is not None
        clients = dict(enumerate(self._numbered(task.cohort)))
        width = Rotation(release.dimension).padded

        def ask(kind: str, told: Mapping[int, Mapping[str, Any]]) -> Answers:
            return self._ask(kind, told, task, clients, width)

        run = self.exchange.grid.run.run_id
        round_ = SecureRound(run, release.round_, self.part.bits, width, least, ask, task.pay)
        summed, _ = round_.total(list(clients))
        _, seen = super().collect(total, seen, release)
        return torch.from_numpy(summed.astype(np.int64)), seen

    def _numbered(self, cohort: Tensor) -> list[int]:
        """Numbers in a round are by lot, so that nodes cannot follow each other; a seeded run keeps the simulator's."""
        clients: list[int] = cohort.tolist()
        if self.config.seed is None:
            secrets.SystemRandom().shuffle(clients)
        return clients

    def _ask(
        self, kind: str, told: Mapping[int, Mapping[str, Any]], task: Task, clients: Mapping[int, int], width: int
    ) -> Answers:
        questions: dict[int, Question] = {}
        for number, values in told.items():
            arrays: Mapping[str, bytes] = {}
            if kind == "masked":
                more, arrays = self.question(task.job, clients[number])
                values = {**values, **more}
            questions[self.roster.nodes[clients[number]]] = (values, arrays)
        numbers = {self.roster.nodes[client]: number for number, client in clients.items()}
        length = width * -(-self.part.bits // 8)
        said = self.exchange.ask(kind, task.release.round_, questions, length)
        return {numbers[node]: values for node, values in said}

    def statement(self, plan: PrivacyPlan) -> dict[str, Any]:
        bits, least = self.part.bits, self.part.min_cohort
        trust = (
            f"an honest-but-curious server that sees the sum modulo 2^{bits} of masked messages only (secure "
            f"aggregation after Bonawitz et al.); each node adds its share of the noise, sized for {least} nodes: "
            f"epsilon holds where at least {least} survivors of each round really add theirs, which nobody can see; a "
            f"node knows its own share, so against it (survivors - 1)/{least} of the variance counts"
        )
        alone = accounting.epsilon(plan.release, plan.rounds, plan.delta, plan.accountant)
        return super().statement(plan) | {"trust_model": trust, "epsilon_against_server": alone}
