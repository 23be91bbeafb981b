"""A population has one budget, whatever folder and process spends it, and however they end (docs/populations.md)."""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedblur.core import files
from fedblur.core.errors import ConfigError, PrivacyError, RunError
from fedblur.privacy import accounting, events, populations, totals
from fedblur.privacy.events import Composed, FixedSizeSampled, Gaussian, PoissonSampled, PrivateSelection, SelfComposed
from fedblur.privacy.ledger import Budget, Chain, Ledger, Randomness, read_spends
from fedblur.privacy.population_account import Account, covers
from fedblur.privacy.populations import Limit, Population, composed, every, ledger_id, of_run

DELTA = 1e-5
EVENT = Gaussian(8.0)  # ten of these: epsilon 1.6
SAMPLED = PoissonSampled(0.1, Gaussian(1.0))


class Died(BaseException):
    """A process that was killed here."""


@pytest.fixture
def crowd(tmp_path: Path) -> Population:
    return Population("crowd", tmp_path / "state")


def epsilon(count: int, event: events.Event = EVENT) -> float:
    return accounting.epsilon(event, count, DELTA)


def opened(
    folder: Path,
    population: Population,
    rounds: int = 5,
    event: events.Event = EVENT,
    source: Randomness = "operating system",
) -> Ledger:
    """Open the ledger of a run that may make so many releases."""
    folder.mkdir(parents=True, exist_ok=True)
    account = Account(population, event, rounds, "run", DELTA, source)
    return Ledger(folder / "ledger.jsonl", Budget(math.inf, DELTA, "rdp", rounds), "about", source, account=account)


def spend(ledger: Ledger, *rounds: int, event: events.Event = EVENT, replay: bool = False) -> None:
    for round_ in rounds:
        ledger.demand_room(round_, event, replay)
        ledger.spend(round_, event, replay)


def rows(folder: Path) -> int:
    return len(read_spends(Chain(folder / "ledger.jsonl").read()))


def entry(population: Population, folder: Path) -> Any:
    found = population.find(ledger_id(_chain(folder)))
    assert found is not None
    return found


def _chain(folder: Path) -> Chain:
    chain = Chain(folder / "ledger.jsonl")
    chain.read()
    return chain


# --- the budget ---


def test_reservation__holds_the_whole_plan_before_the_first_release(crowd: Population, tmp_path: Path) -> None:
    crowd.set_limit(Limit(epsilon(10), DELTA))
    opened(tmp_path / "a", crowd, 6)
    assert (entry(crowd, tmp_path / "a").allowed, entry(crowd, tmp_path / "a").spent) == (6, 0)
    with pytest.raises(PrivacyError, match=r"population crowd has a budget of ε = .* 1 other run spent ε = 0"):
        with_lock_of_the_first_run(crowd, tmp_path / "a", lambda: opened(tmp_path / "b", crowd, 5))
    assert not (tmp_path / "b" / "ledger.jsonl").exists()
    spend(opened(tmp_path / "c", crowd, 4), 1, 2, 3, 4)
    assert crowd.total().runs == 1


def with_lock_of_the_first_run(population: Population, run: Path, act: Callable[[], object]) -> None:
    """Act while the run's folder is held, as it is while the run is computed."""
    from fedblur.core.files import locked

    with locked(run / ".lock") as mine:
        assert mine
        act()


def test_refusal__names_population_budget_what_is_spent_and_the_ways_out(crowd: Population, tmp_path: Path) -> None:
    crowd.set_limit(Limit(epsilon(10), DELTA))
    spend(opened(tmp_path / "a", crowd, 8), *range(1, 9))
    with pytest.raises(PrivacyError) as refused:
        opened(tmp_path / "b", crowd, 3)
    message = str(refused.value)
    assert "\n" not in message
    facts = ("population crowd", "budget of ε = 1.", "1 other run spent ε = 1.", "3 releases would bring it to ε = 1.")
    for words in (*facts, "lower epsilon or rounds", "fedblur population budget crowd"):
        assert words in message, words


def test_budget__may_be_used_to_the_last_release_and_not_beyond(crowd: Population, tmp_path: Path) -> None:
    crowd.set_limit(Limit(epsilon(10), DELTA))
    for name in "abcde":
        spend(opened(tmp_path / name, crowd, 2), 1, 2)
    with pytest.raises(PrivacyError, match="5 other runs"):
        opened(tmp_path / "f", crowd, 1)
    assert crowd.total().epsilon == pytest.approx(epsilon(10))


def test_budget__that_was_lowered_stops_a_run_that_goes_on(crowd: Population, tmp_path: Path) -> None:
    ledger = opened(tmp_path / "a", crowd, 5)
    spend(ledger, 1, 2)
    crowd.set_limit(Limit(epsilon(4), DELTA))
    with pytest.raises(PrivacyError, match="would bring it to"):
        spend(ledger, 3)
    assert rows(tmp_path / "a") == 2
    crowd.set_limit(Limit(epsilon(5), DELTA))
    spend(ledger, 3, 4, 5)


def test_population__without_a_budget_refuses_nothing_and_knows_the_total(crowd: Population, tmp_path: Path) -> None:
    for name in "abc":
        spend(opened(tmp_path / name, crowd, 100), 1, 2)
    total = crowd.total()
    assert (total.runs, total.budget) == (3, None)
    assert total.epsilon == pytest.approx(epsilon(6))
    assert total.reserved == pytest.approx(epsilon(300))


@pytest.mark.parametrize("source", ["seed", None])
def test_noise__that_is_not_known_to_be_secret_counts_as_infinite(
    crowd: Population, tmp_path: Path, source: Randomness | None
) -> None:
    account = Account(crowd, EVENT, 1, "run", DELTA, source or "unknown")
    ledger = Ledger(_made(tmp_path / "a"), Budget(math.inf, DELTA, "rdp", 1), "about", source, account=account)
    spend(ledger, 1)
    assert crowd.total().epsilon == math.inf
    crowd.set_limit(Limit(100.0, DELTA))
    with pytest.raises(PrivacyError, match="the run in .*a is .*: ε = ∞"):
        opened(tmp_path / "b", crowd, 1)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder / "ledger.jsonl"


def test_run__without_noise_is_refused_where_a_budget_is_set(crowd: Population, tmp_path: Path) -> None:
    crowd.set_limit(Limit(100.0, DELTA))
    with pytest.raises(PrivacyError, match="would bring it to ε = ∞"):
        opened(tmp_path / "a", crowd, 1, Gaussian(0.0))


def test_seeded_replay__is_the_same_release_and_counts_once(crowd: Population, tmp_path: Path) -> None:
    ledger = opened(tmp_path / "a", crowd, 3, source="seed")
    spend(ledger, 1, 2, 1, 2, 1, replay=True)
    assert (rows(tmp_path / "a"), entry(crowd, tmp_path / "a").spent) == (2, 2)


def test_neighbours__of_two_kinds_are_not_mixed_where_a_budget_is_set(crowd: Population, tmp_path: Path) -> None:
    crowd.set_limit(Limit(100.0, DELTA))
    spend(opened(tmp_path / "a", crowd, 1), 1)
    with pytest.raises(PrivacyError, match="no accountant has a bound"):
        opened(tmp_path / "b", crowd, 1, FixedSizeSampled(100, 10, Gaussian(5.0)))


# --- composition ---


def test_total__is_the_composition_that_one_would_make_by_hand(crowd: Population, tmp_path: Path) -> None:
    spend(opened(tmp_path / "a", crowd, 9, SAMPLED), *range(1, 8), event=SAMPLED)
    spend(opened(tmp_path / "b", crowd, 9, SAMPLED), *range(1, 4), event=SAMPLED)
    spend(opened(tmp_path / "c", crowd, 9), 1, 2)
    by_hand = Composed((SelfComposed(SAMPLED, 10), SelfComposed(EVENT, 2)))
    each = [accounting.epsilon(by_hand, 1, DELTA, name) for name in accounting.ACCOUNTANTS]
    made = composed(crowd.entries(), made=True)
    assert [totals.spent(made, DELTA, name) for name in accounting.ACCOUNTANTS] == pytest.approx(each, rel=1e-9)
    assert crowd.total().epsilon == pytest.approx(min(each), rel=1e-9)
    reserved = Composed((SelfComposed(SAMPLED, 18), SelfComposed(EVENT, 9)))
    each = [accounting.epsilon(reserved, 1, DELTA, name) for name in accounting.ACCOUNTANTS]
    assert crowd.total().reserved == pytest.approx(min(each), rel=1e-9)


def test_total__of_releases_that_pld_does_not_know_is_by_rdp(crowd: Population, tmp_path: Path) -> None:
    search = PrivateSelection((SelfComposed(EVENT, 3),), 0.0, 3.0)
    spend(opened(tmp_path / "a", crowd, 1, search), 1, event=search)
    spend(opened(tmp_path / "b", crowd, 2), 1, 2)
    by_hand = Composed((SelfComposed(search, 1), SelfComposed(EVENT, 2)))
    assert crowd.total().epsilon == accounting.epsilon(by_hand, 1, DELTA, "rdp")


def test_total__of_a_hundred_equal_runs_is_one_composition(
    crowd: Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, int]] = []
    real = accounting._spent
    monkeypatch.setattr(accounting, "_spent", lambda *given: asked.append(given[:2]) or real(*given))
    for number in range(100):
        spend(opened(tmp_path / str(number), crowd, 1, SAMPLED), 1, event=SAMPLED)
    crowd.total()
    assert {event for event, _ in asked} == {SAMPLED}
    assert {count for _, count in asked} == {100}


def test_adaptive_budget__counts_a_few_orders_that_follow_from_the_budget_alone(
    crowd: Population, tmp_path: Path
) -> None:
    orders = totals.orders_for(2.0, DELTA)
    assert len(set(orders)) == 3
    plan = SelfComposed(EVENT, 5)
    cost = totals.spent_adaptively(plan, orders, DELTA)
    by_hand = [
        5 * order / (2 * 8.0**2) + math.log1p(-1 / order) - math.log(DELTA / 3 * order) / (order - 1)
        for order in orders
    ]
    assert cost == pytest.approx(min(by_hand), rel=1e-9)
    assert cost is not None
    assert cost > accounting.epsilon(plan, 1, DELTA, "rdp") > accounting.epsilon(plan, 1, DELTA)
    most = max(n for n in range(1, 40) if (totals.spent_adaptively(SelfComposed(EVENT, n), orders, DELTA) or 9) <= 2.0)
    crowd.set_limit(Limit(2.0, DELTA, adaptive=True))
    assert epsilon(most + 1) < 2.0
    with pytest.raises(PrivacyError, match="would bring it to"):
        opened(tmp_path / "a", crowd, most + 1)
    opened(tmp_path / "b", crowd, most)


# --- kills ---


@pytest.mark.parametrize("at", ["note", "row"])
def test_kill__around_the_population_s_note_leaves_no_release_uncounted(
    crowd: Population, tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(tmp_path / "a", crowd, 5)
    spend(ledger, 1, 2)

    def dying(*given: object) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(Population if at == "note" else Chain, "write" if at == "note" else "append", dying)
        with pytest.raises(Died):
            spend(ledger, 3)
    assert rows(tmp_path / "a") == 2
    assert entry(crowd, tmp_path / "a").spent == (2 if at == "note" else 3)
    again = opened(tmp_path / "a", crowd, 5)
    assert len(again.spends()) == entry(crowd, tmp_path / "a").spent
    if at == "row":
        assert "cut short" in (tmp_path / "a" / "ledger.jsonl").read_text().splitlines()[-1]
    spend(again, *range(rows(tmp_path / "a") + 1, 6))
    with pytest.raises(PrivacyError, match="the budget is spent"):
        spend(again, 6)


def test_kill__in_the_middle_of_a_row_is_counted_once(crowd: Population, tmp_path: Path) -> None:
    spend(opened(tmp_path / "a", crowd, 5), 1, 2)
    path = tmp_path / "a" / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-20])  # noted, and its row was cut short
    again = opened(tmp_path / "a", crowd, 5)
    spend(again, 3)
    assert (rows(tmp_path / "a"), entry(crowd, tmp_path / "a").spent) == (3, 3)


def test_kill__in_a_release_that_is_repeated_as_it_was_counts_once(
    crowd: Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Votes and seeded rounds: what was drawn is kept, and paid for when the process comes back."""
    ledger = opened(tmp_path / "a", crowd, 1)
    ledger.demand_room(1, EVENT, replay=True)
    with monkeypatch.context() as patch:
        patch.setattr(Chain, "append", lambda *given: (_ for _ in ()).throw(Died()))
        with pytest.raises(Died):
            ledger.spend(1, EVENT, replay=True)
    opened(tmp_path / "a", crowd, 1).spend(1, EVENT, replay=True)
    assert (rows(tmp_path / "a"), entry(crowd, tmp_path / "a").spent) == (1, 1)


def test_ledger__makes_no_release_but_the_one_that_was_reserved(crowd: Population, tmp_path: Path) -> None:
    ledger = opened(tmp_path / "a", crowd, 5)
    with pytest.raises(PrivacyError, match="did not reserve"):
        ledger.spend(1, Gaussian(1.0), False)
    assert (rows(tmp_path / "a"), entry(crowd, tmp_path / "a").spent) == (0, 0)


def test_note__is_on_disk_before_the_ledger_s_row(
    crowd: Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(tmp_path / "a", crowd, 5)
    seen = []
    real = Chain.append

    def watching(chain: Chain, body: Any) -> None:
        seen.append((entry(crowd, tmp_path / "a").spent, rows(tmp_path / "a")))
        real(chain, body)

    monkeypatch.setattr(Chain, "append", watching)
    spend(ledger, 1, 2)
    assert seen == [(1, 0), (2, 1)]


# --- ledgers that do not continue what is known ---


def test_rolled_back_ledger__is_refused_at_its_next_resume_and_spend(crowd: Population, tmp_path: Path) -> None:
    ledger = opened(tmp_path / "a", crowd, 9)
    spend(ledger, 1, 2)
    kept = (tmp_path / "a" / "ledger.jsonl").read_bytes()
    spend(ledger, 3, 4)
    (tmp_path / "a" / "ledger.jsonl").write_bytes(kept)
    with pytest.raises(PrivacyError, match="population crowd remembers 4 releases, it has 2"):
        opened(tmp_path / "a", crowd, 9)
    assert rows(tmp_path / "a") == 2


def test_ledger__that_was_rolled_back_by_one_row_gets_it_back(crowd: Population, tmp_path: Path) -> None:
    """As after a kill between note and row; whichever it was, the release that was made has a row again."""
    ledger = opened(tmp_path / "a", crowd, 9)
    spend(ledger, 1, 2)
    kept = (tmp_path / "a" / "ledger.jsonl").read_bytes()
    spend(ledger, 3)
    (tmp_path / "a" / "ledger.jsonl").write_bytes(kept)
    assert len(opened(tmp_path / "a", crowd, 9).spends()) == entry(crowd, tmp_path / "a").spent == 3


@pytest.mark.parametrize("lead", [1, 2, 3])
def test_copied_folder__cannot_be_continued_beside_the_original(crowd: Population, tmp_path: Path, lead: int) -> None:
    spend(opened(tmp_path / "a", crowd, 20), 1, 2)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    first = opened(tmp_path / "a", crowd, 20)
    spend(first, *range(3, 3 + lead))
    made = 2 + lead
    if lead > 1:
        with pytest.raises(PrivacyError, match="copied and continued elsewhere"):
            opened(tmp_path / "copy", crowd, 20)
    else:
        copy = opened(tmp_path / "copy", crowd, 20)  # its new row counts the release that the original made
        spend(copy, 4)
        made += 1
        with pytest.raises(PrivacyError, match="copied and continued elsewhere"):
            spend(first, 4)
    assert entry(crowd, tmp_path / "copy").spent == made


def test_moved_folder__goes_on_where_it_is_now(crowd: Population, tmp_path: Path) -> None:
    spend(opened(tmp_path / "a", crowd, 5), 1, 2)
    (tmp_path / "a").rename(tmp_path / "b")
    spend(opened(tmp_path / "b", crowd, 5), 3)
    assert entry(crowd, tmp_path / "b").run == str(tmp_path / "b")
    assert len(crowd.entries()) == 1


def test_state__that_was_restored_from_an_older_copy_learns_from_the_ledger(crowd: Population, tmp_path: Path) -> None:
    spend(opened(tmp_path / "a", crowd, 9), 1, 2)
    shutil.copytree(crowd.folder, tmp_path / "backup")
    spend(opened(tmp_path / "a", crowd, 9), 3, 4)
    shutil.rmtree(crowd.folder)
    shutil.copytree(tmp_path / "backup", crowd.folder)
    spend(opened(tmp_path / "a", crowd, 9), 5)
    assert entry(crowd, tmp_path / "a").spent == 5


# --- what is freed ---


def test_settled_run__frees_what_it_did_not_use_and_must_ask_again(crowd: Population, tmp_path: Path) -> None:
    crowd.set_limit(Limit(epsilon(10), DELTA))
    ledger = opened(tmp_path / "a", crowd, 8)
    spend(ledger, 1, 2)
    ledger.settle()
    assert (entry(crowd, tmp_path / "a").reserved, entry(crowd, tmp_path / "a").state) == (2, "complete")
    spend(opened(tmp_path / "b", crowd, 8), *range(1, 9))
    with pytest.raises(PrivacyError, match="would bring it to"):
        spend(ledger, 3)
    assert crowd.total().epsilon == pytest.approx(epsilon(10))


def test_closed_run__frees_what_it_did_not_use_and_is_never_resumed(crowd: Population, tmp_path: Path) -> None:
    crowd.set_limit(Limit(epsilon(10), DELTA))
    ledger = opened(tmp_path / "a", crowd, 8)
    spend(ledger, 1, 2)
    crowd.close(entry(crowd, tmp_path / "a"))
    for act in (lambda: spend(ledger, 3), lambda: opened(tmp_path / "a", crowd, 8)):
        with pytest.raises(PrivacyError, match="was given up"):
            act()
    spend(opened(tmp_path / "b", crowd, 8), *range(1, 9))
    assert crowd.total().epsilon == pytest.approx(epsilon(10))


@pytest.mark.parametrize("how", ["the folder is gone", "the run never began"])
def test_reservation__of_a_run_that_released_nothing_is_freed_when_another_needs_it(
    crowd: Population, tmp_path: Path, how: str
) -> None:
    crowd.set_limit(Limit(epsilon(10), DELTA))
    first = opened(tmp_path / "a", crowd, 8)
    if how == "the folder is gone":
        shutil.rmtree(tmp_path / "a")
    second = opened(tmp_path / "b", crowd, 8)
    spend(second, *range(1, 9))
    if how == "the run never began":  # it was only slow: safe, because it must ask again
        with pytest.raises(PrivacyError, match="would bring it to"):
            spend(first, 1)


def test_reservation__of_a_killed_run_that_has_released_is_kept(crowd: Population, tmp_path: Path) -> None:
    crowd.set_limit(Limit(epsilon(10), DELTA))
    spend(opened(tmp_path / "a", crowd, 8), 1)
    shutil.rmtree(tmp_path / "a")  # a copy may exist
    with pytest.raises(PrivacyError, match="would bring it to"):
        opened(tmp_path / "b", crowd, 3)


def test_adopted_run__counts_and_stops_those_that_have_no_room_any_more(crowd: Population, tmp_path: Path) -> None:
    crowd.set_limit(Limit(epsilon(10), DELTA))
    (tmp_path / "old").mkdir()
    old = Ledger(tmp_path / "old" / "ledger.jsonl", Budget(math.inf, DELTA, "rdp", 9), "about", "operating system")
    spend(old, *range(1, 8))
    ledger = opened(tmp_path / "a", crowd, 5)
    spend(ledger, 1)
    with crowd.locked():
        assert "7 releases are counted" in crowd.adopt(tmp_path / "old" / "ledger.jsonl")
        assert "is known" in crowd.adopt(tmp_path / "old" / "ledger.jsonl")
    with pytest.raises(PrivacyError, match="would bring it to"):
        spend(ledger, 2)
    assert crowd.total().epsilon == pytest.approx(epsilon(8))


def test_population__never_forgets_a_release(crowd: Population, tmp_path: Path) -> None:
    spend(opened(tmp_path / "a", crowd, 5), 1)
    with pytest.raises(PrivacyError, match="never forgets"):
        crowd.forget(entry(crowd, tmp_path / "a"))


# --- state ---


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
def test_state__is_for_its_owner_alone(crowd: Population, tmp_path: Path) -> None:
    os.umask(os.umask(0))
    crowd.set_limit(Limit(9.0, DELTA))
    spend(opened(tmp_path / "a", crowd, 5), 1)
    for path in (crowd.folder.parent, crowd.folder, *crowd.folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.skipif(os.name == "nt", reason="no such locks on Windows")
def test_state__is_read_and_written_by_one_process_at_a_time(
    crowd: Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    held = []

    def locked() -> bool:
        with (crowd.folder / ".lock").open("ab") as file:  # as another process would
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    for name in ("find", "write", "demand_room"):
        real = getattr(Population, name)
        watched = lambda self, *given, real=real: (held.append(locked()), real(self, *given))[1]  # noqa: E731
        monkeypatch.setattr(Population, name, watched)
    spend(opened(tmp_path / "a", crowd, 5), 1, 2)
    assert len(held) > 5
    assert all(held)
    assert not locked()


def test_state__is_forced_to_the_disk_before_the_release(
    crowd: Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(tmp_path / "a", crowd, 5)
    spend(ledger, 1)
    order: list[str] = []
    sync, append, replace_ = os.fsync, Chain.append, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (order.append("sync"), sync(file))[1])
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("replace"), replace_(*names))[1])
    monkeypatch.setattr(Chain, "append", lambda chain, body: (order.append("row"), append(chain, body))[1])
    ledger.spend(2, EVENT, False)
    assert order[:4] == ["sync", "replace", "sync", "row"]  # the file, its name, the folder, then the ledger's row


@pytest.mark.parametrize("broken", ["", "[]", '{"ledger": 3}', "{"])
def test_state__that_is_broken_is_refused_never_taken_for_nothing(
    crowd: Population, tmp_path: Path, broken: str
) -> None:
    spend(opened(tmp_path / "a", crowd, 5), 1)
    (path,) = (crowd.folder / "runs").glob("*.json")
    path.write_text(broken)
    crowd.set_limit(Limit(9.0, DELTA))
    with pytest.raises(RunError, match=r"runs/.*restore it"):
        opened(tmp_path / "b", crowd, 5)
    shutil.rmtree(crowd.folder)
    crowd.set_limit(Limit(9.0, DELTA))
    (crowd.folder / "budget.json").write_text(broken)
    with pytest.raises(RunError, match=r"budget\.json"):
        opened(tmp_path / "b", crowd, 5)


@pytest.mark.parametrize(("file", "old", "new"), [("runs", '"spent": 3', '"spent": 1'), ("budget.json", ".5", ".7")])
def test_state__of_which_a_digit_changed_is_refused(
    crowd: Population, tmp_path: Path, file: str, old: str, new: str
) -> None:
    """A count that became smaller would be a release that nobody counts."""
    crowd.set_limit(Limit(2.5, DELTA))
    spend(opened(tmp_path / "a", crowd, 3), 1, 2, 3)
    (path,) = [path for path in crowd.folder.rglob("*.json") if file in str(path)]
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(RunError, match="its digest does not match; restore it"):
        opened(tmp_path / "b", crowd, 1)
    path.write_text(path.read_text().replace("digest", "Digest"))
    with pytest.raises(RunError, match="its digest does not match; restore it"):
        opened(tmp_path / "b", crowd, 1)


def test_state__of_which_a_file_is_gone_is_refused(crowd: Population, tmp_path: Path) -> None:
    for name in "ab":
        spend(opened(tmp_path / name, crowd, 3), 1, 2)
    (crowd.folder / "runs" / f"{entry(crowd, tmp_path / 'a').ledger}.json").unlink()
    crowd.set_limit(Limit(2.5, DELTA))
    for act in (crowd.entries, crowd.total, lambda: opened(tmp_path / "c", crowd, 1)):
        with pytest.raises(RunError, match="is missing, and what it held is unknown; restore it"):
            act()
    (crowd.folder / "budget.json").unlink()
    with pytest.raises(RunError, match=r"budget\.json is missing"):
        crowd.limit()


@pytest.mark.parametrize("at", [1, 2])
def test_state__of_a_new_run_that_is_killed_has_no_file_that_is_missing(
    crowd: Population, tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd.set_limit(Limit(epsilon(10), DELTA))
    left = [at]
    real = populations._write

    def dying(*given: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Died
        real(*given)

    monkeypatch.setattr(populations, "_write", dying)
    with pytest.raises(Died):
        opened(tmp_path / "a", crowd, 8)
    monkeypatch.setattr(populations, "_write", real)
    spend(opened(tmp_path / "b", crowd, 8), 1)  # what the first one reserved and never began is freed


def test_state__has_its_folder_s_name_on_disk_before_the_first_release(
    crowd: Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure took a population's folder, and all that was counted in it, though results had left."""
    synced: list[Path] = []
    real = files.sync_folder
    monkeypatch.setattr(files, "sync_folder", lambda folder: (synced.append(folder), real(folder))[1])
    opened(tmp_path / "a", crowd, 5)
    assert {crowd.folder, crowd.folder.parent, crowd.folder.parent.parent} <= {*synced}


def test_state__that_cannot_be_written_is_one_line_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("FEDBLUR_POPULATIONS", str(tmp_path / "a file"))
    with pytest.raises(RunError, match=r"a file cannot be made: .*; set FEDBLUR_POPULATIONS to a folder"):
        opened(tmp_path / "a", Population("crowd"), 5)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "a" * 65, "ward 3"])
def test_name__that_is_no_folder_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="population="):
        Population(name)


def test_run__is_found_by_its_folder_wherever_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBLUR_POPULATIONS", str(tmp_path / "state"))
    population = Population("crowd")
    spend(opened(tmp_path / "a", population, 5), 1)
    assert [each.name for each in every()] == ["crowd"]
    assert [each.spent for _, each in of_run(tmp_path / "a")] == [1]
    shutil.rmtree(tmp_path / "a")
    assert [each.spent for _, each in of_run(tmp_path / "a")] == [1]
    assert of_run(tmp_path / "b") == []


def test_trial__is_free_only_where_a_search_has_paid_for_it(tmp_path: Path) -> None:
    search = PrivateSelection((SelfComposed(EVENT, 3),), 0.0, 3.0)
    ledger = Ledger(_made(tmp_path / "s"), Budget(math.inf, DELTA, "rdp", 1), "about", "operating system")
    with pytest.raises(PrivacyError, match="not the ledger of a search"):
        covers(ledger.path, EVENT, 3)
    spend(ledger, 1, event=search)
    assert covers(ledger.path, EVENT, 3)
    for event, rounds in ((EVENT, 4), (Gaussian(7.0), 3)):
        with pytest.raises(PrivacyError, match="not the ledger of a search"):
            covers(ledger.path, event, rounds)


def test_entry__is_plain_json_that_names_who_spent_what(crowd: Population, tmp_path: Path) -> None:
    spend(opened(tmp_path / "a", crowd, 5), 1)
    (path,) = (crowd.folder / "runs").glob("*.json")
    table = json.loads(path.read_text())
    assert table["path"] == str(tmp_path / "a" / "ledger.jsonl")
    assert table["kind"] == "run"
    assert table["user"]
    assert events.from_json(table["event"]) == EVENT
    assert replace(entry(crowd, tmp_path / "a"), spent=7).reserved == 7
