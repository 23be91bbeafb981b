"""Several processes, started by `torchrun`: each simulates a part of every cohort, rank 0 does all the rest.

    rank 0         cohort → announce → its clients → add up → noise → ledger → server step → files
    other ranks               hear   → their clients → add up

Only rank 0 draws cohorts and noise, keeps the ledger and steps; the others are told the model anew in every round. So
ranks cannot disagree on anything, with a seed or without one, and a rank that fails takes nothing with it: all others
stop within the time limit, and the run folder can be resumed by any number of processes.

Small messages go over gloo, tensors on GPUs over NCCL. All ranks need the same data, only rank 0 the run folder.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fedblur.core.errors import ConfigError, LostRankError, PrivacyError, RunError
from fedblur.core.rng import Rng
from fedblur.data.population import Population
from fedblur.engines.cohort_sum import CohortSum, Diagnostics, Source, Task, Wanted
from fedblur.engines.simulate import choose, simulate, simulate_part
from fedblur.learning.client import ClientJob
from fedblur.learning.model_checks import constants_digest
from fedblur.learning.personal import CohortRows, Rows
from fedblur.privacy import events
from fedblur.privacy.claim import PopulationTotal
from fedblur.privacy.clipping import Message
from fedblur.privacy.mechanisms import Mechanism
from fedblur.privacy.mechanisms.base import Release

_sessions = count()  # each has its own keys in torchrun's store, which outlives them
_CPU = torch.device("cpu")


def launched() -> bool:
    """Return whether torchrun started this process."""
    return bool(dist.is_available() and dist.is_torchelastic_launched())


def rank() -> int:
    """Return this process's number; 0 writes and prints."""
    return int(os.environ["RANK"]) if launched() else 0


def own_device(name: str) -> str:
    """Return the device that a name means for this process: under torchrun each has its own GPU."""
    if not launched() or name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return name
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if name not in ("auto", "cuda"):
        if here > 1:
            raise ConfigError(
                f"device={name!r} is one device for {here} processes; use --device cuda, one GPU for each"
            )
        return name
    gpus = torch.cuda.device_count()
    if local >= gpus:
        raise ConfigError(
            f"process {local} of this machine has no GPU of its own, there are {gpus}; "
            f"start torchrun with --nproc-per-node {max(gpus, 1)}, or use --device cpu"
        )
    return f"cuda:{local}"


def demand_one_process(what: str) -> None:
    """Refuse torchrun for what runs in one process only."""
    if launched() and int(os.environ["WORLD_SIZE"]) > 1:
        raise ConfigError(f"{what} runs in one process; start it without torchrun")


@dataclass
class Ranks:
    """The processes of a run, from the inside of one of them: a cohort's sum comes from all of them.

    A run without torchrun is a group of one, which is not `connected`: nothing is sent.
    """

    rank: int
    world: int
    device: torch.device
    timeout: float  # seconds
    connected: bool = True
    path: str = ""  # of the run folder
    round_: int = 0
    population: Population | None = field(default=None, init=False)  # this and `part` are set by `connect`
    part: CohortSum | None = field(default=None, init=False)  # what this rank computes of a sum
    stopping: bool = field(default=False, init=False)

    @classmethod
    def alone(cls) -> Ranks:
        """Return the group of one process that torchrun has not started."""
        return cls(0, 1, _CPU, 0.0, connected=False)

    def connect(self, wanted: Wanted) -> Source:
        """Choose the engine at rank 0 for all ranks, and wait until all have their data and model."""
        if not self.connected:
            return simulate(wanted)
        choice = self.tell(None if self.rank else choose(wanted))
        source = simulate_part(wanted, choice, self.world)
        self.population, self.part = wanted.data.train, source.sums
        constants = constants_digest(wanted.work.module)
        self._demand_alike(wanted.data.train.clients, wanted.work.job.layout.total, constants)
        return replace(source, sums=self, machine=f"{source.machine}, {self.world} processes")

    def total(self, task: Task, rng: Rng) -> tuple[Tensor, Diagnostics]:
        """Return the sum over all ranks, at rank 0; the others `hear` their part of the task and `add_up` as well."""
        return self.add_up(self._announce(task), rng)

    def add_up(self, task: Task, rng: Rng) -> tuple[Tensor, Diagnostics]:
        """Sum this rank's part of a task. At rank 0 all parts' sum comes back."""
        assert self.part is not None
        total, seen = self._collect(*self.part.total(task, rng), task.release)
        if task.job.personal is not None:
            self._collect_rows(task.job.personal.rows, task.cohort)
        return total, seen

    # what rank 0 says to all others

    def tell(self, message: Any = None) -> Any:
        """Return on every rank what rank 0 gives here."""
        if not self.connected:
            return message
        box = [message]
        with self._collective():
            dist.broadcast_object_list(box, src=0, device=_CPU)
        return box[0]

    def _demand_alike(self, clients: int, parameters: int, constants: str) -> None:
        facts: list[Any] = [None] * self.world
        with self._collective():
            dist.all_gather_object(facts, (clients, parameters, constants))
        other = next((i for i, fact in enumerate(facts) if fact != facts[0]), None)
        if other is not None:
            (clients, size, here), (clients_there, size_there, there) = facts[0], facts[other]
            if (clients, size) == (clients_there, size_there) and here != there:
                raise RunError(
                    f"the frozen parameters and buffers of ranks 0 and {other} differ; give all ranks the same model"
                )
            raise RunError(
                f"rank 0 has {clients} clients and {size} parameters, rank {other} has {clients_there} and "
                f"{size_there}; give all ranks the same data and model"
            )

    def _announce(self, task: Task) -> Task:
        """Send the round's model, clip norm and cohort from rank 0 to all; return its own part of the task."""
        assert self.population is not None
        self.round_ = task.release.round_
        job, message, order = task.job, task.job.message, task.cohort
        if len(order):  # as the engine sorts them in one process: clients' numbers are the same, and parts are alike
            order = order[torch.argsort(self.population.fetch(order).sizes, stable=True).cpu()]
        kept = None if message.support is None else len(message.support)
        self.tell((replace(task.release, device=_CPU), job.clip_norm, message.bit_weight, kept))
        self._broadcast(order)
        self._broadcast(job.layout.flatten(job.start))
        if message.support is not None:
            self._broadcast(message.support)
        if job.personal is not None:
            self._broadcast(job.personal.rows.read(order))
        return self._part(replace(task, cohort=order))

    def hear(self, job: ClientJob, mechanism: Mechanism) -> Task | None:
        """Return another rank's part of the next round; None when rank 0 needs it no more."""
        told = self.tell()
        if told is None:
            return None
        release, clip_norm, bit_weight, kept = told
        cohort = self._broadcast(torch.empty(release.cohort, dtype=torch.int64))
        start = self._broadcast(torch.empty(job.layout.total, device=self.device))
        support = None
        if kept is not None:
            support = self._broadcast(torch.empty(kept, dtype=torch.int64, device=self.device))
        message, personal = Message(job.message.bounding, support, bit_weight), job.personal
        if personal is not None:
            own = self._broadcast(torch.empty(release.cohort, personal.layout.total))
            personal = replace(personal, rows=CohortRows(cohort, own))
        start_here = job.layout.unflatten(start)
        job = replace(job, start=start_here, clip_norm=clip_norm, message=message, personal=personal)
        return self._part(Task(job, mechanism, replace(release, device=self.device), cohort))

    def _part(self, task: Task) -> Task:
        """Take every world-th client; `numbers` keeps their numbers in the round, so no two noise shares are alike."""
        self.round_ = task.release.round_
        numbers = range(self.rank, len(task.cohort), self.world)
        part = replace(task.release, part=numbers)
        return replace(task, release=part, cohort=task.cohort[self.rank :: self.world])

    # what all ranks give to rank 0

    def _collect(self, total: Tensor, seen: Diagnostics, release: Release) -> tuple[Tensor, Diagnostics]:
        """Return, at rank 0, the sum of all sums (whole numbers stay whole), and all clients' figures in order."""
        summed = torch.tensor(sum(len(norms) for norms in seen.norms))
        with self._collective():
            dist.all_reduce(summed)  # nobody goes on before all are done
        if int(summed) != release.cohort:  # invariant 8
            raise PrivacyError(f"{int(summed)} clients of a cohort of {release.cohort} were summed; round aborted")
        figures = torch.zeros(3, release.cohort, dtype=torch.float64, device=self.device)
        sums = torch.zeros(2, seen.coordinates, device=self.device)
        if seen.clipped_sum is not None and seen.bias_sum is not None:
            mine = release.numbers
            rows = [torch.cat(part) for part in (seen.norms, seen.kept_norms, seen.trained_norms)]
            figures[:, mine.start : mine.stop : mine.step] = torch.stack(rows)
            sums = torch.stack([seen.clipped_sum, seen.bias_sum])
        total, figures, sums = self._reduce(total), self._reduce(figures), self._reduce(sums)
        if not release.cohort:
            return total, seen
        norms, kept, trained = figures
        return total, Diagnostics(seen.coordinates, seen.clip_norm, [norms], [kept], [trained], sums[0], sums[1])

    def _collect_rows(self, rows: Rows, trained: Tensor) -> None:
        """Bring the rows of clients that other ranks trained to rank 0, which keeps them all."""
        assert isinstance(rows, CohortRows)
        rows.values = self._reduce(rows.alone(trained))

    def _reduce(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        if tensor.numel():
            with self._collective():
                dist.reduce(tensor, dst=0)
        return tensor

    def _broadcast(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        if tensor.numel():
            with self._collective():
                dist.broadcast(tensor, src=0)
        return tensor

    # when one of them is gone

    @contextmanager
    def _collective(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what torch raises for a closed connection and for a time limit
            text = str(error).splitlines()[0]
            closed = any(word in text.lower() for word in ("closed", "reset", "refused", "broken pipe"))
            late = "timed out" in text.lower() or "timeout" in text.lower()
            why = "its connection closed" if closed else f"no answer within {self.timeout:g} s" if late else text[:120]
            raise self.lost(why) from error

    def lost(self, why: str) -> LostRankError:
        """Return the error for a run that another rank has left."""
        self.stopping = True
        when = f" in round {self.round_}" if self.round_ else ""
        way_out = f"fedblur resume {self.path}" if self.round_ else "start again"
        other = f"rank {1 - self.rank}" if self.world == 2 else "another rank"
        return LostRankError(f"{other} stopped or died{when} ({why}); rank {self.rank} stops too; to go on: {way_out}")


@contextmanager
def together(device: Callable[[], torch.device], timeout: float) -> Iterator[Ranks]:
    """Connect the processes that torchrun started, or yield this one alone."""
    if not launched():
        yield Ranks.alone()
        return
    if not 0 < timeout < 1e6:
        raise ConfigError(f"rank_timeout={timeout:g} must be above 0 seconds and finite")
    if dist.is_initialized():
        raise RunError("torch.distributed is already in use in this process; let FedBlur set it up")
    ranks = Ranks(rank(), int(os.environ["WORLD_SIZE"]), device(), timeout)
    with _stopped_by_torchrun(ranks):
        _connect(ranks)
        try:
            yield ranks
        except BaseException:
            ranks.stopping = True
            if ranks.device.type == "cpu":  # closes the connections, so that the others notice; NCCL might wait here
                dist.destroy_process_group()
            raise
        dist.destroy_process_group()


def _connect(ranks: Ranks) -> None:
    limit, on_gpu = timedelta(seconds=ranks.timeout), ranks.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(ranks.device)
    try:
        store, number, world = next(rendezvous("env://", timeout=limit))
        store = PrefixStore(f"fedblur-{next(_sessions)}", store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            timeout=limit,
            store=store,
            rank=number,
            world_size=world,
            device_id=ranks.device if on_gpu else None,
        )
    except RuntimeError as error:
        raise RunError(
            f"rank {ranks.rank} cannot reach the other ranks: {str(error).splitlines()[0][:200]}; check the network "
            "between them (GLOO_SOCKET_IFNAME names the interface to use)"
        ) from error


@contextmanager
def _stopped_by_torchrun(ranks: Ranks) -> Iterator[None]:
    """End once, in order. If a process ends, torchrun sends SIGTERM to the others; at Ctrl-C all get SIGINT twice."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        if ranks.stopping:
            return
        error = ranks.lost("torchrun ended this process")
        raise error if number == signal.SIGTERM else KeyboardInterrupt

    before = [(number, signal.signal(number, stop)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        yield
    finally:
        if not ranks.stopping:  # else more signals may come, and must not cut off the error's message
            for number, handler in before:
                signal.signal(number, handler)


class ForeignLedger:
    """The ledger of a process that releases nothing. Rank 0 keeps it; to use it here is an error."""

    def demand_room(self, round_: int, event: events.Event, replay: bool) -> None:
        raise _not_ours()

    def spend(self, round_: int, event: events.Event, replay: bool) -> None:
        raise _not_ours()

    def count_torn(self, event: events.Event) -> None:
        raise _not_ours()

    def number(self, round_: int, event: events.Event, replay: bool) -> int:
        raise _not_ours()

    def spends(self) -> list[tuple[int, events.Event]]:
        raise _not_ours()

    def epsilon(self) -> float:
        raise _not_ours()

    def anchor(self) -> dict[str, Any]:
        raise _not_ours()

    def settle(self) -> None:
        raise _not_ours()

    def population(self) -> PopulationTotal | None:
        raise _not_ours()


def _not_ours() -> PrivacyError:
    return PrivacyError("only rank 0 keeps the ledger and releases anything")
