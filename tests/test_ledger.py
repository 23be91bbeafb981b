"""Invariant 6: written before released, never undercounting, and a spent budget refuses a round."""

import math
import sqlite3
from pathlib import Path

import pytest

from fedblur import accounting
from fedblur.errors import PrivacyError, RunError
from fedblur.events import Gaussian, PoissonSampled
from fedblur.ledger import Budget, Ledger

EVENT = PoissonSampled(0.1, Gaussian(1.0))
BUDGET = Budget(accounting.epsilon(EVENT, 3, 1e-3, "pld"), 1e-3, "pld", 3)


def test_ledger__counts_across_processes_and_gives_the_accountants_epsilon(tmp_path: Path) -> None:
    first = Ledger(tmp_path / "l.sqlite", BUDGET)
    assert first.epsilon() == 0
    for t in (1, 2):
        first.spend(t, EVENT, replay=False)
    again = Ledger(tmp_path / "l.sqlite", BUDGET)
    assert again.spends() == [(1, EVENT), (2, EVENT)]
    assert again.epsilon() == accounting.epsilon(EVENT, 2, 1e-3, "pld")


def test_invariant_6__a_run_past_its_budget_refuses_to_start_a_round(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite", BUDGET)
    for t in (1, 2, 3):
        ledger.demand_room(t, EVENT, replay=False)
        ledger.spend(t, EVENT, replay=False)
    with pytest.raises(PrivacyError, match="the budget is spent: 3 releases"):
        ledger.demand_room(4, EVENT, replay=False)


def test_invariant_6__a_private_round_that_is_repeated_is_paid_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite", BUDGET)
    ledger.spend(1, EVENT, replay=False)
    ledger.spend(1, EVENT, replay=False)
    assert len(ledger.spends()) == 2


def test_ledger__a_seeded_round_that_is_repeated_is_the_same_release(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite", BUDGET)
    for t in (1, 2, 3):
        ledger.spend(t, EVENT, replay=True)
    ledger.demand_room(2, EVENT, replay=True)
    ledger.spend(2, EVENT, replay=True)
    assert len(ledger.spends()) == 3
    with pytest.raises(PrivacyError):
        ledger.demand_room(4, EVENT, replay=True)


def test_ledger__an_event_of_another_kind_or_budget_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite", BUDGET)
    ledger.spend(1, EVENT, replay=False)
    with pytest.raises(PrivacyError, match="another kind"):
        ledger.demand_room(2, PoissonSampled(0.1, Gaussian(2.0)), replay=False)
    with pytest.raises(PrivacyError, match="a budget does not change"):
        Ledger(tmp_path / "l.sqlite", Budget(9.0, 1e-3, "pld", 3))


def test_ledger__an_unknown_event_in_the_file_is_refused_not_guessed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite", BUDGET)
    with sqlite3.connect(ledger.path) as db:
        db.execute("""INSERT INTO spends (round, event, at) VALUES (1, '{"kind": "magic"}', '')""")
    with pytest.raises(PrivacyError, match="magic"):
        ledger.spends()


def test_ledger__a_file_that_is_not_a_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "l.sqlite").write_text("this is not a database, it only looks like a file " * 20)
    with pytest.raises(RunError, match="cannot be opened: file is not a database"):
        Ledger(tmp_path / "l.sqlite", BUDGET)


def test_ledger__without_privacy_there_is_no_limit_but_the_planned_rounds(tmp_path: Path) -> None:
    budget = Budget(math.inf, 1e-3, "pld", 2)
    ledger = Ledger(tmp_path / "l.sqlite", budget)
    ledger.spend(1, PoissonSampled(0.1, Gaussian(0.0)), replay=False)
    assert ledger.epsilon() == math.inf
