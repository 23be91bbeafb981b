"""Invariant 6: written before released, never undercounting, a spent budget refuses a round; edits are found."""

import math
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fedblur.core.errors import PrivacyError, RunError
from fedblur.privacy import accounting
from fedblur.privacy.events import Gaussian, PoissonSampled
from fedblur.privacy.ledger import Budget, Chain, ChainError, Ledger, Payment
from fedblur.privacy.ledger_file import demand_anchor, open_ledger

EVENT = PoissonSampled(0.1, Gaussian(1.0))
BUDGET = Budget(accounting.epsilon(EVENT, 3, 1e-3, "pld"), 1e-3, "pld", 3)


def test_ledger__counts_across_processes_and_gives_the_accountants_epsilon(tmp_path: Path) -> None:
    first = Ledger(tmp_path / "l.jsonl", BUDGET)
    assert first.epsilon() == 0
    for t in (1, 2):
        first.spend(t, EVENT, replay=False)
    again = Ledger(tmp_path / "l.jsonl", BUDGET)
    assert again.spends() == [(1, EVENT), (2, EVENT)]
    assert again.epsilon() == accounting.epsilon(EVENT, 2, 1e-3, "pld")


@pytest.mark.parametrize("replay", [False, True])
def test_payment__is_on_disk_when_it_returns_and_paying_twice_pays_once(tmp_path: Path, replay: bool) -> None:
    ledger = Ledger(tmp_path / "l.jsonl", BUDGET)
    payment = Payment(ledger, 1, EVENT, replay)
    payment.settle()
    assert len((tmp_path / "l.jsonl").read_text().splitlines()) == 2  # the budget and the release
    payment.settle()
    assert ledger.spends() == [(1, EVENT)]


def test_payment__that_the_ledger_refuses_is_not_settled(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl", BUDGET)
    for t in (1, 2, 3):
        Payment(ledger, t, EVENT, replay=False).settle()
    late = Payment(ledger, 4, EVENT, replay=False)
    for _ in range(2):
        with pytest.raises(PrivacyError, match="the budget is spent"):
            late.settle()


def test_invariant_6__a_run_past_its_budget_refuses_to_start_a_round(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl", BUDGET)
    for t in (1, 2, 3):
        ledger.demand_room(t, EVENT, replay=False)
        ledger.spend(t, EVENT, replay=False)
    with pytest.raises(PrivacyError, match="the budget is spent: 3 releases"):
        ledger.demand_room(4, EVENT, replay=False)


def test_invariant_6__two_processes_do_not_pass_the_budget_together(tmp_path: Path) -> None:
    """Each asks for room while there is some; the lock on the ledger decides who spends it."""
    one, two = (Ledger(tmp_path / "l.jsonl", BUDGET) for _ in range(2))
    for t in (1, 2):
        one.spend(t, EVENT, replay=False)
    for ledger in (one, two):
        ledger.demand_room(3, EVENT, replay=False)
    one.spend(3, EVENT, replay=False)
    with pytest.raises(PrivacyError, match="the budget is spent"):
        two.spend(3, EVENT, replay=False)
    assert one.epsilon() <= BUDGET.epsilon


def test_invariant_6__a_private_round_that_is_repeated_is_paid_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl", BUDGET)
    ledger.spend(1, EVENT, replay=False)
    ledger.spend(1, EVENT, replay=False)
    assert len(ledger.spends()) == 2


def test_ledger__a_seeded_round_that_is_repeated_is_the_same_release(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl", BUDGET)
    for t in (1, 2, 3):
        ledger.spend(t, EVENT, replay=True)
    ledger.demand_room(2, EVENT, replay=True)
    ledger.spend(2, EVENT, replay=True)
    assert len(ledger.spends()) == 3
    with pytest.raises(PrivacyError):
        ledger.demand_room(4, EVENT, replay=True)


class Disk:
    """What is asked of the disk, in order: ("write" or "fsync", the name of the file or folder)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
        self.paths, self.calls = paths, list[tuple[str, str]]()
        for name in ("write", "fsync"):
            monkeypatch.setattr(os, name, self._noted(name, getattr(os, name)))

    def _noted(self, name: str, real: Callable[..., int]) -> Callable[..., int]:
        def call(handle: int, *data: bytes) -> int:
            here = os.fstat(handle)
            self.calls += [(name, path.name) for path in self.paths if os.path.samestat(path.stat(), here)]
            return real(handle, *data)

        return call


def test_invariant_6__a_line_is_on_disk_before_spend_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line in the system's memory is lost with the power: written, then forced to the disk, then released."""
    folder = tmp_path / "run"
    folder.mkdir()
    ledger = Ledger(folder / "l.jsonl", BUDGET)
    disk = Disk(monkeypatch, ledger.path, folder)
    ledger.spend(1, EVENT, replay=False)
    assert disk.calls == [("write", "l.jsonl"), ("fsync", "l.jsonl")]


def test_invariant_6__a_new_ledgers_name_is_on_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a crash can take the whole file: its lines are there, and no folder leads to them."""
    folder = tmp_path / "run"
    folder.mkdir()
    disk = Disk(monkeypatch, folder)
    Ledger(folder / "l.jsonl", BUDGET)
    assert disk.calls == [("fsync", "run")]


def test_ledger__an_event_of_another_kind_or_budget_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl", BUDGET)
    ledger.spend(1, EVENT, replay=False)
    with pytest.raises(PrivacyError, match="another kind"):
        ledger.demand_room(2, PoissonSampled(0.1, Gaussian(2.0)), replay=False)
    with pytest.raises(PrivacyError, match="a budget does not change"):
        Ledger(tmp_path / "l.jsonl", Budget(9.0, 1e-3, "pld", 3))


def test_ledger__an_unknown_event_in_the_file_is_refused_not_guessed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl", BUDGET)
    with Chain(ledger.path).writing() as chain:
        chain.append({"kind": "spend", "round": 1, "event": {"kind": "magic"}, "at": ""})
    with pytest.raises(PrivacyError, match="magic"):
        ledger.spends()


def test_ledger__a_file_that_is_not_a_ledger_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "l.jsonl").write_text("this is not a ledger, it only looks like a file\n" * 20)
    with pytest.raises(RunError, match="line 1 does not follow from an empty file"):
        Ledger(tmp_path / "l.jsonl", BUDGET)
    with pytest.raises(RunError, match="cannot be opened: No such file"):
        Ledger(tmp_path / "nowhere" / "l.jsonl", BUDGET)


def test_ledger__without_privacy_there_is_no_limit_but_the_planned_rounds(tmp_path: Path) -> None:
    budget = Budget(math.inf, 1e-3, "pld", 2)
    ledger = Ledger(tmp_path / "l.jsonl", budget)
    ledger.spend(1, PoissonSampled(0.1, Gaussian(0.0)), replay=False)
    assert ledger.epsilon() == math.inf


def three(path: Path) -> Ledger:
    ledger = Ledger(path, BUDGET, "about")
    for t in (1, 2, 3):
        ledger.spend(t, EVENT, replay=False)
    return ledger


def test_ledger__every_single_byte_change_in_a_fuzz_of_1000_edits_is_found(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    three(path)
    whole, dice = path.read_bytes(), random.Random(8)
    places = [*range(len(whole)), *(dice.randrange(len(whole)) for _ in range(1000))][-max(1000, len(whole)) :]
    for place in places:
        edited = bytearray(whole)
        edited[place] = dice.choice([byte for byte in range(256) if byte != whole[place]])
        path.write_bytes(edited)
        with pytest.raises(ChainError):
            open_ledger(path)
    path.write_bytes(whole)
    assert len(open_ledger(path).links) == 4


def test_ledger__one_cut_at_any_byte_is_not_the_one_that_was_remembered(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    anchor = three(path).anchor()
    demand_anchor(path, anchor, "the checkpoint")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ChainError, match="cut or replaced"):
            demand_anchor(path, anchor, "the checkpoint")


def test_ledger__moved_dropped_repeated_and_foreign_lines_are_found(tmp_path: Path) -> None:
    path, other = tmp_path / "l.jsonl", tmp_path / "other.jsonl"
    anchor = three(path).anchor()
    three(other)
    a, b, c, d = path.read_bytes().splitlines(keepends=True)
    foreign = other.read_bytes().splitlines(keepends=True)[-1]
    for lines in ([a, c, b, d], [a, b, d], [a, b, b, c, d], [b, c, d], [a, b, c, d, foreign], [d, c, b, a]):
        path.write_bytes(b"".join(lines))
        with pytest.raises(ChainError, match="does not follow"):
            open_ledger(path)
    path.write_bytes(a + b + c)  # a shorter chain looks whole; an anchor knows better
    assert len(open_ledger(path).links) == 3
    with pytest.raises(ChainError, match="cut or replaced"):
        demand_anchor(path, anchor, "the summary")


def test_invariant_6__a_line_cut_short_counts_as_a_release(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    three(path)
    for lost in (1, 40, 150):
        whole = path.read_bytes()
        path.write_bytes(whole[:-lost])
        with pytest.raises(ChainError, match="in the middle of a line"):
            open_ledger(path)
        ledger = Ledger(path, BUDGET, "about")
        assert len(ledger.spends()) == 2
        with pytest.raises(PrivacyError, match="the budget is spent: 3 releases"):
            ledger.demand_room(3, EVENT, replay=False)
        assert [round_ for round_, _ in open_and_read(path)] == [1, 2, 3]
        assert b"cut short" in path.read_bytes()
        path.write_bytes(whole)


def open_and_read(path: Path) -> list[tuple[int, object]]:
    open_ledger(path)
    return Ledger(path, BUDGET).spends()


def test_ledger__a_first_line_cut_short_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    Ledger(path, BUDGET)
    path.write_bytes(path.read_bytes()[:30])
    assert Ledger(path, BUDGET).spends() == []
    open_ledger(path)


def test_ledger__two_writers_take_turns(tmp_path: Path) -> None:
    budget = Budget(math.inf, 1e-3, "pld", 1000)
    ledgers = [Ledger(tmp_path / "l.jsonl", budget) for _ in range(2)]

    def write(ledger: Ledger) -> None:
        for t in range(25):
            ledger.spend(t, EVENT, replay=False)

    threads = [threading.Thread(target=write, args=(ledger,)) for ledger in ledgers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(open_ledger(tmp_path / "l.jsonl").links) == 51


def test_ledger__one_that_becomes_shorter_during_a_run_stops_it(tmp_path: Path) -> None:
    ledger = three(tmp_path / "l.jsonl")
    os.truncate(ledger.path, 10)
    with pytest.raises(ChainError, match="became shorter"):
        ledger.spend(4, EVENT, replay=False)


def test_ledger__one_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    """Reading 20 GB took all memory and ended in a traceback."""
    ledger = three(tmp_path / "l.jsonl")
    os.truncate(ledger.path, 2**30 + 1)  # without content: it takes no room on the disk
    for read in (ledger.spends, lambda: open_ledger(ledger.path)):
        with pytest.raises(RunError, match="not a regular file of at most 1 GiB"):
            read()


def test_ledger__of_another_configuration_is_refused(tmp_path: Path) -> None:
    three(tmp_path / "l.jsonl")
    with pytest.raises(PrivacyError, match="another configuration"):
        Ledger(tmp_path / "l.jsonl", BUDGET, "else")
