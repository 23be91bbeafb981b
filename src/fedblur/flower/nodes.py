"""The nodes of a federation: where a cohort's sum comes from when clients are real.

    central      the cohort sends clipped updates; the server checks each again and adds those that hold
    secure-sum   the cohort sums itself under masks; the server gets one vector modulo 2^b, or an aborted round

A node that is unavailable, late or refused counts as zero. The denominator stays pN.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedblur.core.config import Config
from fedblur.core.errors import ConfigError, RoundAborted
from fedblur.core.rng import Rng
from fedblur.engines.choice import Choice
from fedblur.engines.cohort_sum import Diagnostics, Simulated, Source, Task, Wanted
from fedblur.flower.exchange import Exchange, Question, Traffic
from fedblur.flower.roster import Roster
from fedblur.flower.secure_sum_server import Answers, SecureRound
from fedblur.learning.client import Block, ClientJob
from fedblur.learning.model_checks import constants_digest
from fedblur.privacy import accounting
from fedblur.privacy.accounting import PrivacyPlan
from fedblur.privacy.mechanisms.hadamard import Rotation
from fedblur.privacy.mechanisms.secure_sum import DiscreteMechanism

_ZERO_OUT = "one client's data against no data (zero-out); that a node is enrolled and online is not hidden"


class Nodes(ABC):
    """The part that both trust models share."""

    trust = ""

    def __init__(self, exchange: Exchange, roster: Roster, config: Config) -> None:
        self.exchange, self.roster, self.config = exchange, roster, config
        self.constants = ""  # a hash of what of the model is not trained, which nodes compare with their own

    def __repr__(self) -> str:
        return f"{len(self.roster.nodes)} Flower nodes ({self.trust})"

    def connect(self, wanted: Wanted) -> Source:
        """Wait for all nodes; who is enrolled stays the same for the whole run."""
        self.constants = constants_digest(wanted.work.module)
        claims = {"adjacency": _ZERO_OUT, **self.claims(wanted.plan)}
        self.roster.wait(self.exchange.grid, wanted.data.train.clients)
        one_client_each = Choice("sequential")
        return Source(self, one_client_each, f"{self}, {wanted.precision}", claims=claims)

    @abstractmethod
    def claims(self, plan: PrivacyPlan) -> dict[str, Any]:
        """Return what the privacy statement must say about who sees what."""

    @abstractmethod
    def total(self, task: Task, rng: Rng) -> tuple[Tensor, Diagnostics]:
        """Return the cohort's sum (`CohortSum`)."""

    def seen(self, task: Task) -> Seen:
        """Return what the server knows of this round, once the nodes have answered."""
        job = task.job
        width = job.message.vector_width(job.layout.total)
        return Seen(width, job.clip_norm, cohort=len(task.cohort), traffic=self.exchange.traffic)

    def question(self, task: Task, client: int) -> Question:
        """Return what a node is told to train, and with how much noise the sum will be released."""
        job = task.job
        message, noise = job.message, task.release.noise_multiplier
        values = {
            "clip_norm": job.clip_norm, "bit_weight": message.bit_weight, "noise_multiplier": noise, "client": client,
            "constants": self.constants,
        }  # fmt: skip
        arrays = {"start": job.layout.flatten(job.start).cpu().numpy().astype("<f4").tobytes()}
        if message.support is not None:
            arrays["support"] = message.support.cpu().numpy().astype("<i8").tobytes()
        if job.personal is not None:  # a client's first row; what becomes of it never comes back
            arrays["personal"] = job.personal.initial.numpy().astype("<f4").tobytes()
        return values, arrays


class Seen(Diagnostics):
    """The server's knowledge of a round: who answered. Norms and losses stay on the nodes."""

    def __init__(self, coordinates: int, clip_norm: float, cohort: int, traffic: Traffic) -> None:
        super().__init__(coordinates, clip_norm)
        self.cohort, self.traffic = cohort, traffic

    def report(self, noise_std: float, expected_cohort: float) -> dict[str, Any]:
        figures: dict[str, Any] = super().report(noise_std, expected_cohort)
        return figures | {"cohort": self.cohort, "refused": None, "nodes": asdict(self.traffic)}


class CentralNodes(Nodes):
    """A trusted server: it sees each clipped update, checks its norm again, and adds the noise."""

    trust = "central"

    def __init__(self, exchange: Exchange, roster: Roster, config: Config) -> None:
        super().__init__(exchange, roster, config)
        if getattr(config.mechanism, "mode", "fast") != "fast":
            raise ConfigError(
                'trust = "central" adds the noise on the server, but the mechanism splits it into shares of clients; '
                'set mechanism = "gaussian" or trust = "secure-sum"'
            )

    def total(self, task: Task, rng: Rng) -> tuple[Tensor, Diagnostics]:
        self.exchange.traffic = Traffic()
        total, _ = Simulated(Asked(self, task)).total(task, rng)
        return total, self.seen(task)

    def claims(self, plan: PrivacyPlan) -> dict[str, Any]:
        return {"trust_model": "a server that sees each clipped update and adds the noise; real nodes, over Flower"}


@dataclass(frozen=True)
class Asked:
    """The engine of one round whose clients are nodes: blocks are the updates that they send."""

    nodes: CentralNodes
    task: Task
    device = torch.device("cpu")

    def map_clients(self, job: ClientJob, ids: Tensor, rng: Rng) -> Iterator[Block]:
        nodes, round_ = self.nodes, self.task.release.round_
        width = job.message.width(job.layout.total)
        questions = {nodes.roster.nodes[client]: nodes.question(self.task, client) for client in ids.tolist()}
        for node, said in nodes.exchange.ask("update", round_, questions, length=4 * width):
            row = torch.from_numpy(np.frombuffer(said["array"], dtype="<f4").astype(np.float32))[None]
            bounded, norms, holds = job.message.accept(row, job.clip_norm)
            if not bool(holds[0]):
                nodes.exchange.traffic.answered -= 1
                nodes.exchange.refuse(round_, node, "its norm is not finite, or above the clip norm")
            yield Block(bounded, norms, norms)


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

    def total(self, task: Task, rng: Rng) -> tuple[Tensor, Diagnostics]:
        self.exchange.traffic = Traffic()
        least = self.part.min_cohort
        assert least is not None
        if len(task.cohort) < least:  # before anyone is asked
            came = len(task.cohort)
            raise RoundAborted(f"{came} clients of the {least} that noise shares are sized for; round aborted")
        order: list[int] = task.cohort.tolist()
        if self.config.seed is None:  # numbered at random, so that nodes cannot follow each other; a seeded run keeps
            secrets.SystemRandom().shuffle(order)  # the simulator's order
        clients = dict(enumerate(order))
        numbers = {self.roster.nodes[client]: number for number, client in clients.items()}
        width = Rotation(task.release.dimension).padded
        length = width * -(-self.part.bits // 8)

        def ask(kind: str, told: Mapping[int, Mapping[str, Any]]) -> Answers:
            questions: dict[int, Question] = {}
            for number, values in told.items():
                arrays: Mapping[str, bytes] = {}
                if kind == "masked":
                    more, arrays = self.question(task, clients[number])
                    values = {**values, **more}
                questions[self.roster.nodes[clients[number]]] = (values, arrays)
            said = self.exchange.ask(kind, task.release.round_, questions, length)
            return {numbers[node]: values for node, values in said}

        run = self.exchange.grid.run.run_id
        round_ = SecureRound(run, task.release.round_, self.part.bits, width, least, ask, task.pay)
        summed, _ = round_.total(list(clients))
        return torch.from_numpy(summed.astype(np.int64)), self.seen(task)

    def claims(self, plan: PrivacyPlan) -> dict[str, Any]:
        bits, least = self.part.bits, self.part.min_cohort
        trust = (
            f"an honest-but-curious server that sees the sum modulo 2^{bits} of masked messages only (secure "
            f"aggregation after Bonawitz et al.); each node adds its share of the noise, sized for {least} nodes: "
            f"epsilon holds where at least {least} survivors of each round really add theirs, which nobody can see; a "
            f"node knows its own share, so against it (survivors - 1)/{least} of the variance counts"
        )
        alone = accounting.epsilon(plan.release, plan.rounds, plan.delta, plan.accountant)
        return {"trust_model": trust, "epsilon_against_server": alone}
