"""Who catches a planted bug. Each check passes on the code as it is, and must fail when a bug is planted.

test      an assertion of this suite (where it exists elsewhere, that very test is called)
audit     the worst-case check or the one-shot audit finds an epsilon above the claim
refusal   a one-line error before anything is released
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

import fedblur.experiments.audit.worst_case as worst_case_module
from fedblur.core.config import Config, from_dict
from fedblur.core.rng import Seeded, System
from fedblur.engines import LocalEngine, Simulated
from fedblur.experiments.audit import WorstCase, audit, check_isolation, check_worst_case
from fedblur.learning.methods.lus import Lus
from fedblur.privacy.clipping import Message
from fedblur.privacy.ledger import Budget, Ledger
from fedblur.privacy.sampling import FullSampler
from fedblur.training.loop import train
from fedblur.training.resume import resume
from fedblur.training.round import run_round
from fedblur.training.verify_ledger import verify
from tests.learning import test_client
from tests.privacy import test_sampling
from tests.privacy.test_clipping import exact_norm
from tests.training import test_loop, test_round
from tests.worlds import CPU, SmallCnn, job_for, packed

Check = Callable[[Path], None]


@dataclass(frozen=True)
class Catcher:
    """A check, and how the table names it."""

    kind: Literal["test", "audit", "refusal"]
    where: str
    check: Check
    sooner: Check | None = None  # the same with fewer repetitions: most bugs are caught by it

    def catch(self, folder: Path) -> None:
        """Check code that has a bug: as little as finds it, and all where that does not."""
        if self.sooner:
            self.sooner(folder)
        self.check(folder)


CATCHERS: dict[str, Catcher] = {}
REPETITIONS = 2000  # of the worst case; `fedblur audit --worst-case` does 10,000
FEW, FEW_QUIET_ROUNDS = 400, 50  # the least that it takes; its p-values are exact for any number of rounds


class GroupNormed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.GroupNorm(2, 8), nn.Linear(8, 10))


MODEL: type[nn.Module] = GroupNormed  # what the user of `refusal of BatchNorm` brings along


def catcher(name: str, kind: Literal["test", "audit", "refusal"], where: str = "") -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CATCHERS[name] = Catcher(kind, where or f"`tests/planted`: {name}", check)
        return check

    return add


def existing(name: str, test: Callable[..., None], *arguments: object) -> None:
    """A test of this suite as a catcher; it may want a folder."""

    def check(folder: Path) -> None:
        test(folder) if "tmp_path" in test.__code__.co_varnames else test(*arguments)

    CATCHERS[name] = Catcher("test", f"`{test.__name__}`", check)


def worst_case(name: str, repetitions: int = REPETITIONS, **settings: object) -> None:
    """The worst-case check of one release on everyone, or of these settings; seeded, so that it repeats."""
    sharp = {"epsilon": 2.0, "rounds": 1, "sample_rate": 1.0, "sampling": "full", "clip_norm": 1.0, "seed": 0}
    case = WorstCase(from_dict({**sharp, **settings}))

    def check(folder: Path) -> None:
        found = check_worst_case(case, repetitions)
        assert not found.broken, found

    def sooner(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worst_case_module, "_QUIET_ROUNDS", FEW_QUIET_ROUNDS)
            found = check_worst_case(case, FEW)
        assert not found.broken, found

    where = f"`fedblur audit --worst-case`{name.removeprefix('worst case')}"
    CATCHERS[name] = Catcher("audit", where, check, sooner)


worst_case("worst case")
worst_case("worst case with LUS", method="lus")
worst_case("worst case with sampling", rounds=4, sample_rate=0.1, sampling="poisson")
worst_case("worst case with adaptive clipping", clipping="adaptive")
worst_case(
    "worst case with shares", repetitions=400, mechanism={"name": "ddgauss", "mode": "exact"}, accountant="rdp",
)  # fmt: skip
worst_case("worst case with DDGauss", mechanism="ddgauss", accountant="rdp")
existing("noise has the claimed size", test_round.test_round__noise_on_the_sum_has_std_sigma_times_the_bound)
existing("noise is dense", test_round.test_invariant_2__a_round_with_a_sparse_update_moves_every_coordinate)
existing("the denominator is constant", test_round.test_invariant_3__denominator_is_constant)
existing("an empty cohort is noisy", test_round.test_round__an_empty_cohort_still_releases_noise)
existing(
    "a line before each release", test_round.test_invariant_6__the_ledger_row_is_on_disk_before_the_server_sees_the_sum
)
existing("sampling is what is accounted", test_sampling.test_invariant_4__sampling_and_accounting_come_from_one_object)
existing("NaN counts as zero", test_client.test_invariant_5__non_finite_update_counts_as_zero)
existing("a seeded run says so", test_loop.test_invariant_9__a_seeded_run_says_that_it_is_not_private)


@catcher("a client sends at most S", "test")
def sends_at_most_s(folder: Path) -> None:
    """Clients of unequal size, a model of several tensors, sparsification: the exact norm of every message."""
    engine = LocalEngine(packed([1, 3, 20, 7]), CPU, vectorise=True, block_size=4)
    for methods in ((), (Lus(0.7),)):
        torch.manual_seed(0)
        job = job_for(SmallCnn(), methods, clip_norm=0.01)
        blocks = engine.map_clients(job, torch.arange(4), Seeded.root(0))
        assert all(exact_norm(row) <= 0.01 for block in blocks for row in block.bounded.value)


@catcher("rounds differ", "test")
def rounds_differ(folder: Path) -> None:
    """Two releases of the same sum by a private run have different noise."""
    base = test_round.protocol(folder)
    plan = replace(base.plan, sampler=FullSampler(test_round.CLIENTS))
    ledger = Ledger(folder / "own.jsonl", Budget(math.inf, 1e-2, "pld", 5))
    protocol = replace(base, plan=plan, sums=Simulated(test_round.Loud(base.layout.total)), ledger=ledger)
    state = test_round.first_state(protocol)
    first, second = (run_round(protocol, state, System().child("round", t)).state.theta for t in (1, 2))
    assert int((first == second).sum()) < len(first) / 10


@catcher("fresh noise after a resume", "test")
def fresh_noise_after_a_resume(folder: Path) -> None:
    """Two copies of one private run that are resumed from the same round end with different models."""
    config = Config(rounds=4, noise_multiplier=2.0, sample_rate=1.0, sampling="full", checkpoint_every=2, clients=30)
    stopped = train(config, out=folder / "run").path
    for path in (stopped / "checkpoints").glob("round-*4.safetensors"):
        path.unlink()
    ledger = stopped / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:3]))  # as it was after round 2
    ends = []
    for name in ("a", "b"):
        shutil.copytree(stopped, folder / name)
        resume(folder / name)
        ends.append((folder / name / "model.safetensors").read_bytes())
    assert ends[0] != ends[1]


@catcher("clip exact to the last bit", "test")
def clip_exact(folder: Path) -> None:
    rows = torch.rand(24, 100_000, generator=torch.Generator().manual_seed(0))
    bounded, _ = Message().encode(rows, 1.0)
    assert all(float(row.double().norm()) <= 1.0 for row in bounded.value)


@catcher("ledger verify", "audit", "`fedblur ledger verify`")
def ledger_verify(folder: Path) -> None:
    run = train(Config(rounds=4, noise_multiplier=2.0, clients=30), out=folder / "run")
    assert verify(run.path) == []


@catcher("one-shot audit", "audit", "`fedblur audit`")
def one_shot(folder: Path) -> None:
    config = from_dict(
        {"rounds": 20, "clients": 60, "model": {"name": "mlp", "hidden": [64]}, "epsilon": 2.0, "sample_rate": 0.2,
         "seed": 0, "local": {"steps": 2, "batch_size": 8, "learning_rate": 0.1}}
    )  # fmt: skip
    assert audit(config, folder, canaries=200, held_out=400).verdict not in ("ABOVE", "BROKEN")


@catcher("isolation", "audit", "`fedblur audit --worst-case`: others' messages")
def isolation(folder: Path) -> None:
    checks = check_isolation(from_dict({"rounds": 1, "local": {"steps": 2}}))
    assert not any(check.broken for check in checks), checks


@catcher("refusal of BatchNorm", "refusal", "`ModelError` that names the layer")
def refuses_batchnorm(folder: Path) -> None:
    train(Config(rounds=1, noise_multiplier=2.0, clients=30), out=folder / "run", module=MODEL())
