"""The voting protocol. Data flow one way: pool → votes → sum → noise → ledger → labels → student → report.

A run that is killed goes on: votes that were counted, and labels that were drawn but not yet paid for, wait in the run
folder's `local_only/` (never part of what is released, deleted as soon as the labels are out). Labels are drawn once;
a repeated draw would be a second release, and would have to be paid for.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from fedblur.core.callbacks import SAVED
from fedblur.core.config import Config
from fedblur.core.errors import RunError, TimeIsUp
from fedblur.core.files import make_folder, remove, remove_folder
from fedblur.core.rng import Seeded
from fedblur.data.population import Federation, one_input
from fedblur.data.roles import ROLES
from fedblur.engines import suitable_threads
from fedblur.learning.evaluation import evaluate, fairness
from fedblur.learning.module_function import load_vector
from fedblur.privacy.accounting import adjacency
from fedblur.privacy.claim import Claim, unclaimed, why_not_private
from fedblur.training.checkpoint import Checkpoint, has_checkpoint, load_newest, save_checkpoint
from fedblur.training.loop import Row, Run, Watcher
from fedblur.training.machine import Machine
from fedblur.training.run_folder import RunFolder, RunSummary
from fedblur.training.summary import mean_of_last_10, untuned, versions
from fedblur.voting.release import UNANSWERED, VOTE_STEP, Tally, release_labels
from fedblur.voting.setup import Election, prepare
from fedblur.voting.student import Student, Trainer, TrainingSet

_MEASURED = 1000  # held-out samples on which single voters are measured (local_only)
_TICKS = 20  # a stage reports, and saves, about so many times
TRUST = "an ideal secure sum of clients' votes, each with its share of the noise (simulated); only labels leave it"


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
    running = _ElectionRun(election, folder, resolved, watch or (lambda row: None))
    if new:
        running.save(Student.at(election.initial), None, {}, 0)
    if not folder.complete:
        remove(folder.summary)  # of a run that was stopped
    with suitable_threads(election.device, election.layout.total):
        return running.run()


class _ElectionRun:
    """One election in its run folder."""

    def __init__(self, election: Election, folder: RunFolder, resolved: dict[str, Any], report: Watcher) -> None:
        self.election = election
        self.folder = folder
        self.local_only = folder.path / "local_only"  # what must not leave: counts without noise, unpaid labels
        self.resolved = resolved
        self.report = report
        self.seconds = 0.0  # spent on voting

    def run(self) -> Run:
        checkpoint, _ = load_newest(self.folder.checkpoints)
        tensors = {name: tensor.to(self.election.device) for name, tensor in checkpoint.tensors.items()}
        state = checkpoint.state
        student = Student(tensors["theta"], tensors["velocity"], state["steps"], state.get("share", 1.0))
        if "labels" in tensors:
            labels, figures = tensors["labels"], state["local_only"]
        else:
            labels, figures = self._release(self._vote(), student)
        remove_folder(self.local_only)
        return self._train(student, labels, figures, self.folder.truncate_rounds(checkpoint.round), checkpoint.round)

    def save(self, student: Student, labels: Tensor | None, figures: dict[str, Any], round_: int) -> None:
        tensors = {"theta": student.theta, "velocity": student.velocity}
        tensors |= {} if labels is None else {"labels": labels}
        state = {"config": self.resolved, "steps": student.steps, "share": student.share, "local_only": figures}
        state |= {"ledger": self.election.ledger.anchor(), "roles": ROLES}
        save_checkpoint(self.folder.checkpoints, Checkpoint(round_, tensors, state))

    # --- votes: inside the trusted boundary ---

    def _vote(self) -> tuple[Tally, Tensor | None]:
        """Return all clients' votes, from where a killed run stopped; and the labels, if they were drawn already."""
        election = self.election
        pool, held_out, voters = election.pool, election.held_out, len(election.pool.voters)
        lots = Seeded.root(election.config.data_seed).child("voting", "measured").numpy()
        measured = torch.from_numpy(lots.permutation(len(held_out))[:_MEASURED])
        held = one_input(held_out.x, "a voting protocol")
        asked = torch.cat([pool.x[: pool.asked].to(election.device), held[measured].to(election.device)])
        truth = held_out.y[measured].to(election.device)
        tally, labels = Tally.empty(pool.asked, election.federation.train.classes, election.device), None
        if has_checkpoint(self.local_only):  # the folder alone says nothing: a kill may come before its first file
            checkpoint, _ = load_newest(self.local_only)
            self.seconds = checkpoint.state["seconds"]
            kept = {name: tensor.to(election.device) for name, tensor in checkpoint.tensors.items()}
            counts = kept["counts"]
            if counts.is_floating_point():  # version 0.1 kept them in votes
                counts = (counts / VOTE_STEP).trunc().long()
            tally, labels = Tally(counts, kept["accuracies"]), kept.get("labels")
        block = max(1, min(election.electorate.at_once, -(-voters // _TICKS)))
        while tally.clients < voters:
            began = time.perf_counter()
            ids = pool.voters[tally.clients : tally.clients + block]
            tally = tally.add(election.electorate.votes(ids, asked, election.rng.child("voting")), truth)
            self.seconds += time.perf_counter() - began
            self._keep(tally, None)
            self.report(_row("teachers", tally.clients, voters))
        return tally, labels

    def _keep(self, tally: Tally, labels: Tensor | None) -> None:
        make_folder(self.local_only, private=True)
        tensors = {"counts": tally.counts, "accuracies": tally.accuracies}
        tensors |= {} if labels is None else {"labels": labels}
        state = {"seconds": self.seconds}
        save_checkpoint(self.local_only, Checkpoint(tally.clients + (labels is not None), tensors, state))

    # --- release: paid for first ---

    def _release(self, counted: tuple[Tally, Tensor | None], student: Student) -> tuple[Tensor, dict[str, Any]]:
        election, event, (tally, labels) = self.election, self.election.event, counted
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

    def _train(
        self, student: Student, labels: Tensor, figures: dict[str, Any], rows: list[Row], ticks_done: int
    ) -> Run:
        election, settings = self.election, self.election.settings
        if not bool((labels != UNANSWERED).any()):
            raise RunError(
                f"no sample passed threshold={settings.threshold}: there is nothing to learn from; "
                f"start a new run with a lower one (on these clients its epsilon adds to what was spent)"
            )
        data = TrainingSet.of(election.pool.x.to(election.device), labels)
        trainer = Trainer(election.forward, election.layout, data, settings)
        ticks = min(_TICKS, settings.student_steps)
        try:
            for tick in range(ticks_done + 1, ticks + 1):
                began = time.perf_counter()
                student = trainer.train(student, settings.student_steps * tick // ticks, election.rng)
                rows.append(row := _row("student", tick, ticks))
                row["epsilon"] = election.plan.epsilon()
                theta = election.layout.unflatten(student.theta)
                row["accuracy"], row["loss"] = evaluate(election.forward, theta, election.held_out)
                row["seconds"] = round(time.perf_counter() - began, 4)
                if tick == ticks:
                    row["local_only"] |= fairness(election.forward, theta, election.federation, election.held_out)
                self.folder.append_round(row)
                self.save(student, labels, figures, tick)
                self.report(row)
        except (TimeIsUp, KeyboardInterrupt) as reason:
            self._finish(student, rows, figures)
            reason.add_note(f"{SAVED} in {self.folder.path}")
            raise
        return self._finish(student, rows, figures)

    def _finish(self, student: Student, rows: list[Row], figures: dict[str, Any]) -> Run:
        """Write the model and the summary; a model of a later step stays. `figures` are local only."""
        election, pool, layout = self.election, self.election.pool, self.election.layout
        config, planned = election.config, election.settings.student_steps
        theta, steps = student.theta, student.steps
        if not self.folder.write_model(layout.unflatten(theta.cpu()), steps):
            theta, steps = layout.flatten(self.folder.read_model()).to(theta.device), self.folder.model_round()
        accuracy, loss = evaluate(election.forward, layout.unflatten(theta), election.held_out)
        needs = (
            f"{election.settings.title} needs a public unlabelled pool of {len(pool)} samples that the other methods "
            f"do not have (from {pool.reserved} reserved clients; {len(pool.voters)} vote)"
        )
        done = steps == planned
        if done:
            election.ledger.settle()
        record = RunSummary(
            status="complete" if done else f"stopped after {steps} of {planned} steps of the student",
            rounds=1,  # of communication: everyone votes once
            accuracy=accuracy,
            loss=loss,
            accuracy_last_10_evaluations=mean_of_last_10(rows),
            evaluated_on=config.evaluate,
            data=election.federation.name,
            data_note="; ".join(filter(None, (election.federation.note, needs))),
            clients=len(pool.voters),
            parameters=layout.total,
            privacy=claim(election),
            local_only=figures,
            seconds=round(figures["voting_seconds"] + sum(row.get("seconds") or 0.0 for row in rows), 2),
            versions=versions(),
        )
        self.folder.write_summary(record)
        load_vector(election.module, theta)
        return Run(self.folder.path, record, election.module.eval(), rows)


def local_figures(tally: Tally, labels: Tensor) -> dict[str, Any]:
    """Return what only a simulation may look at: how good the voters are, and what the noise did to their plurality."""
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
    return {
        "stage": stage, "round": done, "rounds": total,
        "epsilon": None, "accuracy": None, "loss": None, "local_only": {"clipped_share": None},
    }  # fmt: skip


def claim(election: Election) -> Claim:
    """Return what an election claims (invariant 10)."""
    plan, event, nothing = election.plan, election.event, unclaimed(election.own_parts)
    return Claim(
        warning=why_not_private(election.rng.private, plan.noise_multiplier, unclaimed=nothing),
        own_parts=election.own_parts or None,
        epsilon=election.ledger.epsilon() if nothing is None else math.inf,
        delta=plan.delta,
        accountant=election.config.accountant,
        adjacency=adjacency(plan.event()),
        sampling=f"none: all {plan.sampler.clients:,} clients vote on every query",
        mechanism=f"{election.settings.title}: noisy plurality of votes, each of l2 norm at most 1 per query",
        noise_multiplier=plan.noise_multiplier,
        clip_norm=None,
        expected_cohort=plan.expected_cohort,
        releases=len(election.ledger.spends()),
        ledger=election.ledger.anchor(),
        trust_model=TRUST,
        tuning=untuned(election.config),
        signal_to_noise=None,
        queries=event.queries,
        vote_noise_std=event.noise_std,
        checks=event.checks,
        check_noise_std=event.check_noise_std,
        population=election.ledger.population(),
    )
