"""The protocol. Data flow one way: pool → votes → sum → noise → ledger → labels → student → report.

A run that is killed goes on: votes that were counted, and labels that were drawn but not yet paid for, wait in the run
folder's `local_only/` (never part of what is released, deleted as soon as the labels are out). Labels are drawn once;
a repeated draw would be a second release, and would have to be paid for.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedblur.checkpoint import Checkpoint, load_newest, save_checkpoint, write_atomically
from fedblur.config import Config
from fedblur.data.population import Federation
from fedblur.data.roles import ROLES
from fedblur.engines import suitable_threads
from fedblur.errors import RunError
from fedblur.evaluation import evaluate
from fedblur.fairness import fairness
from fedblur.functional import load_vector
from fedblur.runfolder import RunFolder
from fedblur.setup import Machine
from fedblur.train import Row, Run, Watcher
from fedblur.voting.release import UNANSWERED, release_labels
from fedblur.voting.setup import Election, prepare
from fedblur.voting.student import Course, Lessons, Student
from fedblur.voting.summary import summarise
from fedblur.voting.tally import VOTE_STEP, Tally

_TICKS = 20  # a stage reports, and saves, about so many times

Report = Callable[[Row], None]


def run_election(
    config: Config,
    folder: RunFolder,
    resolved: dict[str, Any],
    machine: Machine,
    federation: Federation | None,
    module: nn.Module | None,
    watch: Watcher | None,
    *,
    new: bool,
) -> Run:
    """Vote, release labels, train the student. `new`: the folder was made for this run and may be taken back."""
    try:
        election = prepare(config, folder.ledger, machine, federation, module)
    except BaseException:
        if new:
            folder.abandon()  # nothing was released: leave no half-made run behind
        raise
    office = _Office(election, folder, resolved, watch or (lambda row: None))
    if new:
        office.save(Student.at(election.initial), None, {}, 0)
    folder.summary.unlink(missing_ok=True)  # of a run that was stopped
    with suitable_threads(election.device, election.layout.total):
        return office.run()


class _Office:
    """One election in its run folder."""

    def __init__(self, election: Election, folder: RunFolder, resolved: dict[str, Any], report: Report) -> None:
        self.election = election
        self.folder = folder
        self.resolved = resolved
        self.report = report
        self.seconds = 0.0  # spent on voting

    @property
    def local_only(self) -> Path:
        """What must not leave: counts without noise, labels that were not paid for."""
        return self.folder.path / "local_only"

    def run(self) -> Run:
        checkpoint, _ = load_newest(self.folder.checkpoints)
        tensors = {name: tensor.to(self.election.device) for name, tensor in checkpoint.tensors.items()}
        state = checkpoint.state
        student = Student(tensors["theta"], tensors["velocity"], state["steps"], state.get("share", 1.0))
        if "labels" in tensors:
            labels, figures = tensors["labels"], state["local_only"]
        else:
            labels, figures = self._release(self._vote(), student)
        shutil.rmtree(self.local_only, ignore_errors=True)
        return self._teach(student, labels, figures, self.folder.truncate_rounds(checkpoint.round), checkpoint.round)

    def save(self, student: Student, labels: Tensor | None, figures: dict[str, Any], round_: int) -> None:
        tensors = {"theta": student.theta, "velocity": student.velocity}
        tensors |= {} if labels is None else {"labels": labels}
        state = {"config": self.resolved, "steps": student.steps, "share": student.share, "local_only": figures}
        state |= {"ledger": self.election.ledger.anchor(), "roles": ROLES}
        save_checkpoint(self.folder.checkpoints, Checkpoint(round_, tensors, state))

    # --- votes: inside the trusted boundary ---

    def _vote(self) -> tuple[Tally, Tensor | None]:
        """All clients' votes, from where a killed run stopped; and the labels, if they were drawn already."""
        election = self.election
        pool, samples = election.pool, election.measured()
        asked = torch.cat([pool.x[: pool.asked].to(election.device), samples.x.to(election.device)])
        truth, voters = samples.y.to(election.device), len(pool.voters)
        tally, labels = self._counted()
        block = max(1, min(election.electorate.at_once, -(-voters // _TICKS)))
        while tally.clients < voters:
            began = time.perf_counter()
            ids = pool.voters[tally.clients : tally.clients + block]
            tally = tally.add(election.electorate.votes(ids, asked, election.rng.child("voting")), truth)
            self.seconds += time.perf_counter() - began
            self._keep(tally, None)
            self.report(_row("teachers", tally.clients, voters))
        return tally, labels

    def _counted(self) -> tuple[Tally, Tensor | None]:
        election = self.election
        if not self.local_only.exists():
            return Tally.empty(election.pool.asked, election.federation.train.classes, election.device), None
        checkpoint, _ = load_newest(self.local_only)
        self.seconds = checkpoint.state["seconds"]
        kept = {name: tensor.to(election.device) for name, tensor in checkpoint.tensors.items()}
        return Tally(_whole(kept["counts"]), kept["accuracies"]), kept.get("labels")

    def _keep(self, tally: Tally, labels: Tensor | None) -> None:
        self.local_only.mkdir(mode=0o700, exist_ok=True)
        tensors = {"counts": tally.counts, "accuracies": tally.accuracies}
        tensors |= {} if labels is None else {"labels": labels}
        state = {"seconds": self.seconds}
        save_checkpoint(self.local_only, Checkpoint(tally.clients + (labels is not None), tensors, state))

    # --- release: paid for first ---

    def _release(self, counted: tuple[Tally, Tensor | None], student: Student) -> tuple[Tensor, dict[str, Any]]:
        election, event = self.election, self.election.event
        tally, labels = counted
        if labels is None:
            election.ledger.demand_room(1, event, replay=not election.rng.private)
            threshold = election.settings.threshold * len(election.pool.voters)
            labels = release_labels(tally.counts, event, threshold, election.rng)
            self._keep(tally, labels)
        election.ledger.spend(1, event, replay=True)  # on disk before the labels leave; these very labels, so once
        figures = local_figures(tally, labels) | {"voting_seconds": round(self.seconds, 2)}
        self.save(student, labels, figures, 0)
        return labels, figures

    # --- student: post-processing ---

    def _teach(
        self, student: Student, labels: Tensor, figures: dict[str, Any], rows: list[Row], ticks_done: int
    ) -> Run:
        election, settings = self.election, self.election.settings
        if not bool((labels != UNANSWERED).any()):
            raise RunError(
                f"no sample passed threshold={settings.threshold}: there is nothing to learn from; "
                f"start a new run with a lower one (on these clients its epsilon adds to what was spent)"
            )
        lessons = Lessons.of(election.pool.x.to(election.device), labels)
        course = Course(election.forward, election.layout, lessons, settings)
        ticks = min(_TICKS, settings.student_steps)
        try:
            for tick in range(ticks_done + 1, ticks + 1):
                began = time.perf_counter()
                student = course.teach(student, settings.student_steps * tick // ticks, election.rng)
                rows.append(_row("student", tick, ticks) | self._progress(student, began))
                if tick == ticks:
                    rows[-1]["local_only"] |= self._fairness(student)
                self.folder.append_round(rows[-1])
                self.save(student, labels, figures, tick)
                self.report(rows[-1])
        except KeyboardInterrupt:
            self._finish(student, rows, figures)
            raise
        return self._finish(student, rows, figures)

    def _progress(self, student: Student, began: float) -> Row:
        accuracy, loss = self._measure(student)
        seconds = round(time.perf_counter() - began, 4)
        return {"epsilon": self.election.plan.epsilon(), "accuracy": accuracy, "loss": loss, "seconds": seconds}

    def _measure(self, student: Student) -> tuple[float, float]:
        theta = self.election.layout.unflatten(student.theta)
        return evaluate(self.election.forward, theta, self.election.held_out)

    def _fairness(self, student: Student) -> dict[str, Any]:
        election = self.election
        theta = election.layout.unflatten(student.theta)
        return fairness(election.forward, theta, election.federation, election.held_out)

    def _finish(self, student: Student, rows: list[Row], figures: dict[str, Any]) -> Run:
        election = self.election
        tensors = election.layout.unflatten(student.theta.cpu())
        write_atomically(self.folder.model, save({name: tensor.clone() for name, tensor in tensors.items()}))
        summary = summarise(election, rows, student.steps, figures, *self._measure(student))
        self.folder.write_summary(summary)
        load_vector(election.module, student.theta)
        return Run(self.folder.path, summary, election.module.eval(), rows)


def _whole(counts: Tensor) -> Tensor:
    """Counts as they are now; version 0.1 kept them as floats, in votes."""
    return (counts / VOTE_STEP).trunc().long() if counts.is_floating_point() else counts


def local_figures(tally: Tally, labels: Tensor) -> dict[str, Any]:
    """What only a simulation may look at: how good the voters are, and what the noise did to their plurality."""
    answered = labels != UNANSWERED
    top = tally.counts.topk(min(2, tally.counts.shape[1]), dim=1).values
    agree = (tally.counts.argmax(1) == labels)[answered].double()
    quarters = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64, device=labels.device)
    return {
        "teacher_accuracy_quartiles": torch.quantile(tally.accuracies, quarters).tolist(),
        "labels_equal_plurality": float(agree.mean()) if len(agree) else None,
        # votes between the first and the second class
        "median_margin": float((top[:, 0] - top[:, -1]).median()) * VOTE_STEP,
        "answered": int(answered.sum()),
        "clipped_share": None,
    }


def _row(stage: str, done: int, total: int) -> Row:
    progress = {"stage": stage, "round": done, "rounds": total}
    return progress | {"epsilon": None, "accuracy": None, "loss": None, "local_only": {"clipped_share": None}}
