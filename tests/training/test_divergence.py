"""What a run says by stopping, going on or being killed: nothing that was not paid for, and never less than was."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedblur
from fedblur.cli.table import _privacy
from fedblur.core.config import from_dict
from fedblur.core.errors import ConfigError, DivergedError
from fedblur.experiments.audit import audit
from fedblur.privacy.claim import NOISELESS
from fedblur.report.dashboard import make_report, render
from fedblur.report.records import find_records
from fedblur.report.text import rounded_up
from fedblur.training.run_folder import RunFolder
from fedblur.training.verify_ledger import compose, read_books, verify

OVERFLOWING = {
    "epsilon": 0.5, "delta": 1e-6, "rounds": 2, "sample_rate": 1.0, "validation_share": 0.0,
    "local": {"learning_rate": 1e4},
}  # fmt: skip
CONFIG = from_dict(
    {"dataset": "synthetic", "clients": 40, "noise_multiplier": 1.0, "rounds": 12, "sample_rate": 0.3, "eval_every": 1}
)


class Killed(BaseException):
    """As SIGKILL: nothing of the loop's own handlers runs."""


def at(round_: int, what: type[BaseException]):
    def watch(row) -> None:
        if row["round"] == round_:
            raise what

    return watch


def overflowing(*, target: bool) -> fedblur.Federation:
    """Clients whose updates are not finite, and perhaps one whose is."""
    x = np.full((84, 8), 1e38, dtype=np.float32)
    x[80:] = np.random.default_rng(0).normal(size=(4, 8))
    y, owner = np.arange(84) % 2, np.arange(84) // 4
    count = 84 if target else 80
    return fedblur.federation_from_arrays(x[:count], y[:count], owner[:count], x[80:], y[80:])


@pytest.mark.parametrize("target", [True, False])
def test_divergence__does_not_stop_a_run_that_protects_people(target: bool, tmp_path: Path) -> None:
    """Whether it stops would say, without noise, whether the one client with a finite update is there."""
    run = fedblur.train(from_dict(OVERFLOWING), out=tmp_path / "run", federation=overflowing(target=target))
    assert run.summary["status"] == "complete"
    assert run.summary["privacy"]["releases"] == 2
    told = [row["local_only"].get("caution", "") for row in run.rounds]
    assert all(("NaN or infinite" in words) is not target for words in told)  # to the operator alone


@pytest.mark.parametrize("changes", [{"seed": 1}, {"epsilon": math.inf}])
def test_divergence__stops_a_run_that_protects_nobody(changes: dict[str, object], tmp_path: Path) -> None:
    config = from_dict(OVERFLOWING | changes)
    with pytest.raises(DivergedError, match="all 20 updates of round 1 were NaN or infinite"):
        fedblur.train(config, out=tmp_path / "run", federation=overflowing(target=False))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "stopped after 1 of 2 rounds"


def test_rounds__name_the_epsilon_that_was_paid_also_for_repeated_ones(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fedblur.train(CONFIG, out=tmp_path / "run", watch=at(6, Killed))
    with pytest.raises(Killed):
        fedblur.resume(tmp_path / "run", watch=at(5, Killed), tell=lambda text: None)
    books = read_books(tmp_path / "run")
    assert len(books.spends) == 11
    last = RunFolder(tmp_path / "run").read_rounds()[-1]
    assert (last["round"], last["epsilon"]) == (5, books.epsilon("pld"))
    assert f"{rounded_up(last['epsilon'])}" in render(make_report(find_records([tmp_path / "run"])))


def test_resume__leaves_no_summary_of_an_earlier_stop(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fedblur.train(CONFIG, out=run, watch=at(3, KeyboardInterrupt))
    early = (run / "summary.json").read_bytes()
    with pytest.raises(Killed):
        fedblur.resume(run, watch=at(9, Killed), tell=lambda text: None)
    assert not (run / "summary.json").exists()
    assert verify(run) == []
    (run / "summary.json").write_bytes(early)  # as a folder of an earlier version has it
    assert any("counts 3 releases, the ledger 9" in finding for finding in verify(run))


def test_table__counts_what_cells_that_have_not_ended_have_spent(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("one", "two", "killed")]
    for run in runs[:2]:
        fedblur.train(CONFIG, out=run)
    with pytest.raises(Killed):
        fedblur.train(CONFIG, out=runs[2], watch=at(11, Killed))
    delta, total = compose([read_books(run) for run in runs])
    (*_, last) = _privacy(runs, "")
    assert f"All 3 runs, 1 of them not ended, on these clients together: ε = PLD {rounded_up(total['pld'])}" in last
    assert f"δ = {delta:.3g}" in last


def test_audit__a_control_has_no_noise_and_its_ledger_says_so(tmp_path: Path) -> None:
    small = {"rounds": 2, "clients": 30, "epsilon": 4.0, "sample_rate": 0.5, "local": {"steps": 1}}
    found = audit(from_dict(small), tmp_path, canaries=100, held_out=100, remove_noise=True)
    books = read_books(tmp_path / "ledger.jsonl")
    assert len(books.spends) == 2
    assert books.epsilon("pld") == books.budget.epsilon == math.inf
    assert found.about["warning"] == NOISELESS
    assert found.claimed == pytest.approx(4.0, rel=1e-2)
    assert not (tmp_path / "ledger-2.jsonl").exists()


def test_min_cohort__states_neighbours_that_an_aborted_round_does_not_tell_apart(tmp_path: Path) -> None:
    mechanism = {"name": "ddgauss", "mode": "exact", "min_cohort": 2, "bits": 20}
    config = replace(from_dict({"mechanism": mechanism, "accountant": "rdp", "rounds": 1}), seed=1)
    assert "no data (zero-out)" in fedblur.train(config, out=tmp_path / "run").summary["privacy"]["adjacency"]


def test_clip_norm__that_float32_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="clip_norm=1e-40 must be above 0, and 1e-30 at least"):
        from_dict({"clip_norm": 1e-40})


def test_proxy__a_trial_that_was_stopped_is_not_complete(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert not folder.complete
    with pytest.raises(KeyboardInterrupt):
        fedblur.train(CONFIG, out=folder.path, watch=at(3, KeyboardInterrupt))
    assert not folder.complete
    fedblur.resume(folder.path, tell=lambda text: None)
    assert folder.complete
